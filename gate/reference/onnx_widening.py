"""Rewrite an ONNX graph that computes in 16 bits into one that computes in float32."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from gate.onnx_file.reading import inline_functions

_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)

_TYPE_ATTRIBUTES = {
    "to", "dtype", "output_dtype", "output_datatype", "precision", "softmax_precision",
}  # fmt: skip
"""Attributes whose integer is an element type."""


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with float32 in place of float16 and bfloat16.

    Weights keep their values, which float32 holds exactly. Inputs, outputs, casts and all values
    between them become float32. Functions are inlined: their attributes may be element types under
    any name.
    """
    copied = onnx.ModelProto()
    copied.CopyFrom(inline_functions(model) if model.functions else model)
    _widen_graph(copied.graph)
    return copied


def _widen_graph(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for sparse in graph.sparse_initializer:
        _widen_tensor(sparse.values)
    for value in (*graph.input, *graph.output, *graph.value_info):
        _widen_type(value.type)
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.INT:
                if attribute.name in _TYPE_ATTRIBUTES and attribute.i in _NARROW:
                    attribute.i = TensorProto.FLOAT
            elif attribute.type == onnx.AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
                _widen_tensor(attribute.sparse_tensor.values)
            elif attribute.type == onnx.AttributeProto.TYPE_PROTO:
                _widen_type(attribute.tp)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _widen_graph(attribute.g)


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _NARROW:
        array = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _widen_type(kind: onnx.TypeProto) -> None:
    kind_name = kind.WhichOneof("value")
    if kind_name in ("tensor_type", "sparse_tensor_type"):
        tensor_type = getattr(kind, kind_name)
        if tensor_type.elem_type in _NARROW:
            tensor_type.elem_type = TensorProto.FLOAT
    elif kind_name in ("sequence_type", "optional_type"):
        _widen_type(getattr(kind, kind_name).elem_type)
    elif kind_name == "map_type":
        _widen_type(kind.map_type.value_type)
