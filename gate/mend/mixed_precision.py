"""Convert a float32 file to float16 with any set of nodes in float32."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, shape_inference

from gate.errors import ExportError, first_line
from gate.export.quantize import name_nodes
from gate.localize.file_graph import FileGraph, SubgraphSession
from gate.onnx_file.reading import SINGLE_FILE_LIMIT, nodes_of, read_subject, replace_messages
from gate.onnx_file.tested_file import TestedFile
from gate.policy.runtime_options import plain_setup
from gate.reference.onnx_widening import widened
from gate.storage import files

# ONNX Runtime's CPU provider computes most float16 nodes in float32 without rounding in between, so
# a file that overflows on a device would pass on the CPU. Therefore candidates are tested with each
# float16 value rounded by a pair of Casts, which the provider keeps.

_LARGEST = float(np.finfo(np.float16).max)

_SQUARING = {
    "LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization",
    "LpNormalization", "ReduceL2", "ReduceSumSquare",
}  # fmt: skip
"""Operators with intermediate values that are squares of their inputs."""


def is_float32(path: Path) -> bool:
    """Return whether a file has no float16, bfloat16 or quantized value. Raises OnnxFileError."""
    read_subject(path)
    model = onnx.load(str(path), load_external_data=False)
    nodes = list(nodes_of(model))
    types = {tensor.data_type for tensor in model.graph.initializer}
    types |= {value.type.tensor_type.elem_type for value in model.graph.input}
    types |= {kind for node in nodes if (kind := _casts_to(node)) is not None}
    types |= {item.t.data_type for node in nodes for item in node.attribute if item.HasField("t")}
    quantized = any("uantize" in n.op_type or n.op_type.startswith("QLinear") for n in nodes)
    return not quantized and not types & {TensorProto.FLOAT16, TensorProto.BFLOAT16}


class Float16Conversion:
    """A float32 file, and its float16 conversions with any set of nodes in float32."""

    def __init__(self, exact: Path) -> None:
        """Read the file.

        Raises ExportError for subgraphs, more than 2 GB, types that can't be inferred, or a file
        without float32 nodes.
        """
        if read_subject(exact).size_bytes > SINGLE_FILE_LIMIT:
            raise ExportError(f"{exact} is above 2 GB, which the float16 converter cannot hold.")
        self.path, self._model = exact, onnx.load(str(exact))
        graph = self._model.graph
        if len(list(nodes_of(self._model))) != len(graph.node) or self._model.functions:
            raise ExportError(
                f"{exact} has subgraphs or functions. Mixed precision needs a flat graph: export "
                "without control flow."
            )
        _lift_constants(graph)
        name_nodes(graph)
        types = infer_types(self._model)
        unknown = [n for n in graph.node if any(name and name not in types for name in n.output)]
        if unknown:
            raise ExportError(
                f"the types of the node {unknown[0].name!r} ({unknown[0].op_type}) of {exact} "
                "cannot be inferred. Export without operators of ONNX Runtime's own domain."
            )
        self.nodes = tuple(
            node.name
            for node in graph.node
            if any(types.get(name) == TensorProto.FLOAT for name in node.output)
        )
        """The names of the nodes that compute float32 values, in the file's order."""
        self._named = frozenset(self.nodes)
        if not self.nodes:
            raise ExportError(f"{exact} computes nothing in float32.")

    def convert(self, float32: Collection[str]) -> onnx.ModelProto:
        """Return the float16 model with these nodes in float32. Inputs and outputs keep their
        types. Raises ExportError."""
        from onnxruntime.transformers.float16 import convert_float_to_float16

        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        _split_constants(model.graph, frozenset(float32))
        try:
            converted: onnx.ModelProto = convert_float_to_float16(
                model, keep_io_types=True, node_block_list=[*float32]
            )
        except Exception as error:  # the converter's errors have no common base
            raise ExportError(
                f"{self.path} can't be converted to float16: {type(error).__name__}: "
                f"{first_line(error)}."
            ) from error
        _repair(converted.graph, {node.name for node in model.graph.node})
        return converted

    def float32_nodes(self, model: onnx.ModelProto) -> tuple[str, ...]:
        """Return the nodes of the original file that compute in float32 in a converted model.

        This includes operators that the converter never converts.
        """
        types = infer_types(model)
        return tuple(
            node.name
            for node in model.graph.node
            if node.name in self._named
            and any(types.get(name) == TensorProto.FLOAT for name in node.output)
        )

    @property
    def unrepresentable(self) -> tuple[str, ...]:
        """The nodes that read a tensor of weights beyond float16, which the converter would clip.

        Single numbers, such as that of a mask, may be clipped.
        """
        beyond = {t.name for t in self._model.graph.initializer if _is_beyond(t)}
        return tuple(
            node.name
            for node in self._model.graph.node
            if node.name in self._named and not beyond.isdisjoint(node.input)
        )

    def overflowing(self, feeds: Sequence[Mapping[str, NDArray[Any]]]) -> tuple[str, ...]:
        """Return the nodes that read or compute a value beyond float16, or whose squared inputs
        are.

        Raises any error of ONNX Runtime.
        """
        tested = TestedFile(self.path, read_subject(self.path))
        graph = FileGraph(tested)
        session = SubgraphSession(graph.marked(graph.tensors), plain_setup("ort-cpu"))
        largest: dict[str, float] = {
            tensor.name: _magnitude(numpy_helper.to_array(tensor))
            for tensor in self._model.graph.initializer
        }
        for feed in feeds:
            for name, array in (*feed.items(), *session(feed).items()):
                largest[name] = max(largest.get(name, 0.0), _magnitude(array))
        return tuple(
            node.name
            for node in self._model.graph.node
            if node.name in self._named and _overflows(node, largest)
        )


