"""Faults of indexing and integer arithmetic, most of which exporters make themselves."""

from __future__ import annotations

import numpy as np
import onnx
import torch

from benchmarks.corpus import graph
from benchmarks.corpus.architecture import ARCHITECTURES, image_architecture
from benchmarks.corpus.entry import in_graph, register_exporter_fault
from benchmarks.corpus.exporters import (
    DIRECT_13,
    DIRECT_17,
    DIRECT_20,
    DYNAMO_18,
    SCRIPTED_17,
    TRACED_13,
    TRACED_17,
)
from benchmarks.corpus.models.between import MiddleOperation


class FloorOfNegatives(MiddleOperation):
    """A classifier that divides negative integers with `//`: PyTorch floors, ONNX truncates."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        codes = ((y - 1.0) * 4.0).to(torch.int64) // 3
        return codes.to(y.dtype)


class FloorOfFloats(MiddleOperation):
    """A classifier that divides floats with `//`, which the TorchScript exporter truncates."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        return y + (y - 1.0) // 0.3


class NegativeIndices(MiddleOperation):
    """A classifier with advanced indices of -1, which are exported as wrong indices."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.tensor([[0], [-1]]), torch.tensor([[0, -1]])
        return y[:, :, rows, columns]


class SeparatedIndices(MiddleOperation):
    """A classifier with advanced indices on both sides of a slice, some of them negative."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        selected = y[:, torch.tensor([0, -1, 3]), :, torch.tensor([-2, 2, 0])]
        return y + selected.amax(0).mean(1)[:, None, None, None]


class DuplicatePuts(MiddleOperation):
    """A classifier with duplicates in `index_put(accumulate=True)`: the last value wins."""

    width = 4

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        groups = torch.arange(16) // 4
        cells = y.new_zeros(4, y.shape[0], 8, 8)
        return cells.index_put((groups,), y.transpose(0, 1), accumulate=True).transpose(0, 1)


class DuplicateAdds(MiddleOperation):
    """A classifier with duplicates in `index_add`: the file keeps the last value, not the sum."""

    width = 4

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        cells = y.new_zeros(y.shape[0], 4, 8, 8)
        return cells.index_add(1, torch.arange(16) % 4, y)


class MeanByScatter(MiddleOperation):
    """A classifier with `scatter_reduce("mean")`, which the dynamo exporter writes as a sum."""

    width = 4

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        groups = (torch.arange(16) % 4)[None, :, None, None].expand_as(y)
        cells = y.new_zeros(y.shape[0], 4, 8, 8)
        return cells.scatter_reduce(1, groups, y, "mean", include_self=False)


class ThroughAView(MiddleOperation):
    """A classifier that modifies a tensor through a view, which is lost in the exported file."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        y = y * 1.0
        flat = y.view(y.shape[0], -1)
        flat.add_(0.5)
        flat[:, ::2].mul_(0.5)
        return y


class OwnDivisor(MiddleOperation):
    """A classifier with `divisor_override`, which the exporters ignore in average pooling."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(y, 3, 2, padding=1, divisor_override=5)


register_exporter_fault(
    "integer division",
    (image_architecture(FloorOfNegatives), DIRECT_17),
    (image_architecture(FloorOfNegatives), TRACED_13),
    (image_architecture(FloorOfFloats), DIRECT_20),
)
register_exporter_fault(
    "index sign",
    (image_architecture(NegativeIndices), DIRECT_17),
    (image_architecture(SeparatedIndices), TRACED_17),
)
register_exporter_fault(
    "duplicate indices",
    (ARCHITECTURES["points"], TRACED_13),
    (ARCHITECTURES["points"], DIRECT_13),
    (image_architecture(DuplicatePuts), DIRECT_17),
    (image_architecture(DuplicateAdds), DIRECT_20),
    (image_architecture(MeanByScatter), DYNAMO_18),
)
register_exporter_fault("in-place", (image_architecture(ThroughAView), DIRECT_17))
register_exporter_fault(
    "ignored argument",
    (image_architecture(OwnDivisor), DIRECT_17),
    (image_architecture(OwnDivisor), DYNAMO_18),
)


@in_graph("duplicate indices", ("points", SCRIPTED_17))
def reduction_lost(model: onnx.ModelProto) -> None:
    """Set `reduction` to none, as a tool does that writes the graph in an older opset."""
    graph.set_attribute(graph.find_nodes(model, "ScatterElements")[0], "reduction", "none")


@in_graph("index sign", ("recurrent", DIRECT_17))
def second_to_last(model: onnx.ModelProto) -> None:
    """Use the second last state of the sequence instead of the last."""
    gather = graph.find_nodes(model, "Gather")[-1]
    index = graph.get_value(model, gather.input[1])
    gather.input[1] = graph.add_initializer(model, "second_to_last", np.asarray(index - 1))
