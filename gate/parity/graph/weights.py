"""Weights of the file that are all zero or not finite while those of the model are not.

Only what a layer multiplies by counts as a weight. Zeros and infinities elsewhere are everyday:
masks of -inf, tables that a scatter fills, class tokens before training.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from onnx import TensorProto

from gate.parity.graph.contents import FLOATS, Contents, DroppedContents
from gate.parity.graph.values import FlatGraph, GraphValue
from gate.parity.graph.witness import Witness
from gate.records.instruments import GraphFinding

_FACTORS = {
    "Conv": (1,), "ConvTranspose": (1,), "DeformConv": (1,),
    "Gemm": (0, 1), "MatMul": (0, 1),
    "RNN": (1, 2), "GRU": (1, 2), "LSTM": (1, 2),
}  # fmt: skip
_TERMS = {
    "Conv": (2,), "ConvTranspose": (2,), "Gemm": (2,), "RNN": (3,), "GRU": (3,), "LSTM": (3,),
    "BatchNormalization": (1, 2, 3, 4), "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2), "GroupNormalization": (1, 2), "RMSNormalization": (1,),
}  # fmt: skip
_ROWS: dict[str, tuple[int, ...]] = {"Gather": (0,)}
"""Embeddings: no sample needs to reach the row that is NaN."""
_REARRANGE = ("Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
_ADDED = ("bias", "running_mean")
"""Parameters that are added or subtracted, so that folding them into a weight never zeroes it."""


def zero_initializer(
    graph: FlatGraph, ledger: DroppedContents, witness: Witness
) -> Iterator[GraphFinding]:
    """Weights of rank 2 and more that are all zero, and nothing in the reference explains it."""
    for value, tensor in _used_floats(graph):
        contents = ledger.contents(tensor)
        if len(tensor.dims) < 2 or contents.elements < 2 or contents.zeros < contents.elements:
            continue
        if _feeds(graph, value, [_FACTORS]) and not _has_zeros(witness, tuple(tensor.dims)):
            shape = "x".join(map(str, tensor.dims))
            detail = f"all of its {contents.elements} elements ({shape}) are zero"
            yield GraphFinding(code="zero_initializer", place=value.name, detail=detail)


def nonfinite_initializer(
    graph: FlatGraph, ledger: DroppedContents, witness: Witness
) -> Iterator[GraphFinding]:
    """Weights with NaN or infinity where no tensor of the reference of that size has any."""
    for value, tensor in _used_floats(graph):
        contents = ledger.contents(tensor)
        slots = [_FACTORS, _TERMS, *([_ROWS] if contents.nans else [])]
        if not (contents.nans or contents.infinities) or not _feeds(graph, value, slots):
            continue
        if not _has_nonfinite(witness, contents):
            detail = (
                f"{contents.nans} of its {contents.elements} elements are NaN, "
                f"{contents.infinities} infinite"
            )
            yield GraphFinding(code="nonfinite_initializer", place=value.name, detail=detail)


def _used_floats(graph: FlatGraph) -> Iterator[tuple[GraphValue, TensorProto]]:
    return ((value, t) for value, t in graph.live_tensors() if t.data_type in FLOATS)


def _feeds(graph: FlatGraph, value: GraphValue, tables: list[dict[str, tuple[int, ...]]]) -> bool:
    """True if the value, as it is or rearranged, goes to one of these slots."""
    waiting = [value]
    while waiting:
        for node, slot in graph.readers[waiting.pop()]:
            if any(slot in table.get(node.operator, ()) for table in tables):
                return True
            if slot == 0 and node.operator in _REARRANGE:
                waiting += [output for output in node.outputs if output is not None]
    return False


def _has_zeros(witness: Witness, shape: tuple[int, ...]) -> bool:
    """True if the reference has as many zeros in one tensor, whole or as a slice of it, or a
    factor of zero that may be folded into a tensor of this shape: the scale of a BatchNorm."""
    elements = torch.Size(shape).numel()
    for name, tensor in witness.tensors():
        holds_it = tensor.numel() >= elements and tensor.numel() % elements == 0
        multiplies = not name.endswith(_ADDED) and 1 not in tensor.shape
        scales_it = multiplies and bool(set(tensor.shape) & set(shape))
        if not (holds_it or scales_it):
            continue
        zeros = tensor.numel() - int(torch.count_nonzero(tensor))
        if (holds_it and zeros >= elements) or (scales_it and zeros == tensor.numel()):
            return True
    return False


def _has_nonfinite(witness: Witness, contents: Contents) -> bool:
    """True if a tensor of the reference that may be this one has NaN or infinity too."""
    return any(
        tensor.numel() % contents.elements == 0 and not bool(torch.isfinite(tensor).all())
        for _, tensor in witness.tensors()
    )
