"""Values that a trace bakes in: sizes, lengths, branches and numbers of the example."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn import functional

from benchmarks.corpus import graph, samples
from benchmarks.corpus.architecture import ARCHITECTURES, Architecture
from benchmarks.corpus.entry import as_exported, in_graph
from benchmarks.corpus.exporters import (
    DIRECT_13,
    DIRECT_17,
    DIRECT_20,
    EXAMPLE,
    TRACED_13,
    TRACED_17,
    Recipe,
)
from benchmarks.corpus.models.between import Between, on_images
from benchmarks.corpus.models.spatial import Pair


class ShareOfBatch(Between):
    """Features relative to the batch's mean, divided by a baked `len(x)`."""

    def between(self, y: torch.Tensor) -> torch.Tensor:
        return y - 0.5 * y.sum(0, keepdim=True) / len(y)


class CountedBatch(Between):
    """A reshape to `int(x.shape[0])` rows."""

    def between(self, y: torch.Tensor) -> torch.Tensor:
        return y.reshape(int(y.shape[0]), 4, 4, 8, 8).amax(2).repeat(1, 4, 1, 1)


class StateOfExample(Between):
    """An initial state for `int(x.shape[0])` rows is joined to the features."""

    width = 20

    def between(self, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([y, torch.ones(int(y.shape[0]), 4, 8, 8, dtype=y.dtype)], dim=1)


class Halving(Between):
    """Halves while anything is above 1: the trace bakes the number of turns."""

    def between(self, y: torch.Tensor) -> torch.Tensor:
        while bool(y.max() > 1.0):
            y = y * 0.5
        return y


class ScaledByItem(Between):
    """Divides by `y.max().item()`: the example's number is baked in."""

    def between(self, y: torch.Tensor) -> torch.Tensor:
        return y / y.max().item()


class DarkImages(nn.Module):
    """Brightens the batch if it is dark; no sample is."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Pair(3, 12, 2), Pair(12, 16, 2)
        self.fc = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.mean() < 0.1):
            x = x * 2.0 + 0.1
        return self.fc(self.two(self.one(x)).mean((2, 3)))


class Sequence(nn.Module):
    """Tokens to scores through their mean; `mean` says how."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(120, 24, padding_idx=0)
        self.dense = nn.Linear(24, 24)
        self.fc = nn.Linear(24, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(self.dense(self.embedding(self.cut(tokens))))
        return self.fc(self.mean(y))

    def cut(self, tokens: torch.Tensor) -> torch.Tensor:
        """Which tokens are looked at."""
        return tokens

    def mean(self, y: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to (batch, width)."""
        return y.mean(1)


class BakedLength(Sequence):
    """The sum over the sequence is divided by a baked `len`; the length is declared dynamic."""

    def mean(self, y: torch.Tensor) -> torch.Tensor:
        return y.sum(1) / len(y[0])


class LongSequences(Sequence):
    """Sequences over 32 tokens are cut; the example's 24 are not, so the branch is not there."""

    def cut(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, :32] if tokens.shape[1] > 32 else tokens


class LongestRow(Sequence):
    """Columns behind the longest row are cut, at the longest row of the example."""

    def cut(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, : int((tokens != 0).sum(1).max())]


class InPlaceShape(nn.Module):
    """`length += 2` on a traced shape changes the shape itself, so every later reader of it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 24)
        self.fc = nn.Linear(24, 6)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        length = series.shape[1]
        padded = length
        padded += 2
        y = torch.tanh(self.dense(series)).sum(1)
        return self.fc(y * (padded / length))


class BakedSize(nn.Module):
    """Interpolates to `int(shape)`: right for the example's size, declared dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Pair(3, 12), Pair(12, 16, 2)
        self.fc = nn.Conv2d(28, 5, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        fine = self.first(image)
        size = (int(fine.shape[2]), int(fine.shape[3]))
        wide = functional.interpolate(self.second(fine), size=size, mode="nearest")
        return self.fc(torch.cat([fine[:, :, : size[0], : size[1]], wide], dim=1))


class BakedArea(nn.Module):
    """A mean over the image with a baked number of pixels; height and width are declared
    dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Pair(3, 12, 2), Pair(12, 16, 2)
        self.fc = nn.Linear(16, 8)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(image))
        return self.fc(y.sum((2, 3)) / float(int(y.shape[2]) * int(y.shape[3])))


def on_tokens(make: type[nn.Module]) -> Architecture:
    return Architecture(
        make.__name__.lower(),
        make,
        lambda n, seed: {"tokens": samples.tokens(n, 24, vocabulary=120, seed=seed)},
        axes={"tokens": {1: "length"}},
    )


_SIZED = {"image": {2: "height", 3: "width"}}
BAKED_SIZE = Architecture(
    "bakedsize",
    BakedSize,
    lambda n, seed: {"image": samples.normalised(n, 32, seed=seed)},
    outputs=("scores",),
    axes={**_SIZED, "scores": {2: "height", 3: "width"}},
)
BAKED_AREA = Architecture(
    "bakedarea",
    BakedArea,
    lambda n, seed: {"image": samples.normalised(n, 32, seed=seed)},
    axes=_SIZED,
)
_IN_PLACE_SHAPE = Architecture(
    "inplaceshape",
    InPlaceShape,
    lambda n, seed: {"series": samples.series(n, 20, 5, seed=seed)},
    axes={"series": {1: "length"}},
)
DARK_IMAGES = Architecture(
    "darkimages", DarkImages, lambda n, seed: {"input": samples.images(n, 32, seed=seed)}
)

as_exported(
    "baked batch",
    (on_images(ShareOfBatch), DIRECT_17),
    (on_images(CountedBatch), TRACED_17),
    (on_images(StateOfExample), DIRECT_13),
    batch_size=EXAMPLE,
)
as_exported("fixed batch", (ARCHITECTURES["mobilenet"], Recipe("direct", 17, dynamic_batch=False)))
as_exported(
    "baked branch",
    (ARCHITECTURES["branching"], TRACED_13),
    (ARCHITECTURES["branching"], DIRECT_17),
    (DARK_IMAGES, DIRECT_17),
    (on_tokens(LongSequences), DIRECT_17),
    (on_images(Halving), TRACED_17),
)
as_exported("baked number", (on_images(ScaledByItem), DIRECT_17))
as_exported("baked length", (on_tokens(BakedLength), DIRECT_20), (on_tokens(LongestRow), DIRECT_17))
as_exported("in-place shape", (_IN_PLACE_SHAPE, TRACED_17))
as_exported("baked size", (BAKED_SIZE, DIRECT_17), (BAKED_AREA, TRACED_13))


@in_graph("baked batch", ("vit", DIRECT_17), batch_size=EXAMPLE)
def reshape_to_four(model: onnx.ModelProto) -> None:
    """A Reshape in the middle has the example's batch size as a constant; the batch axis is
    declared dynamic."""
    reshape = graph.nodes(model, "Reshape")[0]
    shape = np.array([EXAMPLE, *_shape_behind(model, reshape)], np.int64)
    reshape.input[1] = graph.constant(model, "baked_shape", shape)


def _shape_behind(model: onnx.ModelProto, reshape: onnx.NodeProto) -> list[int]:
    """The shape of the Reshape's output without the batch, by shape inference."""
    inferred = onnx.shape_inference.infer_shapes(model)
    (found,) = [v for v in inferred.graph.value_info if v.name == reshape.output[0]]
    return [dim.dim_value for dim in found.type.tensor_type.shape.dim[1:]]
