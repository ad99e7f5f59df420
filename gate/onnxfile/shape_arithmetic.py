"""Nodes that compute shapes, sizes and indices, by what the file says of itself: for runtimes that
tell where a node is, and nothing of its outputs."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import shape_inference

from gate.onnxfile.placement import SHAPE_OPS, is_small
from gate.onnxfile.walk import subgraphs


def shape_arithmetic(model: onnx.ModelProto) -> frozenset[str]:
    """The nodes that compute shapes, sizes and indices, by the shapes that the file itself gives
    their outputs: `op_type:node_name`. One whose shapes are not known is none."""
    found: dict[str, bool] = {}
    inferred = shape_inference.infer_shapes(model, data_prop=True)
    for name, small in _sized(inferred.graph):
        found[name] = found.get(name, True) and small
    return frozenset(name for name, small in found.items() if small)


def _sized(graph: onnx.GraphProto) -> Iterator[tuple[str, bool]]:
    values = (*graph.value_info, *graph.output)
    shapes = {value.name: _shape(value.type) for value in values}
    for node in graph.node:
        outputs = [shapes.get(name) for name in node.output if name]
        own = node.domain in ("", "ai.onnx") and node.op_type in SHAPE_OPS
        small = own and all(shape is not None and is_small(shape) for shape in outputs)
        yield f"{node.op_type}:{node.name}", small
        for inner in subgraphs(node):
            yield from _sized(inner)


def _shape(kind: onnx.TypeProto) -> list[int] | None:
    """None: not known, or no tensor."""
    tensor = kind.tensor_type
    dimensions = tensor.shape.dim
    if not tensor.HasField("shape") or not all(d.HasField("dim_value") for d in dimensions):
        return None
    return [dimension.dim_value for dimension in dimensions]
