"""Data sets that tests name as tests.measure.sources.factories:NAME."""

import io
import itertools

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

RNG = np.random.default_rng(0)
X = RNG.normal(size=(11, 2, 3)).astype(np.float32)
IDS = RNG.integers(0, 9, size=(11, 4))
Y = RNG.integers(0, 5, size=11)
PIXELS = RNG.integers(0, 256, size=(5, 8, 10, 3), dtype=np.uint8)
HERE = "tests.measure.sources.factories"


COUNT = len(X)


class Map(Dataset):
    """By place, what a function makes."""

    def __init__(self, item, count=COUNT):
        self.item, self.count = item, count

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        return self.item(place)


class Stream(IterableDataset):
    """In order, what a function makes."""

    def __init__(self, item, count=COUNT):
        self.item, self.count = item, count

    def __iter__(self):
        return map(self.item, range(self.count))


def pairs():
    return Map(lambda place: (torch.from_numpy(X[place]), int(Y[place])))


def tensors():
    return TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


def records():
    return Map(lambda place: {"input": X[place], "label": Y[place]})


def named():
    return Map(lambda place: {"image": X[place], "ids": IDS[place], "note": "text"})


def unlabelled():
    return TensorDataset(torch.from_numpy(X))


def array():
    return X


def stream():
    return Stream(lambda place: (X[place], Y[place]))


def generator():
    return (list(pair) for pair in zip(X, Y, strict=True))


def strange_label():
    return Map(lambda place: {"input": X[place], "label": X[place]})


def encoded(place):
    file = io.BytesIO()
    Image.fromarray(PIXELS[place]).save(file, "PNG")
    return file.getvalue()


def pictures():
    return Map(lambda place: (Image.fromarray(PIXELS[place]), place), len(PIXELS))


def picture_bytes():
    return Map(
        lambda place: {"input": {"bytes": encoded(place), "path": None}, "label": place},
        len(PIXELS),
    )


def picture_stream():
    return Stream(lambda place: (encoded(place), place), len(PIXELS))


def picture_paths():
    return Map(lambda place: (f"{place}.png", place), len(PIXELS))


_turn = itertools.count()


def changing():
    return Map(lambda place: X[place] + (next(_turn) if place == 7 else 0))


def relabelled():
    return Map(lambda place: (X[place], next(_turn) if place == 3 else 0))


def other_in_each_process():
    import os

    return Map(lambda place: X[place].astype(np.float64) if os.getpid() != PID else X[place])


PID = 0


def zeros(count):
    return Map(lambda place: np.zeros(64, np.float32), count)


def few():
    return zeros(400)


def many():
    return zeros(4000)


def streamed_few():
    return Stream(lambda place: np.zeros(64, np.float32), 400)


def streamed_many():
    return Stream(lambda place: np.zeros(64, np.float32), 4000)


def scalars():
    """Of which many are few bytes."""
    return Map(np.float32, 2000)


def at(place, spoiled):
    """The set with one other item."""
    return Map(lambda i: spoiled if i == place else X[i])


class Raising(Map):
    """Fails at one sample."""

    def __init__(self, error, place=4):
        super().__init__(self.fail, COUNT)
        self.error, self.place = error, place

    def fail(self, i):
        if i == self.place:
            raise self.error
        return X[i]


def raising():
    raise RuntimeError("no data here")


def loader():
    return DataLoader(unlabelled(), batch_size=4)


def failing():
    return Raising(ValueError("cannot decode"))


def deadly():
    """Ends the worker that comes to sample 8."""
    import os

    return Map(lambda place: os._exit(9) if place == 8 and os.getpid() != PID else X[place])
