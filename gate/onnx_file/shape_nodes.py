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
"""Inputs of operators of ONNX, by position, that are a shape, an index, an axis, a count or a
limit."""

_OF_SHAPES = ("Shape", "Size")

_COPIES = ("MemcpyFromHost", "MemcpyToHost")
"""What ONNX Runtime puts between two devices."""

_STANDARD = ("", "ai.onnx")


@dataclass
class _Values:
    """The values of a graph and its subgraphs that can be computed, by name."""

    data: set[str] = field(default_factory=set)
    """An output of the graph depends on their elements."""
    varying: set[str] = field(default_factory=set)
    """They depend on the elements of an input of the graph."""
    single: set[str] = field(default_factory=set)
    """They have one element."""
    whole: set[str] = field(default_factory=set)
    """They are integers or bools."""

    def is_activation(self, name: str) -> bool:
        """Whether these may be activations: they depend on an input, and may be floats."""
        return name in self.varying and name not in self.single and name not in self.whole

    def is_fixed(self, name: str) -> bool:
        """Whether these follow from shapes and constants, and are a number or integers."""
        return name not in self.varying and (name in self.single or name in self.whole)


def shape_nodes(model: onnx.ModelProto) -> frozenset[str]:
    """Return the nodes whose outputs reach only shapes, indices, axes or other parameters.

    They are named `op_type:node_name`, as ONNX Runtime's profile has it, which computes such nodes
    on the CPU on purpose. They are found by data flow: a value is data if a graph output depends on
    its elements. A value that is only read as a shape, an index, an axis or a count is a parameter,
    however many elements it has.

    Integers that follow from shapes and constants alone are shapes wherever they go, and so is a
    single number (the scale of an attention). A node that computes with activations is none,
    although its result may be an index. A name that several nodes have counts only if all of them
    are such nodes.
    """
    graph = _inferred(model).graph
    values = _Values(data={output.name for output in graph.output})
    constants = {tensor.name for tensor in graph.initializer}
    values.varying = {each.name for each in graph.input if each.name not in constants}
    _sizes(graph, values)
    _forward(graph, values)
    _backward(graph, values)
    by_name: dict[str, bool] = {}
    unnamed: set[str] = set()
    for node in _all_nodes(graph):
        of_shapes = _is_of_shapes(node, values)
        key = f"{node.op_type}:{node.name}"
        by_name[key] = by_name.get(key, True) and of_shapes
        if not node.name and not of_shapes:
            unnamed.add(node.op_type)
    return frozenset(
        key for key, of_shapes in by_name.items() if of_shapes and not _may_be(key, unnamed)
    )


def _is_of_shapes(node: onnx.NodeProto, values: _Values) -> bool:
    if HEAVY.search(node.op_type):
        return False
    if not values.data.isdisjoint(node.output):
        return all(values.is_fixed(name) for name in node.output if name)
    read = () if node.op_type in _OF_SHAPES else tuple(node.input)
    return not any(values.is_activation(name) for name in (*read, *node.output))


def is_shape_node(key: str, nodes: frozenset[str]) -> bool:
    """Whether the profile's `op_type:node_name` is one of `shape_nodes`. A node without a name has
    its number there: `Concat_17`."""
    operator, _, name = key.partition(":")
    return key in nodes or (_is_numbered(operator, name) and f"{operator}:" in nodes)


