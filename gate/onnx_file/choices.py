"""Run a file and read which elements its nodes choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from gate.onnx_file.sessions import session_options
from gate.onnx_file.tested_file import EditableFile, TestedFile
from gate.policy.runtime_options import OrtSetup
from gate.storage.arrays import OutputArray

_CHOOSERS = {
    "TopK": 1,
    "ArgMax": 0,
    "ArgMin": 0,
    "NonMaxSuppression": 0,
    "Greater": 0,
    "GreaterOrEqual": 0,
    "Less": 0,
    "LessOrEqual": 0,
}
"""Operators that decide by comparing floats: which of their outputs holds the decision."""

MAKE_WHOLE = frozenset({"Floor", "Ceil", "Round", "Sign", "Cast"})
"""Operators that make floats whole (Cast: to a type of integers)."""

_INDICES = frozenset({"TopK", "ArgMax", "ArgMin", "NonMaxSuppression"})
"""Those whose decision is of int64; of the others it is of bools."""


@dataclass(frozen=True)
class Choice:
    """The choice of one node on a batch."""

    operator: str
    """ONNX operator type."""
    chosen: NDArray[Any]
    """Indices (int64), the bools of a comparison, the integers of a conversion, or whole floats."""
    operand: NDArray[Any] | None = None
    """The floats that are converted (`Cast`) or made whole."""
    tensor: str = ""
    """The name of the decision in the file."""


class ChoiceSession:
    """A session of a file with the decisions of its nodes as further outputs.

    Nodes of the branches of an If count; those of loops do not. Raises what ONNX Runtime raises,
    and DigestMismatch.
    """

    def __init__(
        self, candidate: TestedFile, setup: OrtSetup, *, threads: int, deterministic: bool
    ) -> None:
        file = EditableFile(candidate)
        model = file.model
        self._operands = {
            node.output[0]: node.input[0] for node in model.graph.node if _makes_whole(node)
        }
        """What is converted to integers or made whole, by the result."""
        self._operators = _expose(model.graph)
        """By the name of the tensor, in the order of the nodes."""
        self._session: Any = None
        if not self._operators:
            return
        produced = {name for node in model.graph.node for name in node.output}
        self._names = list(
            dict.fromkeys([*self._operators, *(produced & set(self._operands.values()))])
        )
        stated = {value.name for value in model.graph.output}
        model.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in self._names if name not in stated
        )
        options = session_options(setup, threads=threads, deterministic=deterministic)
        self._session = file.session(model, options, setup)

    def run(self, feed: Mapping[str, OutputArray]) -> list[Choice]:
        """Return the decisions on a batch, by name of the file's inputs, in the order of the
        nodes."""
        if self._session is None:
            return []
        returned = self._session.run(self._names, dict(feed))
        arrays = {**feed, **dict(zip(self._names, returned, strict=True))}
        return [
            Choice(
                operator, np.asarray(arrays[name]), arrays.get(self._operands.get(name, "")), name
            )
            for name, operator in self._operators.items()
            if arrays[name].size
            and (name not in self._operands or self._is_of_floats(name, arrays))
        ]

    def _is_of_floats(self, name: str, arrays: Mapping[str, OutputArray]) -> bool:
        operand = arrays.get(self._operands[name])
        return operand is not None and operand.dtype.kind == "f"


_INTEGERS = frozenset({
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
})  # fmt: skip


def _makes_whole(node: onnx.NodeProto) -> bool:
    """Return True if a node converts something to integers, or makes floats whole."""
    if node.op_type == "Cast":
        return any(a.name == "to" and a.i in _INTEGERS for a in node.attribute)
    return node.op_type in MAKE_WHOLE and node.domain in ("", "ai.onnx")


def _expose(graph: onnx.GraphProto, *, whole: bool = True) -> dict[str, str]:
    """Return the operators by the name of their decision. Branches get decisions as outputs, but
    not those that make floats `whole`."""
    operators: dict[str, str] = {}
    for node in graph.node:
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type in _CHOOSERS:
            operators[node.output[_CHOOSERS[node.op_type]]] = node.op_type
        elif whole and _makes_whole(node):
            operators[node.output[0]] = node.op_type
        elif node.op_type == "If":
            operators |= _expose_branches(node)
    return operators


def _expose_branches(node: onnx.NodeProto) -> dict[str, str]:
    """Add the decisions of both branches of an If to its outputs; empty where one is not taken."""
    operators = {}
    branches = [attribute.g for attribute in node.attribute]
    for taken in branches:
        for name, operator in _expose(taken, whole=False).items():
            exposed = f"{name} of {node.output[0]}"
            dtype = np.int64 if operator in _INDICES else np.bool_
            for branch in branches:
                inner = name
                if branch is not taken:
                    inner = f"no {exposed}"
                    nothing = numpy_helper.from_array(np.empty((0, 3), dtype))
                    branch.node.append(helper.make_node("Constant", [], [inner], value=nothing))
                branch.output.append(onnx.ValueInfoProto(name=inner))
            node.output.append(exposed)
            operators[exposed] = operator
    return operators