def round_as_device(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a float32 model that rounds each value that is float16 in `model`.

    This emulates on the CPU a device that computes in float16. Sums inside one operator, such as
    the states of an LSTM, are not rounded.
    """
    rounded, types = widened(model), infer_types(model)
    graph = rounded.graph
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        for index, name in enumerate(node.output):
            if types.get(name) == TensorProto.FLOAT16:
                wide, half = f"{name}::float32", f"{name}::float16"
                node.output[index] = wide
                nodes.append(helper.make_node("Cast", [wide], [half], to=TensorProto.FLOAT16))
                nodes.append(helper.make_node("Cast", [half], [name], to=TensorProto.FLOAT))
    replace_messages(graph.node, nodes)
    del graph.value_info[:]
    return rounded


def save_model(model: onnx.ModelProto, path: Path) -> Path:
    """Write a model deterministically. Raises StorageError."""
    files.write_bytes(path, model.SerializeToString(deterministic=True))
    return path


def infer_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return the element types of all values, as far as they can be inferred."""
    graph = shape_inference.infer_shapes(model).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name: kind for name, kind in types.items() if kind}


def _magnitude(array: Any) -> float:
    """Return the largest magnitude; NaN counts as infinite."""
    if array.dtype.kind != "f" or not array.size:
        return 0.0
    largest = float(np.abs(array).max())
    return math.inf if math.isnan(largest) else largest


def _is_beyond(tensor: onnx.TensorProto) -> bool:
    array = numpy_helper.to_array(tensor)
    if array.dtype.kind != "f" or array.size < 2:
        return False
    return _magnitude(array[np.isfinite(array)]) > _LARGEST


def _overflows(node: onnx.NodeProto, largest: Mapping[str, float]) -> bool:
    bound = math.sqrt(_LARGEST) if node.op_type in _SQUARING else _LARGEST
    reads = (largest.get(name, 0.0) > bound for name in node.input)
    return any(reads) or any(largest.get(name, 0.0) > _LARGEST for name in node.output)


