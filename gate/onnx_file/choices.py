"""Run a file and read which elements its nodes choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from gate.onnx_file.reading import STANDARD_DOMAINS, add_outputs, attributes, opset_of
from gate.onnx_file.sessions import session_options
from gate.onnx_file.tested_file import EditableFile, TestedFile
from gate.policy.runtime_options import OrtSetup
from gate.storage.arrays import OutputArray

_CHOICE_OUTPUTS = {
    "TopK": 1,
    "ArgMax": 0,
    "ArgMin": 0,
    "NonMaxSuppression": 0,
    "Greater": 0,
    "GreaterOrEqual": 0,
    "Less": 0,
    "LessOrEqual": 0,
}
"""Operators that choose by comparing floats, with the index of the output with the choice."""

ROUNDING = frozenset({"Floor", "Ceil", "Round", "Sign", "Mod", "Cast", "QuantizeLinear"})
"""Operators that round floats (Cast to an integer type; the quotient of Mod with `fmod`)."""

_COMPARISONS = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual"})

_INDICES = frozenset({"TopK", "ArgMax", "ArgMin", "NonMaxSuppression"})
"""Operators that choose int64 indices; the choices of the others are bools."""


@dataclass(frozen=True)
class Choice:
    """The choice of one node on a batch."""

    operator: str
    """ONNX operator type."""
    chosen: NDArray[Any]
    """Indices (int64), the bools of a comparison, the integers of a conversion, or rounded floats.
    The zero point of QuantizeLinear is subtracted."""
    operand: NDArray[Any] | None = None
    """The floats that are rounded: the input of Cast, the input of QuantizeLinear divided by its
    scale, the quotient of Mod. Of a comparison, left side minus right side. Of NonMaxSuppression,
    the threshold. None if the file does not expose it."""
    tensor: str = ""
    """Name of the chosen tensor in the file."""


class ChoiceSession:
    """A session of a file with the choices of its nodes as additional outputs.

    Nodes in branches of an If and in the body of a Loop are included, but not those of a nested
    Loop. Raises DigestMismatch, and any error of ONNX Runtime.
    """

    def __init__(
        self,
        candidate: TestedFile,
        setup: OrtSetup,
        *,
        threads: int,
        deterministic: bool,
        quantizes: Callable[[], bool],
    ) -> None:
        """quantizes: returns whether the QuantizeLinear nodes come from the model itself."""
        file = EditableFile(candidate)
        model = file.model
        nodes = {node.output[0]: node for node in model.graph.node if _has_operands(node)}
        """By the decision."""
        operators = _expose(model.graph, loops=opset_of(model) >= _SEQUENCE_LOOP_OPSET)
        if "QuantizeLinear" in operators.values() and not quantizes():
            operators = {name: op for name, op in operators.items() if op != "QuantizeLinear"}
        self._operators = operators
        """By the name of the tensor, in the order of the nodes."""
        self._loops = {
            name: node.output[0]
            for node in model.graph.node
            for name in node.output
            if node.op_type == "Loop" and name in operators
        }
        """The Loop of each decision that is made in one."""
        self._session: Any = None
        if not self._operators:
            return
        self._nodes = {name: nodes[name] for name in self._operators if name in nodes}
        self._constants = {tensor.name for tensor in model.graph.initializer}
        # An optimized runtime computes a convolution and the quantization of its result in
        # integers. The float result exists only if it is an output, which would undo the fusion.
        hidden = {
            node.input[0]
            for node in self._nodes.values()
            if node.op_type == "QuantizeLinear" and setup != setup.plain
        }
        read = {name for node in self._nodes.values() for name in _operand_names(node) if name}
        inputs = {value.name for value in model.graph.input}
        self._names = list(dict.fromkeys([*self._operators, *sorted(read - inputs - hidden)]))
        add_outputs(model.graph, self._names)
        options = session_options(setup, threads=threads, deterministic=deterministic)
        self._session = file.session(model, options, setup)

    def run(self, feed: Mapping[str, OutputArray]) -> list[Choice]:
        """Return the choices on a batch, in the order of the nodes. feed: arrays by input name."""
        if self._session is None:
            return []
        returned = self._session.run(self._names, dict(feed))
        arrays = {**feed, **dict(zip(self._names, returned, strict=True))}
        choices: list[Choice] = []
        for loop, group in groupby(self._operators, key=self._loops.get):
            names = list(group)
            # One array an iteration: the model makes all decisions of one before those of the next.
            iterations = (
                [[arrays[name] for name in names]]
                if loop is None
                else zip(*(arrays[name] for name in names), strict=True)
            )
            for chosen in iterations:
                for name, array in zip(names, chosen, strict=True):
                    choice = self._choice(name, array, arrays) if array.size else None
                    if choice is not None:
                        choices.append(choice)
        return choices

    def _choice(
        self, name: str, chosen: OutputArray, arrays: Mapping[str, OutputArray]
    ) -> Choice | None:
        """Return the decision of one node; None where integers are converted, or a constant is."""
        operator, node = self._operators[name], self._nodes.get(name)
        if node is None:
            return Choice(operator, chosen, None, name)
        read = [arrays.get(name_read) for name_read in _operand_names(node)]
        if operator in _READERS:
            return _READERS[operator](node, chosen, *read)
        if operator in _COMPARISONS:
            left, right = read
            if left is None or right is None or left.dtype.kind != "f":
                return Choice(operator, chosen, None, name)
            with np.errstate(all="ignore"):
                return Choice(
                    operator, chosen, left.astype(np.float64) - right.astype(np.float64), name
                )
        (operand,) = read
        if _rounds_floats(node) and (
            operand is None or operand.dtype.kind != "f" or node.input[0] in self._constants
        ):
            return None
        return Choice(operator, chosen, operand, name)


def _read_quantized(
    node: onnx.NodeProto,
    chosen: OutputArray,
    x: OutputArray | None,
    scale: OutputArray | None = None,
    zero_point: OutputArray | None = None,
) -> Choice | None:
    if scale is None:
        return None
    shape = [1] * chosen.ndim
    if scale.size > 1:  # one for each channel
        axis = attributes(node).get("axis", 1)
        if scale.size != chosen.shape[axis]:
            return None
        shape[axis] = -1
    steps = chosen.astype(np.float64)
    if zero_point is not None:
        steps = steps - zero_point.astype(np.float64).reshape(shape)
    operand = None if x is None else x.astype(np.float64) / scale.astype(np.float64).reshape(shape)
    return Choice(node.op_type, steps, operand, node.output[0])


def _read_quotient(
    node: onnx.NodeProto, remainder: OutputArray, x: OutputArray | None, divisor: OutputArray | None
) -> Choice | None:
    """Return the rounded quotient of a Mod node; None for integers."""
    if x is None or divisor is None or x.dtype.kind != "f":
        return None
    dividend, divisor64 = x.astype(np.float64), divisor.astype(np.float64)
    with np.errstate(all="ignore"):
        quotient = np.asarray(dividend / divisor64)
        rounded = np.asarray(np.round((dividend - remainder.astype(np.float64)) / divisor64))
    return Choice(node.op_type, rounded, quotient, node.output[0])


_READERS: Mapping[str, Callable[..., Choice | None]] = {
    "QuantizeLinear": _read_quantized,
    "Mod": _read_quotient,
}
"""Functions that compute the choice from the inputs and the output of the node."""


_INTEGER_TYPES = frozenset({
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
})  # fmt: skip


def _rounds_floats(node: onnx.NodeProto) -> bool:
    """Return whether a node converts to integers or rounds floats."""
    if node.op_type == "Cast":
        return attributes(node).get("to") in _INTEGER_TYPES
    if node.op_type == "Mod":
        return bool(attributes(node).get("fmod"))
    return node.op_type in ROUNDING and node.domain in STANDARD_DOMAINS


def _has_operands(node: onnx.NodeProto) -> bool:
    """Return whether the operands of a node's choice are among its inputs."""
    return _rounds_floats(node) or node.op_type in (*_COMPARISONS, "NonMaxSuppression")


