"""Run a file and read which elements its nodes choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

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

_INDICES = frozenset({"TopK", "ArgMax", "ArgMin", "NonMaxSuppression"})
"""Those whose decision is of int64; of the others it is of bools."""


@dataclass(frozen=True)
class Choice:
    """What one node decided on a batch."""

    operator: str
    """ONNX operator type."""
    chosen: NDArray[Any]
    """Indices (int64), or the bools of a comparison."""


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
        self._operators = _expose(model.graph)
        """By the name of the tensor, in the order of the nodes."""
        self._session: Any = None
        if not self._operators:
            return
        stated = {value.name for value in model.graph.output}
        model.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in self._operators if name not in stated
        )
        options = session_options(setup, threads=threads, deterministic=deterministic)
        self._session = file.session(model, options, setup)

    def run(self, feed: Mapping[str, OutputArray]) -> list[Choice]:
        """Return the decisions on a batch, by name of the file's inputs, in the order of the
        nodes."""
        if self._session is None:
            return []
        arrays = self._session.run(list(self._operators), dict(feed))
        return [
            Choice(operator, np.asarray(array))
            for operator, array in zip(self._operators.values(), arrays, strict=True)
            if array.size
        ]


def _expose(graph: onnx.GraphProto) -> dict[str, str]:
    """Return the operators by the name of their decision. Branches get decisions as outputs."""
    operators: dict[str, str] = {}
    for node in graph.node:
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type in _CHOOSERS:
            operators[node.output[_CHOOSERS[node.op_type]]] = node.op_type
        elif node.op_type == "If":
            operators |= _expose_branches(node)
    return operators


def _expose_branches(node: onnx.NodeProto) -> dict[str, str]:
    """Add the decisions of both branches of an If to its outputs; empty where one is not taken."""
    operators = {}
    branches = [attribute.g for attribute in node.attribute]
    for taken in branches:
        for name, operator in _expose(taken).items():
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