class NodeTypes:
    """Operators, their versions and the types of their inputs, by the names of nodes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._versions = {each.domain or "": each.version for each in model.opset_import}
        self._nodes: dict[str, list[onnx.NodeProto]] = {}
        for node in _all_nodes(model.graph):
            self._nodes.setdefault(f"{node.op_type}:{node.name}", []).append(node)

    def describe(self, name: str, inputs: Any) -> CpuNode:
        """The node of this name. `inputs`: of the profile, `[{"int64": [2, 9]}]`, one for each
        tensor that it was given."""
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
            since_version=self._since(operator, domain),
            inputs=_types(nodes[0].input, inputs) if len(nodes) == 1 else (),
        )

    def _since(self, operator: str, domain: str) -> int | None:
        from onnx import defs

        version = self._versions.get(domain)
        if domain == _MICROSOFT:
            return 1  # all of its operators have one version only
        if version is None:
            return None
        try:
            return int(defs.get_schema(operator, version, domain).since_version)
        except defs.SchemaError:
            return None


_MICROSOFT = "com.microsoft"


def _types(names: Sequence[str], profiled: Any) -> tuple[str, ...]:
    """The types in the profile, one for each input of the node. Nothing where it is not sure which
    is which."""
    try:
        kinds = [next(iter(each)) for each in profiled]
    except (TypeError, StopIteration):
        return ()
    if len(kinds) != len([name for name in names if name]):
        return ()
    left = iter(kinds)
    return tuple(str(next(left)) if name else "" for name in names)


def _may_be(key: str, unnamed: set[str]) -> bool:
    """Whether the profile may call a node without a name so, which computes data."""
    operator, _, name = key.partition(":")
    return operator in unnamed and _is_numbered(operator, name)


def _is_numbered(operator: str, name: str) -> bool:
    prefix, _, number = name.rpartition("_")
    return prefix == operator and number.isdecimal()


def _all_nodes(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    from gate.onnx_file.reading import subgraphs

    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from _all_nodes(inner)


def reads_double(model: onnx.ModelProto, operator: str, name: str) -> bool:
    """Whether a node of this operator and name computes with float64."""
    from onnx import TensorProto

    graph = _inferred(model).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    values = (*graph.value_info, *graph.input, *graph.output)
    types |= {value.name: value.type.tensor_type.elem_type for value in values}
    return any(
        types.get(value) == TensorProto.DOUBLE
        for node in graph.node
        if (node.op_type, node.name) == (operator, name)
        for value in (*node.input, *node.output)
    )


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the shapes of its values, as far as they are known: ONNX Runtime writes none
    into the graph that it optimized."""
    from onnx import shape_inference

    try:
        return shape_inference.infer_shapes(model, data_prop=True)
    except Exception:  # of a graph that onnx does not understand: fewer shapes are known
        return model


def _sizes(graph: onnx.GraphProto, values: _Values) -> None:
    """Note which values have one element, and which are no floats, as far as the file has it."""
    from gate.onnx_file.reading import constant_tensor

    for tensor in graph.initializer:
        if all(size == 1 for size in tensor.dims):
            values.single.add(tensor.name)
    for value in (*graph.value_info, *graph.input, *graph.output):
        kind = value.type.tensor_type
        if kind.elem_type in _whole_types():
            values.whole.add(value.name)
        if kind.HasField("shape") and all(d.dim_value == 1 for d in kind.shape.dim):
            values.single.add(value.name)
    for node in graph.node:
        made = constant_tensor(node)
        if made is not None and all(size == 1 for size in made.dims):
            values.single.update(node.output)


def _whole_types() -> tuple[int, ...]:
    from onnx import TensorProto as T

    return (T.BOOL, T.INT8, T.INT16, T.INT32, T.INT64, T.UINT8, T.UINT16, T.UINT32, T.UINT64)


def _forward(graph: onnx.GraphProto, values: _Values) -> None:
    """Follow what depends on the elements of an input."""
    from gate.onnx_file.reading import subgraphs

    for node in graph.node:
        inner = list(subgraphs(node))
        for body in inner:
            # What is passed to the body by position is not followed: it may be anything.
            values.varying.update(value.name for value in body.input)
            _sizes(body, values)
            _forward(body, values)
        read = node.input if node.op_type not in _OF_SHAPES else ()
        unknown = inner or node.domain not in _STANDARD or node.op_type.startswith("Random")
        if unknown or not values.varying.isdisjoint(read):
            values.varying.update(node.output)
        if node.op_type in _COPIES:
            for names in (values.single, values.whole):
                names.update(node.output if names.issuperset(node.input) else ())


def _backward(graph: onnx.GraphProto, values: _Values) -> None:
    """Follow what an output depends on, from the last node to the first."""
    from gate.onnx_file.reading import subgraphs

    for node in reversed(graph.node):
        if values.data.isdisjoint(node.output):
            continue
        standard = node.domain in _STANDARD
        parameters = set(_PARAMETERS.get(node.op_type, ()) if standard else ())
        for place, name in enumerate(node.input):
            if name and place not in parameters:
                values.data.add(name)
        for body in subgraphs(node):
            outputs = [output.name for output in body.output]
            values.data.update(outputs[1:] if node.op_type == "Loop" else outputs)
            _backward(body, values)
            # A value that one iteration hands to the next.
            if values.data & {value.name for value in body.input}:
                _backward(body, values)