def _operand_names(node: onnx.NodeProto) -> list[str]:
    """Return the names of the inputs from which `Choice.operand` is computed."""
    if node.op_type == "NonMaxSuppression":
        return [*node.input[3:4]] or [""]
    if node.op_type in (*_COMPARISONS, "Mod"):
        return list(node.input[:2])
    if node.op_type == "QuantizeLinear":
        return [name for name in node.input if name]
    return list(node.input[:1])


_SEQUENCE_LOOP_OPSET = 13
"""Opset from which on a Loop hands on sequences."""


def _expose(graph: onnx.GraphProto, *, rounded: bool = True, loops: bool = False) -> dict[str, str]:
    """Return the operators by the name of their decision. Branches, and bodies of `loops`, get
    decisions as outputs, but those of nodes that round floats only if `rounded`."""
    operators: dict[str, str] = {}
    for node in list(graph.node):
        if node.domain not in STANDARD_DOMAINS:
            continue
        if node.op_type in _CHOICE_OUTPUTS:
            operators[node.output[_CHOICE_OUTPUTS[node.op_type]]] = node.op_type
        elif rounded and _rounds_floats(node):
            operators[node.output[0]] = node.op_type
        elif node.op_type == "If":
            operators |= _expose_branches(node)
        elif node.op_type == "Loop" and loops:
            operators |= _expose_body(graph, node)
    return operators


def _expose_body(graph: onnx.GraphProto, node: onnx.NodeProto) -> dict[str, str]:
    """Add the decisions of the body of a Loop to its outputs: a sequence each, of one array an
    iteration, because their shapes may differ."""
    body = next(attribute.g for attribute in node.attribute if attribute.name == "body")
    operators = {}
    for decision, operator in _expose(body, rounded=False).items():
        exposed = f"{decision} of {node.output[0]}"
        before, after, empty = (f"{exposed}, {word}" for word in ("before", "after", "empty"))
        dtype = TensorProto.INT64 if operator in _INDICES else TensorProto.BOOL
        carried = len(body.input) - 2  # besides the iteration and the condition
        node.input.extend([""] * (2 - len(node.input)))
        graph.node.insert(0, helper.make_node("SequenceEmpty", [], [empty], dtype=dtype))
        body.node.append(helper.make_node("SequenceInsert", [before, decision], [after]))
        node.input.append(empty)
        node.output.insert(carried, exposed)
        types = [helper.make_tensor_sequence_value_info(n, dtype, None) for n in (before, after)]
        body.input.append(types[0])
        body.output.insert(1 + carried, types[1])
        operators[exposed] = operator
    return operators


def _expose_branches(node: onnx.NodeProto) -> dict[str, str]:
    """Add the choices in both branches of an If to its outputs; empty for the branch not taken."""
    operators = {}
    branches = [attribute.g for attribute in node.attribute]
    for source in branches:
        for name, operator in _expose(source, rounded=False).items():
            exposed = f"{name} of {node.output[0]}"
            dtype = np.int64 if operator in _INDICES else np.bool_
            for branch in branches:
                inner = name
                if branch is not source:
                    inner = f"no {exposed}"
                    nothing = numpy_helper.from_array(np.empty((0, 3), dtype))
                    branch.node.append(helper.make_node("Constant", [], [inner], value=nothing))
                branch.output.append(onnx.ValueInfoProto(name=inner))
            node.output.append(exposed)
            operators[exposed] = operator
    return operators
