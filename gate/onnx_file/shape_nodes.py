"""Find the nodes that compute only shapes, indices and other parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gate.records.runtime import HEAVY, CpuNode

if TYPE_CHECKING:
    import onnx

_PARAMETERS: Mapping[str, Iterable[int]] = {
    "AffineGrid": (1,),
    "CenterCropPad": (1,),
    "Clip": (1, 2),
    "Col2Im": (1, 2),
    "Compress": (1,),
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "EyeLike": (0,),
    "Gather": (1,),
    "GatherElements": (1,),
    "GatherND": (1,),
    "If": (0,),
    "Loop": (0, 1),
    "MaxUnpool": (1, 2),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (0, 1),
    "Pad": (1, 3),
    "RandomNormalLike": (0,),
    "RandomUniformLike": (0,),
    "Range": (0, 1, 2),
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceLogSum": (1,),
    "ReduceLogSumExp": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "ReduceSumSquare": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "ReverseSequence": (1,),
    "RoiAlign": (2,),
    "RotaryEmbedding": (3,),
    "STFT": (1, 3),
    "Scatter": (1,),
    "ScatterElements": (1,),
    "ScatterND": (1,),
    "SequenceAt": (1,),
    "SequenceErase": (1,),
    "SequenceInsert": (2,),
    "Shape": (0,),
    "Size": (0,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "Tile": (1, 2),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow"), (0,)),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), (4,)),
    "MelWeightMatrix": (0, 1, 2, 3, 4),
}
"""Positions of the inputs of ONNX operators that are a shape, index, axis, count or limit."""

_SHAPE_OPERATORS = ("Shape", "Size")

_COPIES = ("MemcpyFromHost", "MemcpyToHost")
"""Operators that ONNX Runtime inserts between two devices."""

_STANDARD = ("", "ai.onnx")


@dataclass
class _Values:
    """The names of the values of a graph and its subgraphs, by their properties."""

    data: set[str] = field(default_factory=set)
    """Values on whose elements an output of the graph depends."""
    varying: set[str] = field(default_factory=set)
    """Values that depend on the elements of an input of the graph."""
    single: set[str] = field(default_factory=set)
    """Values with one element."""
    integers: set[str] = field(default_factory=set)
    """Values of integers or bools."""

    def is_activation(self, name: str) -> bool:
        """Return whether a value may be an activation: it depends on an input and may be float."""
        return name in self.varying and name not in self.single and name not in self.integers

    def is_fixed(self, name: str) -> bool:
        """Return whether a value follows from shapes and constants, and is a number or integers."""
        return name not in self.varying and (name in self.single or name in self.integers)


def shape_nodes(model: onnx.ModelProto) -> frozenset[str]:
    """Return the nodes whose outputs reach only shapes, indices, axes or other parameters.

    ONNX Runtime deliberately computes such nodes on the CPU. They are named `op_type:node_name`, as
    in its profile. They are found by data flow: a value is data if a graph output depends on its
    elements. A value that is only read as a shape, index, axis or count is a parameter, whatever
    its size.

    Integers that follow from shapes and constants alone are always shapes, and so are single
    numbers (the scale of an attention). A node that computes with activations is not a shape node,
    even if its result is an index. If several nodes share a name, all of them must be shape nodes.
    """
    graph = _infer_shapes(model).graph
    values = _Values(data={output.name for output in graph.output})
    constants = {tensor.name for tensor in graph.initializer}
    values.varying = {value.name for value in graph.input if value.name not in constants}
    _add_sizes(graph, values)
    _add_varying(graph, values)
    _add_data(graph, values)
    by_name: dict[str, bool] = {}
    unnamed: set[str] = set()
    for node in _all_nodes(graph):
        is_shape = _computes_shapes(node, values)
        key = f"{node.op_type}:{node.name}"
        by_name[key] = by_name.get(key, True) and is_shape
        if not node.name and not is_shape:
            unnamed.add(node.op_type)
    return frozenset(
        key for key, is_shape in by_name.items() if is_shape and not _is_ambiguous(key, unnamed)
    )


def _computes_shapes(node: onnx.NodeProto, values: _Values) -> bool:
    if HEAVY.search(node.op_type):
        return False
    if not values.data.isdisjoint(node.output):
        return all(values.is_fixed(name) for name in node.output if name)
    read = () if node.op_type in _SHAPE_OPERATORS else tuple(node.input)
    return not any(values.is_activation(name) for name in (*read, *node.output))


def is_shape_node(key: str, nodes: frozenset[str]) -> bool:
    """Return whether a name `op_type:node_name` in a profile is one of `shape_nodes`.

    The profile names nodes without a name by their number: `Concat_17`."""
    operator, _, name = key.partition(":")
    return key in nodes or (_is_numbered(operator, name) and f"{operator}:" in nodes)


class NodeTypes:
    """Operators, their versions and the types of their inputs, by the names of nodes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._versions = {opset.domain or "": opset.version for opset in model.opset_import}
        self._nodes: dict[str, list[onnx.NodeProto]] = {}
        for node in _all_nodes(model.graph):
            self._nodes.setdefault(f"{node.op_type}:{node.name}", []).append(node)

    def describe(self, name: str, inputs: Any) -> CpuNode:
        """Describe a node. inputs: its tensors in the profile, such as `[{"int64": [2, 9]}]`."""
        operator, _, label = name.partition(":")
        unnamed = _is_numbered(operator, label) and name not in self._nodes
        nodes = self._nodes.get(f"{operator}:" if unnamed else name, [])
        domains = {node.domain if node.domain != "ai.onnx" else "" for node in nodes}
        if len(domains) != 1:
            return CpuNode(name=name, operator=operator)
        (domain,) = domains
        return CpuNode(
            name=name,
            operator=f"{domain}::{operator}" if domain else operator,
            since_version=self._find_since_version(operator, domain),
            inputs=_read_types(nodes[0].input, inputs) if len(nodes) == 1 else (),
        )

    def _find_since_version(self, operator: str, domain: str) -> int | None:
        from onnx import defs

        version = self._versions.get(domain)
        if domain == _MICROSOFT:
            return 1  # each operator of this domain has only one version
        if version is None:
            return None
        try:
            return int(defs.get_schema(operator, version, domain).since_version)
        except defs.SchemaError:
            return None