def _lift_constants(graph: onnx.GraphProto) -> None:
    """Convert float32 constants and copies of initializers to initializers.

    The converter would round a Constant even if the node that reads it stays in float32.
    """
    arrays = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    kept = []
    for node in graph.node:
        name = node.output[0] if node.output else ""
        tensor = None
        if node.op_type == "Identity" and node.input[0] in arrays:
            tensor = arrays[node.input[0]]
        elif node.op_type == "Constant":
            value = helper.get_attribute_value(node.attribute[0])
            if node.attribute[0].name == "value" and value.data_type == TensorProto.FLOAT:
                tensor = value
            elif node.attribute[0].name in ("value_float", "value_floats"):
                tensor = numpy_helper.from_array(np.asarray(value, np.float32))
        if tensor is None or name in outputs:
            kept.append(node)
            continue
        copy = graph.initializer.add()
        copy.CopyFrom(tensor)
        copy.name = name
        arrays[name] = copy
    replace_messages(graph.node, kept)
    read = {name for node in kept for name in node.input} | outputs
    used = [tensor for tensor in graph.initializer if tensor.name in read]
    replace_messages(graph.initializer, used)


def _split_constants(graph: onnx.GraphProto, float32: frozenset[str]) -> None:
    """Give nodes that stay in float32 separate initializers.

    The converter would round those that a float16 node reads too.
    """
    arrays = {t.name: t for t in graph.initializer if t.data_type == TensorProto.FLOAT}
    shared = {name for node in graph.node if node.name not in float32 for name in node.input}
    copied: set[str] = set()
    for node in graph.node:
        for index, name in enumerate(node.input):
            if node.name in float32 and name in shared and name in arrays:
                copy_name = f"{name}::float32"
                if copy_name not in copied:
                    copy = graph.initializer.add()
                    copy.CopyFrom(arrays[name])
                    copy.name = copy_name
                    copied.add(copy_name)
                node.input[index] = copy_name


def _repair(graph: onnx.GraphProto, original: Collection[str]) -> None:
    """Repair the converter's result.

    It duplicates Casts of shared values, casts values between two float32 nodes to float16 and
    back, and does not sort the nodes.
    """
    from onnxruntime.transformers.onnx_model import OnnxModel

    nodes = {node.output[0]: node for node in graph.node if node.name not in original}
    halves = {n: c.input[0] for n, c in nodes.items() if _casts_to(c) == TensorProto.FLOAT16}
    outputs = {value.name for value in graph.output}
    # A value that is cast to float16 and back is replaced by the original value.
    originals = {
        name: halves[cast.input[0]]
        for name, cast in nodes.items()
        if _casts_to(cast) == TensorProto.FLOAT and cast.input[0] in halves
    }
    inputs = {value.name for value in graph.input}
    renamed = {
        source: name
        for name, source in originals.items()
        if name in outputs and source not in inputs
    }
    kept = [node for node in graph.node if node.name in original]
    kept += [cast for name, cast in nodes.items() if name not in originals or name in outputs]
    kept = [
        node for node in kept if node.output[0] not in renamed.values() or node.name in original
    ]
    for node in kept:
        for index, name in enumerate(node.input):
            original_name = originals.get(name, name)
            node.input[index] = renamed.get(original_name, original_name)
        for index, name in enumerate(node.output):
            node.output[index] = renamed.get(name, name)
    read = {name for node in kept for name in node.input} | outputs
    kept = [n for n in kept if n.name in original or n.output[0] in read]
    replace_messages(graph.node, kept)
    try:
        OnnxModel.graph_topological_sort(graph)
    except RuntimeError as error:
        raise ExportError(
            f"the float16 converter left a node without its inputs: {first_line(error)}."
        ) from error
    del graph.value_info[:]


def _casts_to(node: onnx.NodeProto) -> int | None:
    return helper.get_attribute_value(node.attribute[0]) if node.op_type == "Cast" else None
