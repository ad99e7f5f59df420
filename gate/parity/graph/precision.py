"""Islands of another precision in a file of float32."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

import torch
from onnx import TensorProto

from gate.parity.graph.contents import small_values
from gate.parity.graph.values import FlatGraph, GraphValue, Node
from gate.parity.graph.witness import Witness
from gate.records.instruments import GraphCode, GraphFinding

_NARROW = {
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
}
_QUANTIZED = re.compile(r"(.*::)?(\w*[Qq]uantize\w*|Q[A-Z]\w+|\w+(Integer|NBits|Bnb4)\w*)")
"""Operators that compute in, or unpack, integers of 8 bits and fewer."""
_BYTES = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4)
_MOVES = (
    "Constant", "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice",
    "Split", "Concat", "Gather", "Expand",
)  # fmt: skip
_MEASURES = ("Shape", "Size")
_AXES = 8
"""Constants of no more elements may be sizes and scales, one for each axis."""


def float16(graph: FlatGraph, witness: Witness) -> Iterator[GraphFinding]:
    """Where float32 is rounded to 16 or 8 bits, or was when the weights were written."""
    for code, dtype in _NARROW.items():
        name = str(dtype).removeprefix("torch.")
        nodes = [node for node in graph.live() if _makes(graph, node, code)]
        stored = [
            v for v, t in graph.live_tensors() if t.data_type == code and _lossy(t, dtype, witness)
        ]
        if not (nodes or stored) or dtype in witness.conduct.dtypes:
            continue
        if nodes:
            yield _finding("float16", nodes, f"compute in or round to {name}")
        for value in stored:
            detail = f"is stored in {name}, the model's weights need more bits"
            yield GraphFinding(code="float16", place=value.name, detail=detail)


def quantized(graph: FlatGraph, witness: Witness) -> Iterator[GraphFinding]:
    """Where floats are rounded to integers of few bits, or were when the weights were written.

    No model that was traced in float32 has such operators; one that was quantized in PyTorch has
    them rightly, and is no exact one either. Integers that the model itself holds, such as masks,
    are its own.
    """
    own = witness.bytes_held()
    nodes = [node for node in graph.live() if _QUANTIZED.fullmatch(node.operator)]
    if nodes:
        yield _finding("quantized", nodes, "compute in or unpack integers")
    for value, tensor in graph.live_tensors():
        unpacked = any(node.operator == "Cast" for node, _ in graph.readers[value])
        elements = math.prod(tensor.dims)
        if tensor.data_type in _BYTES and elements > _AXES and elements not in own and unpacked:
            detail = "is stored in integers of few bits and cast to floats"
            yield GraphFinding(code="quantized", place=value.name, detail=detail)


def float64(graph: FlatGraph, witness: Witness) -> Iterator[GraphFinding]:
    """Where samples or weights are computed in double precision; arithmetic of shapes is not."""
    data = _data(graph)
    nodes = [
        node
        for node in graph.live()
        if _makes(graph, node, TensorProto.DOUBLE)
        and node.operator != "Cast"
        and any(value in data for value in node.outputs)
    ]
    if nodes and torch.float64 not in witness.conduct.dtypes:
        yield _finding("float64", nodes, "compute in float64")


def _makes(graph: FlatGraph, node: Node, code: int) -> bool:
    """True if the node computes values of this type or rounds to it, and doesn't just move them."""
    if node.operator in _MOVES:
        return False
    return any(value is not None and graph.types.get(value) == code for value in node.outputs)


def _lossy(tensor: TensorProto, dtype: torch.dtype, witness: Witness) -> bool:
    """True if no tensor of the model of that size is whole in so few bits."""
    elements = math.prod(tensor.dims)
    return not any(
        held.numel() == elements and torch.equal(held.to(dtype).to(held.dtype), held)
        for _, held in witness.tensors()
    )


def _data(graph: FlatGraph) -> set[GraphValue]:
    """Values that come from samples or weights, not from shapes and single numbers."""
    data = set(graph.entries)
    for value, tensor in graph.tensors.items():
        few = small_values(tensor)
        if few is None or few.size > _AXES:
            data.add(value)
    for node in graph.nodes:
        inner = bool(node.branches)  # what goes into a subgraph has other names inside
        on_data = inner or any(value in data for value in node.inputs)
        if on_data and node.operator not in _MEASURES:
            data |= {value for value in node.outputs if value is not None}
    return data


def _finding(code: GraphCode, nodes: list[Node], what: str) -> GraphFinding:
    """One finding for all nodes, at the first of them."""
    counts = Counter(node.operator for node in nodes)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common(5))
    return GraphFinding(
        code=code, place=nodes[0].place, detail=f"{len(nodes)} nodes {what}: {kinds}"
    )
