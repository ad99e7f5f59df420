"""Data sets that tests open as tests.measure.sources.factories:NAME."""

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
    """A map-style data set of `count` items that a function makes."""

    def __init__(self, item, count=COUNT):
        self.item, self.count = item, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.item(index)


class Stream(IterableDataset):
    """An iterable data set of `count` items that a function makes."""

    def __init__(self, item, count=COUNT):
        self.item, self.count = item, count

    def __iter__(self):
        return map(self.item, range(self.count))


def pairs():
    return Map(lambda index: (torch.from_numpy(X[index]), int(Y[index])))


def tensors():
    return TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


def records():
    return Map(lambda index: {"input": X[index], "label": Y[index]})


def named():
    return Map(lambda index: {"image": X[index], "ids": IDS[index], "note": "text"})


def unlabelled():
    return TensorDataset(torch.from_numpy(X))


def array():
    return X


def stream():
    return Stream(lambda index: (X[index], Y[index]))


def generator():
    return (list(pair) for pair in zip(X, Y, strict=True))


def strange_label():
    return Map(lambda index: {"input": X[index], "label": X[index]})


def encode_png(index):
    file = io.BytesIO()
    Image.fromarray(PIXELS[index]).save(file, "PNG")
    return file.getvalue()


def pictures():
    return Map(lambda index: (Image.fromarray(PIXELS[index]), index), len(PIXELS))


def picture_bytes():
    return Map(
        lambda index: {"input": {"bytes": encode_png(index), "path": None}, "label": index},
        len(PIXELS),
    )


def picture_stream():
    return Stream(lambda index: (encode_png(index), index), len(PIXELS))


def picture_paths():
    return Map(lambda index: (f"{index}.png", index), len(PIXELS))


_read_count = itertools.count()


def changing():
    return Map(lambda index: X[index] + (next(_read_count) if index == 7 else 0))


def relabelled():
    return Map(lambda index: (X[index], next(_read_count) if index == 3 else 0))


def other_in_each_process():
    import os

    return Map(lambda index: X[index].astype(np.float64) if os.getpid() != PID else X[index])


PID = 0


def zeros(count):
    return Map(lambda index: np.zeros(64, np.float32), count)


def few():
    return zeros(400)


def many():
    return zeros(4000)


def streamed_few():
    return Stream(lambda index: np.zeros(64, np.float32), 400)


def streamed_many():
    return Stream(lambda index: np.zeros(64, np.float32), 4000)


def replace_item(index, item):
    """Return a data set of X with one replaced item."""
    return Map(lambda i: item if i == index else X[i])


class Raising(Map):
    """A data set that raises an error at one sample."""

    def __init__(self, error, index=4):
        super().__init__(self.fail, COUNT)
        self.error, self.index = error, index

    def fail(self, i):
        if i == self.index:
            raise self.error
        return X[i]


def raising():
    raise RuntimeError("no data here")


def loader():
    return DataLoader(unlabelled(), batch_size=4)


def failing():
    return Raising(ValueError("cannot decode"))


def deadly():
    """Return a data set that ends the worker process that reads sample 8."""
    import os

    return Map(lambda index: os._exit(9) if index == 8 and os.getpid() != PID else X[index])
