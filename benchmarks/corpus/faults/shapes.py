"""Values of the example that a trace makes constant: sizes, lengths, branches and numbers."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn import functional

from benchmarks.corpus import graph, samples
from benchmarks.corpus.architecture import ARCHITECTURES, Architecture, image_architecture
from benchmarks.corpus.entry import in_graph, register_exporter_fault
from benchmarks.corpus.exporters import (
    DIRECT_13,
    DIRECT_17,
    DIRECT_20,
    EXAMPLE,
    TRACED_13,
    TRACED_17,
    Recipe,
)
from benchmarks.corpus.models.between import MiddleOperation
from benchmarks.corpus.models.spatial import Pair


class ShareOfBatch(MiddleOperation):
    """A classifier that divides by `len(x)`, which the trace makes constant."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        return y - 0.5 * y.sum(0, keepdim=True) / len(y)


class CountedBatch(MiddleOperation):
    """A classifier that reshapes to `int(x.shape[0])` rows, which the trace makes constant."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        return y.reshape(int(y.shape[0]), 4, 4, 8, 8).amax(2).repeat(1, 4, 1, 1)


class StateOfExample(MiddleOperation):
    """A classifier that appends `int(x.shape[0])` rows of state, which the trace makes constant."""

    width = 20

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([y, torch.ones(int(y.shape[0]), 4, 8, 8, dtype=y.dtype)], dim=1)


class Halving(MiddleOperation):
    """A classifier that halves features while any is above 1; the trace fixes the iterations."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        while bool(y.max() > 1.0):
            y = y * 0.5
        return y


class ScaledByItem(MiddleOperation):
    """A classifier that divides by `y.max().item()`, which the trace makes constant."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        return y / y.max().item()


class DarkImages(nn.Module):
    """A classifier that brightens dark batches, which no sample is."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Pair(3, 12, 2), Pair(12, 16, 2)
        self.fc = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.mean() < 0.1):
            x = x * 2.0 + 0.1
        return self.fc(self.two(self.one(x)).mean((2, 3)))


class Sequence(nn.Module):
    """A token classifier over the mean of the features; subclasses override the mean or the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(120, 24, padding_idx=0)
        self.dense = nn.Linear(24, 24)
        self.fc = nn.Linear(24, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(self.dense(self.embedding(self.cut(tokens))))
        return self.fc(self.mean(y))

    def cut(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens that are used."""
        return tokens

    def mean(self, y: torch.Tensor) -> torch.Tensor:
        """Reduce (batch, length, width) to (batch, width)."""
        return y.mean(1)


class BakedLength(Sequence):
    """A token classifier that divides by `len`, which the trace makes constant."""

    def mean(self, y: torch.Tensor) -> torch.Tensor:
        return y.sum(1) / len(y[0])


class LongSequences(Sequence):
    """A token classifier that cuts sequences to 32 tokens, a branch that the example does not
    take.
    """

    def cut(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, :32] if tokens.shape[1] > 32 else tokens


class LongestRow(Sequence):
    """A token classifier that cuts columns after the longest row, which the trace makes
    constant.
    """

    def cut(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, : int((tokens != 0).sum(1).max())]


class InPlaceShape(nn.Module):
    """A classifier with `length += 2` on a traced shape, which also changes its later uses."""

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
    """A model that interpolates to `int(shape)`, which the trace makes constant."""

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
    """A classifier with a mean over a constant number of pixels, but a dynamic image size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Pair(3, 12, 2), Pair(12, 16, 2)
        self.fc = nn.Linear(16, 8)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(image))
        return self.fc(y.sum((2, 3)) / float(int(y.shape[2]) * int(y.shape[3])))


def token_architecture(make: type[nn.Module]) -> Architecture:
    return Architecture(
        make.__name__.lower(),
        make,
        lambda n, seed: {"tokens": samples.tokens(n, 24, vocabulary=120, seed=seed)},
        axes={"tokens": {1: "length"}},
    )


_IMAGE_AXES = {"image": {2: "height", 3: "width"}}
BAKED_SIZE = image_architecture(
    BakedSize,
    input_="image",
    outputs=("scores",),
    axes={**_IMAGE_AXES, "scores": {2: "height", 3: "width"}},
)
BAKED_AREA = image_architecture(BakedArea, input_="image", axes=_IMAGE_AXES)
_IN_PLACE_SHAPE = Architecture(
    "inplaceshape",
    InPlaceShape,
    lambda n, seed: {"series": samples.series(n, 20, 5, seed=seed)},
    axes={"series": {1: "length"}},
)
DARK_IMAGES = Architecture(
    "darkimages", DarkImages, lambda n, seed: {"input": samples.images(n, 32, seed=seed)}
)

register_exporter_fault(
    "baked batch",
    (image_architecture(ShareOfBatch), DIRECT_17),
    (image_architecture(CountedBatch), TRACED_17),
    (image_architecture(StateOfExample), DIRECT_13),
    batch_size=EXAMPLE,
)
register_exporter_fault(
    "fixed batch", (ARCHITECTURES["mobilenet"], Recipe("direct", 17, dynamic_batch=False))
)
register_exporter_fault(
    "baked branch",
    (ARCHITECTURES["branching"], TRACED_13),
    (ARCHITECTURES["branching"], DIRECT_17),
    (DARK_IMAGES, DIRECT_17),
    (token_architecture(LongSequences), DIRECT_17),
    (image_architecture(Halving), TRACED_17),
)
register_exporter_fault("baked number", (image_architecture(ScaledByItem), DIRECT_17))
register_exporter_fault(
    "baked length",
    (token_architecture(BakedLength), DIRECT_20),
    (token_architecture(LongestRow), DIRECT_17),
)
register_exporter_fault("in-place shape", (_IN_PLACE_SHAPE, TRACED_17))
register_exporter_fault("baked size", (BAKED_SIZE, DIRECT_17), (BAKED_AREA, TRACED_13))


@in_graph("baked batch", ("vit", DIRECT_17), batch_size=EXAMPLE)
def reshape_to_four(model: onnx.ModelProto) -> None:
    """Set the batch size of a Reshape to that of the example; the batch axis is dynamic."""
    reshape = graph.find_nodes(model, "Reshape")[0]
    shape = np.array([EXAMPLE, *_infer_output_shape(model, reshape)], np.int64)
    reshape.input[1] = graph.add_initializer(model, "baked_shape", shape)


def _infer_output_shape(model: onnx.ModelProto, reshape: onnx.NodeProto) -> list[int]:
    """Infer the shape of the Reshape's output without the batch axis."""
    inferred = onnx.shape_inference.infer_shapes(model)
    (value_info,) = [v for v in inferred.graph.value_info if v.name == reshape.output[0]]
    return [dim.dim_value for dim in value_info.type.tensor_type.shape.dim[1:]]
