"""Run a file and read which elements its nodes choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, inliner, numpy_helper

from gate.onnx_file.reading import WithData
from gate.onnx_file.sessions import open_session, session_options
from gate.onnx_file.tested_file import TestedFile
from gate.policy.runtime_options import OrtSetup, plain_setup
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

_DATA_FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True)
class Choice:
    """What one node decided on a batch."""

    operator: str
    """ONNX operator type."""
    chosen: NDArray[Any]
    """Indices (int64), or the bools of a comparison."""


class EditableFile:
    """The graph of a file, and sessions of edited copies of it. Raises DigestMismatch."""

    def __init__(self, candidate: TestedFile) -> None:
        self._loaded = loaded = candidate.loadable()
        if isinstance(loaded, str):
            self.model = onnx.load(loaded, load_external_data=False)
        else:
            data = loaded.model if isinstance(loaded, WithData) else loaded
            self.model = onnx.load_from_string(data)
        if self.model.functions:
            self.model = inliner.inline_local_functions(self.model)

    def session(
        self, edited: onnx.ModelProto, options: Any = None, setup: OrtSetup | None = None
    ) -> Any:
        """Open a session of an edited graph with the data of the file; on the CPU, without
        optimizations, unless told otherwise. Raises what ONNX Runtime raises."""
        setup = setup or plain_setup("ort-cpu")
        options = options or session_options(setup, threads=1, deterministic=False)
        loaded, data = self._loaded, edited.SerializeToString()
        if isinstance(loaded, str):
            options.add_session_config_entry(_DATA_FOLDER, str(Path(loaded).parent))
        whole = WithData(data, loaded.data) if isinstance(loaded, WithData) else data
        return open_session(whole, options, setup)


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
