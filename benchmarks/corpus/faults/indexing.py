"""Faults of indexing and integer arithmetic, mostly made by exporters themselves."""

from __future__ import annotations

import numpy as np
import onnx
import torch

from benchmarks.corpus import graph
from benchmarks.corpus.architecture import ARCHITECTURES
from benchmarks.corpus.entry import as_exported, in_graph
from benchmarks.corpus.exporters import (
    DIRECT_13,
    DIRECT_17,
    DIRECT_20,
    DYNAMO_18,
    SCRIPTED_17,
    TRACED_13,
    TRACED_17,
)
from benchmarks.corpus.models.between import Between, on_images


class FloorOfNegatives(Between):
    """Integers below zero are divided with `//`: floor in PyTorch, truncation in ONNX."""

    def between(self, y: torch.Tensor) -> torch.Tensor:
        codes = ((y - 1.0) * 4.0).to(torch.int64) // 3
        return codes.to(y.dtype)


class FloorOfFloats(Between):
    """Floats are divided with `//`; the TorchScript-based exporter truncates."""

    def between(self, y: torch.Tensor) -> torch.Tensor:
        return y + (y - 1.0) // 0.3


class NegativeIndices(Between):
    """Corners by advanced indexing, the last ones by -1: read from a wrong place."""

    def between(self, y: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.tensor([[0], [-1]]), torch.tensor([[0, -1]])
        return y[:, :, rows, columns]


class SeparatedIndices(Between):
    """Advanced indices with a slice between them, negative ones among them."""

    def between(self, y: torch.Tensor) -> torch.Tensor:
        chosen = y[:, torch.tensor([0, -1, 3]), :, torch.tensor([-2, 2, 0])]
        return y + chosen.amax(0).mean(1)[:, None, None, None]


class DuplicatePuts(Between):
    """`index_put(accumulate=True)` with duplicates: the last one wins, nothing is added up."""

    width = 4

    def between(self, y: torch.Tensor) -> torch.Tensor:
        groups = torch.arange(16) // 4
        cells = y.new_zeros(4, y.shape[0], 8, 8)
        return cells.index_put((groups,), y.transpose(0, 1), accumulate=True).transpose(0, 1)


class DuplicateAdds(Between):
    """`index_add` with duplicates: the last one wins, nothing is added up."""

    width = 4

    def between(self, y: torch.Tensor) -> torch.Tensor:
        cells = y.new_zeros(y.shape[0], 4, 8, 8)
        return cells.index_add(1, torch.arange(16) % 4, y)


class MeanByScatter(Between):
    """`scatter_reduce("mean")`: the dynamo exporter sums."""

    width = 4

    def between(self, y: torch.Tensor) -> torch.Tensor:
        groups = (torch.arange(16) % 4)[None, :, None, None].expand_as(y)
        cells = y.new_zeros(y.shape[0], 4, 8, 8)
        return cells.scatter_reduce(1, groups, y, "mean", include_self=False)


class ThroughAView(Between):
    """An in-place change through a view is lost."""

    def between(self, y: torch.Tensor) -> torch.Tensor:
        y = y * 1.0
        flat = y.view(y.shape[0], -1)
        flat.add_(0.5)
        flat[:, ::2].mul_(0.5)
        return y


class OwnDivisor(Between):
    """Average pooling with a divisor of its own: the exporters divide by the window."""

    def between(self, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(y, 3, 2, padding=1, divisor_override=5)


as_exported(
    "integer division",
    (on_images(FloorOfNegatives), DIRECT_17),
    (on_images(FloorOfNegatives), TRACED_13),
    (on_images(FloorOfFloats), DIRECT_20),
)
as_exported(
    "index sign", (on_images(NegativeIndices), DIRECT_17), (on_images(SeparatedIndices), TRACED_17)
)
as_exported(
    "duplicate indices",
    (ARCHITECTURES["points"], TRACED_13),
    (ARCHITECTURES["points"], DIRECT_13),
    (on_images(DuplicatePuts), DIRECT_17),
    (on_images(DuplicateAdds), DIRECT_20),
    (on_images(MeanByScatter), DYNAMO_18),
)
as_exported("in-place", (on_images(ThroughAView), DIRECT_17))
as_exported(
    "ignored argument", (on_images(OwnDivisor), DIRECT_17), (on_images(OwnDivisor), DYNAMO_18)
)


@in_graph("duplicate indices", ("points", SCRIPTED_17))
def reduction_lost(model: onnx.ModelProto) -> None:
    """The attribute `reduction` was lost when a tool wrote the graph in an older opset."""
    graph.set_attribute(graph.nodes(model, "ScatterElements")[0], "reduction", "none")


@in_graph("index sign", ("recurrent", DIRECT_17))
def second_to_last(model: onnx.ModelProto) -> None:
    """The sequence's second to last state is taken in place of its last."""
    gather = graph.nodes(model, "Gather")[-1]
    before = graph.value_of(model, gather.input[1])
    gather.input[1] = graph.constant(model, "second_to_last", np.asarray(before - 1))
