"""Run a file and read which elements its nodes choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import inliner

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

    Nodes of subgraphs are left out. Raises what ONNX Runtime raises, and DigestMismatch.
    """

    def __init__(
        self, candidate: TestedFile, setup: OrtSetup, *, threads: int, deterministic: bool
    ) -> None:
        file = EditableFile(candidate)
        model = file.model
        self._operators = {
            node.output[_CHOOSERS[node.op_type]]: node.op_type
            for node in model.graph.node
            if node.op_type in _CHOOSERS and node.domain in ("", "ai.onnx")
        }
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
        ]