_MICROSOFT = "com.microsoft"


def _read_types(names: Sequence[str], profiled: Any) -> tuple[str, ...]:
    """Return the types in the profile for each input of the node; empty if they are ambiguous."""
    try:
        kinds = [next(iter(entry)) for entry in profiled]
    except (TypeError, StopIteration):
        return ()
    if len(kinds) != len([name for name in names if name]):
        return ()
    remaining = iter(kinds)
    return tuple(str(next(remaining)) if name else "" for name in names)


def _is_ambiguous(key: str, unnamed: set[str]) -> bool:
    """Return whether the profile may use this name for an unnamed node that computes data."""
    operator, _, name = key.partition(":")
    return operator in unnamed and _is_numbered(operator, name)


def _is_numbered(operator: str, name: str) -> bool:
    prefix, _, number = name.rpartition("_")
    return prefix == operator and number.isdecimal()


def _all_nodes(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    from gate.onnx_file.reading import nodes_within

    return nodes_within(graph.node)


def node_dtypes(model: onnx.ModelProto, operator: str, name: str) -> set[str]:
    """Return the numpy dtypes that a node with this operator and name reads and returns."""
    from onnx.helper import tensor_dtype_to_np_dtype

    graph = _infer_shapes(model).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    values = (*graph.value_info, *graph.input, *graph.output)
    types |= {value.name: value.type.tensor_type.elem_type for value in values}
    return {
        tensor_dtype_to_np_dtype(types[value]).name
        for node in graph.node
        if (node.op_type, node.name) == (operator, name)
        for value in (*node.input, *node.output)
        if types.get(value)
    }


def _infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with inferred shapes, which ONNX Runtime's optimized graphs do not have."""
    from onnx import shape_inference

    try:
        return shape_inference.infer_shapes(model, data_prop=True)
    except Exception:  # onnx can't infer shapes of some graphs; then fewer shapes are known
        return model


def _add_sizes(graph: onnx.GraphProto, values: _Values) -> None:
    """Add the values with one element and the values of integers or bools."""
    from gate.onnx_file.reading import constant_tensor

    for tensor in graph.initializer:
        if all(size == 1 for size in tensor.dims):
            values.single.add(tensor.name)
    for value in (*graph.value_info, *graph.input, *graph.output):
        kind = value.type.tensor_type
        if kind.elem_type in _integer_types():
            values.integers.add(value.name)
        if kind.HasField("shape") and all(d.dim_value == 1 for d in kind.shape.dim):
            values.single.add(value.name)
    for node in graph.node:
        constant = constant_tensor(node)
        if constant is not None and all(size == 1 for size in constant.dims):
            values.single.update(node.output)


def _integer_types() -> tuple[int, ...]:
    from onnx import TensorProto as T

    return (T.BOOL, T.INT8, T.INT16, T.INT32, T.INT64, T.UINT8, T.UINT16, T.UINT32, T.UINT64)


def _add_varying(graph: onnx.GraphProto, values: _Values) -> None:
    """Add the values that depend on the elements of an input."""
    from gate.onnx_file.reading import subgraphs

    for node in graph.node:
        inner = list(subgraphs(node))
        for body in inner:
            # Values passed to the body by position are not traced, so they count as varying.
            values.varying.update(value.name for value in body.input)
            _add_sizes(body, values)
            _add_varying(body, values)
        read = node.input if node.op_type not in _SHAPE_OPERATORS else ()
        unknown = inner or node.domain not in _STANDARD or node.op_type.startswith("Random")
        if unknown or not values.varying.isdisjoint(read):
            values.varying.update(node.output)
        if node.op_type in _COPIES:
            for names in (values.single, values.integers):
                names.update(node.output if names.issuperset(node.input) else ())


def _add_data(graph: onnx.GraphProto, values: _Values) -> None:
    """Add the values on which an output depends, from the last node to the first."""
    from gate.onnx_file.reading import subgraphs

    for node in reversed(graph.node):
        if values.data.isdisjoint(node.output):
            continue
        standard = node.domain in _STANDARD
        parameters = set(_PARAMETERS.get(node.op_type, ()) if standard else ())
        for index, name in enumerate(node.input):
            if name and index not in parameters:
                values.data.add(name)
        for body in subgraphs(node):
            outputs = [output.name for output in body.output]
            values.data.update(outputs[1:] if node.op_type == "Loop" else outputs)
            _add_data(body, values)
            # A value that one iteration passes to the next.
            if values.data & {value.name for value in body.input}:
                _add_data(body, values)
