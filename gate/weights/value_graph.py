"""A graph with every name resolved: who makes a value, who reads it, and which ones matter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from gate.errors import OnnxFileError
from gate.onnxfile.walk import subgraphs
from gate.parity.graph.contents import small_values

STANDARD = ("", "ai.onnx")
_HAND_ON = ("Identity", "Cast")
_CONSTANTS = ("value", "value_float", "value_floats", "value_int", "value_ints")


class GraphValue(NamedTuple):
    """A name in the graph or subgraph that defines it: branches may use the same names."""

    scope: int
    name: str


@dataclass(frozen=True, eq=False)
class Node:
    """A node with its values; an input or output that is left out is None."""

    proto: NodeProto
    place: str
    """`op_type:name`, after the nodes whose subgraphs it lies in."""
    inputs: tuple[GraphValue | None, ...]
    outputs: tuple[GraphValue | None, ...]
    branches: tuple[GraphValue, ...]
    """What its subgraphs return."""

    @property
    def operator(self) -> str:
        """The operator's name in the standard domain, else `domain::op_type`."""
        domain = self.proto.domain
        return self.proto.op_type if domain in STANDARD else f"{domain}::{self.proto.op_type}"

    def attribute(self, name: str, default: int) -> int:
        """An integer attribute."""
        found = next((a for a in self.proto.attribute if a.name == name), None)
        return default if found is None else int(found.i)

    def input(self, slot: int) -> GraphValue | None:
        """The input in this slot, None if it is left out."""
        return self.inputs[slot] if slot < len(self.inputs) else None


class FlatGraph:
    """All nodes of a model without functions, those of subgraphs too, in order of execution."""

    def __init__(self, model: onnx.ModelProto) -> None:
        """`model` has its types inferred. Raises OnnxFileError if a name has no origin."""
        self.nodes: list[Node] = []
        self.tensors: dict[GraphValue, TensorProto] = {}
        """Initializers and constants."""
        self.types: dict[GraphValue, int] = {}
        """Element types, where they are known."""
        self.makers: dict[GraphValue, Node] = {}
        self.readers: defaultdict[GraphValue, list[tuple[Node, int]]] = defaultdict(list)
        """Nodes that read a value, with the slot."""
        self.entries: list[GraphValue] = []
        """Inputs of the graph and of its subgraphs."""
        self.opset = max(o.version for o in model.opset_import if o.domain in STANDARD)
        self._scopes = 0
        names = self._add(model.graph, {}, "")
        self.outputs = [names[value.name] for value in model.graph.output]
        self.live_values = self._reached()

    def live(self) -> Iterator[Node]:
        """The nodes that some output of the file depends on."""
        return (node for node in self.nodes if self.is_live(node))

    def live_tensors(self) -> Iterator[tuple[GraphValue, TensorProto]]:
        """The initializers and constants that some output of the file depends on."""
        return ((v, tensor) for v, tensor in self.tensors.items() if v in self.live_values)

    def is_live(self, node: Node) -> bool:
        """True if some output of the file depends on it."""
        return any(value in self.live_values for value in node.outputs)

    def constant(self, value: GraphValue | None) -> NDArray[Any] | None:
        """The small constant behind a value; None if it is none."""
        while value is not None:
            if value in self.tensors:
                return small_values(self.tensors[value])
            maker = self.makers.get(value)
            value = maker.input(0) if maker and maker.operator in _HAND_ON else None
        return None

    def _add(
        self, graph: onnx.GraphProto, outer: Mapping[str, GraphValue], path: str
    ) -> dict[str, Any]:
        """Add a graph or subgraph; return what its names mean."""
        scope, self._scopes = self._scopes, self._scopes + 1
        names = dict(outer)
        sparse = [tensor.values.name for tensor in graph.sparse_initializer]
        own = [*(v.name for v in graph.input), *(t.name for t in graph.initializer), *sparse]
        names |= {name: GraphValue(scope, name) for name in own}
        self.entries += [names[v.name] for v in graph.input]
        self.tensors |= {GraphValue(scope, tensor.name): tensor for tensor in graph.initializer}
        self.types |= {GraphValue(scope, t.name): t.data_type for t in graph.initializer}
        for info in (*graph.input, *graph.output, *graph.value_info):
            if info.type.HasField("tensor_type"):
                self.types[GraphValue(scope, info.name)] = info.type.tensor_type.elem_type
        for proto in graph.node:
            self._add_node(proto, names, scope, path)
        return names

    def _add_node(
        self, proto: NodeProto, names: dict[str, GraphValue], scope: int, path: str
    ) -> None:
        inputs = tuple(_resolved(name, names) if name else None for name in proto.input)
        outputs = tuple(GraphValue(scope, name) if name else None for name in proto.output)
        label = proto.name or next((name for name in proto.output if name), "")
        place = f"{path}{proto.op_type}:{label}"
        branches = []
        for graph in subgraphs(proto):
            inside = self._add(graph, names, f"{place} / ")
            branches += [_resolved(value.name, inside) for value in graph.output]
        node = Node(proto, place, inputs, outputs, tuple(branches))
        self.nodes.append(node)
        names |= {value.name: value for value in outputs if value}
        self.makers |= {value: node for value in outputs if value}
        for slot, value in enumerate(inputs):
            if value is not None:
                self.readers[value].append((node, slot))
        constant = _constant(node)
        if constant is not None and outputs[0]:
            self.tensors[outputs[0]] = constant
            self.types[outputs[0]] = constant.data_type

    def _reached(self) -> set[GraphValue]:
        """The values that the outputs of the file depend on."""
        reached: set[GraphValue] = set()
        waiting = list(self.outputs)
        while waiting:
            value = waiting.pop()
            if value in reached:
                continue
            reached.add(value)
            maker = self.makers.get(value)
            if maker is not None:
                waiting += [v for v in (*maker.inputs, *maker.branches) if v is not None]
        return reached


def _resolved(name: str, names: Mapping[str, GraphValue]) -> GraphValue:
    if name not in names:
        raise OnnxFileError(f"nothing in the graph makes {name!r}. Export the model again.")
    return names[name]


def _constant(node: Node) -> TensorProto | None:
    """What a Constant node holds."""
    if node.operator != "Constant":
        return None
    found = next((a for a in node.proto.attribute if a.name in _CONSTANTS), None)
    if found is None:
        return None
    value = helper.get_attribute_value(found)
    if isinstance(value, TensorProto):
        return value
    kind = np.float32 if "float" in found.name else np.int64
    return numpy_helper.from_array(np.asarray(value, dtype=kind))
