"""Conditions in an ONNX file that depend only on the sizes of its inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from gate.onnx_file.reading import RANDOM_OPERATORS, attributes, constant_tensor, subgraphs
from gate.onnx_file.sessions import open_on_cpu
from gate.onnx_file.tested_file import EditableFile, TestedFile
from gate.storage.arrays import OutputArray

Feed = Mapping[str, OutputArray]
"""Arrays by input name."""

State = tuple[tuple[bool, bool], ...]
"""For each condition, whether it holds for any element and for all elements."""

_BOOLEAN = {
    "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor",
}  # fmt: skip

_PIECEWISE = {"Min", "Max", "Clip", "Relu", "Abs"}
"""Operators that return their first input or another value: conditions without a comparison."""


_LARGEST_CONSTANT = 2**31


class SizeConditions:
    """The conditions of one file, and their values at any input size.

    Shapes of intermediate tensors are measured at a few sizes and extrapolated linearly; conditions
    on other shapes are ignored. Conditions inside a loop are evaluated at the last iteration's
    counter and the initial tensors. Raises the exceptions of onnx.
    """

    def __init__(self, candidate: TestedFile) -> None:
        self._file = EditableFile(candidate)
        self._flat = _FlatGraph(self._file.model)
        self._conditions = [
            (node.output[0], node.input[0] if node.op_type in _PIECEWISE else None)
            for node in self._flat.nodes
            if node.op_type in _BOOLEAN | _PIECEWISE or _to_bool(node)
            if node.output[0] in self._flat.sized
        ]
        self._inputs = {value.name for value in self._file.model.graph.input}

    def __bool__(self) -> bool:
        return bool(self._conditions)

    @cached_property
    def constants(self) -> list[int]:
        """Return the sorted positive integers from which conditions are computed."""
        nodes, initializers = self._flat.needed(name for name, _ in self._conditions)
        tensors = [
            *initializers,
            *(t for node in nodes if (t := constant_tensor(node)) is not None),
        ]
        constants: set[int] = set()
        for tensor in tensors:
            if tensor.data_type != TensorProto.STRING:
                array = numpy_helper.to_array(tensor).ravel()[:_MAX_VALUES].astype(np.float64)
                integers = array[
                    (array == np.round(array)) & (array > 0) & (array < _LARGEST_CONSTANT)
                ]
                constants |= set(integers.astype(np.int64).tolist())
        return sorted(constants)

    def along(
        self, build: Callable[[int], Feed], shapes: Callable[[int], Feed], here: int
    ) -> Callable[[int], State] | None:
        """Return a function from the size of one axis to the conditions, or None without any.

        build: returns inputs of a size near `here`, on which the file is run. shapes: returns
        inputs of which only the shapes are read.
        """
        lines = self._fit_lines(build, here)
        conditions = [
            (name, first)
            for name, first in self._conditions
            if all(self._is_direct(node) or node.output[0] in lines for node in self._sources(name))
        ]
        if not conditions:
            return None

        def compute(
            opened: tuple[Any, list[NodeProto]], names: Sequence[str], size: int
        ) -> dict[str, OutputArray]:
            session, sources = opened
            feed = {
                node.output[0]: lines[node.output[0]](size)
                if node.output[0] in lines
                else _evaluate_shape(node, shapes(size)[node.input[0]])
                for node in sources
            }
            return dict(zip(names, session.run(names, feed), strict=True))

        arrays = compute(self._session(conditions), _names(conditions), here)
        conditions = [pair for pair in conditions if arrays[pair[0]].size <= _MAX_ELEMENTS]
        if not conditions:
            return None
        opened, names = self._session(conditions), _names(conditions)

        def state(size: int) -> State:
            arrays = compute(opened, names, size)
            return tuple(
                _state_of(arrays[name], first and arrays[first]) for name, first in conditions
            )

        return state

    def _is_direct(self, node: NodeProto) -> bool:
        return node.input[0] in self._inputs

    def _sources(self, name: str) -> list[NodeProto]:
        """Return the Shape and Size nodes from which a tensor is computed."""
        return [n for n in self._flat.needed([name])[0] if n.op_type in ("Shape", "Size")]

    def _fit_lines(
        self, build: Callable[[int], Feed], here: int
    ) -> dict[str, Callable[[int], OutputArray]]:
        """Return the intermediate shapes that depend linearly on the size, as functions of it."""
        names = dict.fromkeys(
            node.output[0]
            for name, _ in self._conditions
            for node in self._sources(name)
            if not self._is_direct(node) and node.output[0] not in self._flat.unbound
        )
        if not names:
            return {}
        sizes = (here, here + 1, here + 3)
        try:
            session = self._file.session(self._flat.model(self._file.model, list(names)))
            measured = [session.run(list(names), dict(build(size))) for size in sizes]
        except Exception:  # a branch that is not taken may not be computable
            return {}
        lines: dict[str, Callable[[int], OutputArray]] = {}
        for name, first, second, third in zip(names, *measured, strict=True):
            if first.shape == second.shape == third.shape and np.array_equal(
                third - first, 3 * (second - first)
            ):
                lines[name] = _linear_shape(first, second - first, here)
        return lines

    def _session(self, conditions: Sequence[tuple[str, str | None]]) -> tuple[Any, list[NodeProto]]:
        names = _names(conditions)
        nodes, initializers = self._flat.needed(names)
        sources = [node for node in nodes if node.op_type in ("Shape", "Size")]
        graph = helper.make_graph(
            [node for node in nodes if node.op_type not in ("Shape", "Size")],
            "conditions",
            [
                helper.make_tensor_value_info(
                    node.output[0], TensorProto.INT64, [] if node.op_type == "Size" else [None]
                )
                for node in sources
            ],
            [onnx.ValueInfoProto(name=name) for name in names],
            initializer=initializers,
        )
        model = self._file.model
        conditions_model = helper.make_model(graph, opset_imports=model.opset_import)
        conditions_model.ir_version = model.ir_version
        return open_on_cpu(conditions_model.SerializeToString()), sources


def _names(conditions: Sequence[tuple[str, str | None]]) -> list[str]:
    """Return the names of the values that these conditions need."""
    return list(dict.fromkeys(n for pair in conditions for n in pair if n is not None))


_MAX_ELEMENTS = 1024
"""Maximum size of a condition for the samples; attention masks grow with the square of a length."""

_MAX_VALUES = 64
"""Maximum number of values that are read from one constant; longer constants are tables."""


def _to_bool(node: NodeProto) -> bool:
    return node.op_type == "Cast" and attributes(node).get("to") == TensorProto.BOOL


def _evaluate_shape(node: NodeProto, array: OutputArray) -> OutputArray:
    """Return the result of a Shape or Size node for an array."""
    if node.op_type == "Size":
        return np.asarray(array.size, np.int64)
    bounds = attributes(node)
    return np.asarray(array.shape[bounds.get("start", 0) : bounds.get("end")], np.int64)


def _linear_shape(first: OutputArray, step: OutputArray, here: int) -> Callable[[int], OutputArray]:
    start, growth = first.astype(np.int64), step.astype(np.int64)
    return lambda size: np.asarray(start + (size - here) * growth)


def _state_of(value: OutputArray, first: OutputArray | None) -> tuple[bool, bool]:
    holds = value if first is None else np.asarray(value == first)
    return bool(holds.any()), bool(holds.all())


class _FlatGraph:
    """The nodes of a graph and its subgraphs in one list, with unique tensor names."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.initializers: dict[str, TensorProto] = {}
        self._names = {value.name for value in model.graph.input}
        self._loop_arguments: set[str] = set()
        """Tensors that exist only inside of a loop."""
        self.nodes = list(self._flat(model.graph, {}, depth=0))
        self._producers = {
            name: index for index, node in enumerate(self.nodes) for name in node.output if name
        }
        self.sized: set[str] = set()
        """Tensors that depend only on sizes and constants."""
        constant = set(self.initializers)
        for node in self.nodes:
            inputs = [name for name in node.input if name]
            if node.op_type in ("Shape", "Size"):
                self.sized |= set(node.output)
            elif node.op_type.startswith(RANDOM_OPERATORS) or any(subgraphs(node)):
                continue
            elif all(name in constant for name in inputs):
                constant |= set(node.output)
            elif all(name in constant or name in self.sized for name in inputs):
                self.sized |= set(node.output)

    def needed(self, names: Any) -> tuple[list[NodeProto], list[TensorProto]]:
        """Return the nodes and initializers that compute tensors from sizes."""
        pending, visited, indices = list(names), set[str](), set[int]()
        while pending:
            name = pending.pop()
            if name in visited or not name:
                continue
            visited.add(name)
            index = self._producers.get(name)
            if index is None:
                continue
            indices.add(index)
            if self.nodes[index].op_type not in ("Shape", "Size"):
                pending += self.nodes[index].input
        nodes = [self.nodes[index] for index in sorted(indices)]
        return nodes, [tensor for name, tensor in self.initializers.items() if name in visited]

    @cached_property
    def unbound(self) -> set[str]:
        """Return the tensors that depend on tensors which exist only inside of a loop."""
        unbound = set(self._loop_arguments)
        for node in self.nodes:
            if unbound.intersection(node.input):
                unbound |= set(node.output)
        return unbound

    def model(self, model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
        """Return the flat graph with these tensors as its only outputs."""
        flat = copy.deepcopy(model)
        for field in ("node", "output", "value_info"):
            flat.graph.ClearField(field)
        flat.graph.node.extend(
            node for node in self.nodes if not self.unbound.intersection(node.input)
        )
        present = {tensor.name for tensor in model.graph.initializer}
        flat.graph.initializer.extend(t for n, t in self.initializers.items() if n not in present)
        flat.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        return flat

    def _flat(
        self, graph: onnx.GraphProto, names: Mapping[str, str], *, depth: int
    ) -> Iterator[NodeProto]:
        """Yield renamed copies of the nodes. names: new names of tensors in the outer scopes."""
        names = dict(names)
        for tensor in graph.initializer:
            names[tensor.name] = self._unique_name(tensor.name, depth)
            renamed = copy.deepcopy(tensor)
            renamed.name = names[tensor.name]
            if tensor.data_location != TensorProto.EXTERNAL:
                self.initializers[renamed.name] = renamed
        for node in graph.node:
            for inner in subgraphs(node):
                arguments = {
                    value.name: self._unique_name(value.name, depth + 1) for value in inner.input
                }
                yield from self._loop_inputs(node, list(arguments.values()), names)
                yield from self._flat(inner, {**names, **arguments}, depth=depth + 1)
            copied = copy.deepcopy(node)
            _rename_captured(copied, names)
            copied.input[:] = [names.get(name, name) for name in node.input]
            for name in filter(None, node.output):
                names[name] = self._unique_name(name, depth)
            copied.output[:] = [names.get(name, name) for name in node.output]
            yield copied

    def _loop_inputs(
        self, node: NodeProto, arguments: Sequence[str], names: Mapping[str, str]
    ) -> Iterator[NodeProto]:
        """Yield nodes that compute the inputs of a loop's body: the last counter and the initial
        tensors of the loop."""
        sources = [names.get(name, name) for name in node.input]
        if node.op_type == "Scan":
            sources = sources[: len(sources) - attributes(node)["num_scan_inputs"]]
        for index, argument in enumerate(arguments):
            source = sources[index] if index < len(sources) else ""
            if not source:
                self._loop_arguments.add(argument)
            elif node.op_type == "Loop" and index == 0:
                constant = numpy_helper.from_array(np.asarray(1), "one of loops")
                self.initializers[constant.name] = constant
                yield helper.make_node("Sub", [source, constant.name], [argument])
            else:
                yield helper.make_node("Identity", [source], [argument])

    def _unique_name(self, name: str, depth: int) -> str:
        """Return a name that no other scope has; names in the main graph do not change."""
        if not depth:
            self._names.add(name)
            return name
        unique = f"{name}@{len(self._names)}"
        self._names.add(unique)
        return unique


def _rename_captured(node: NodeProto, names: Mapping[str, str]) -> None:
    """Rename the outer tensors that the subgraphs of a node read."""
    for graph in subgraphs(node):
        for inner in graph.node:
            inner.input[:] = [names.get(name, name) for name in inner.input]
            _rename_captured(inner, names)
        for value in graph.output:
            value.name = names.get(value.name, value.name)
