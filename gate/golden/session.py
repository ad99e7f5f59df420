"""The file as a consumer loads it: ONNX Runtime on the CPU, all optimisations on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gate.digest import Digest
from gate.errors import EvidenceError, StorageError
from gate.files import is_inside, open_plain
from gate.golden.record import GoldenModel

CPU_PROVIDERS = ("CPUExecutionProvider",)
_FATAL_ONLY = 4
"""`log_severity_level`: errors come as exceptions too."""


def open_session(model: bytes | Path) -> Any:
    """A session of the model's bytes, or with external data of its path.

    Raises whatever ONNX Runtime raises.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = _FATAL_ONLY
    # Whatever its name or its first bytes look like.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    # Spinning threads would take the cores from whatever else runs here.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    given = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(given, options, providers=list(CPU_PROVIDERS))


def read_model(path: Path, *, like: GoldenModel) -> tuple[Digest, bytes | Path]:
    """Digest of the file at `path`, with the external data that `like` names, and what to load.

    A single file is given as the very bytes that were hashed. The name of the model file itself
    does not matter. Raises StorageError, and EvidenceError where data lies outside of the file's
    folder.
    """
    if like.external_data:
        for name in like.external_data:
            _refuse_outside(path.parent, name)
        files = {like.file: Digest.of_file(path).hex}
        files |= {name: Digest.of_file(path.parent / name).hex for name in like.external_data}
        return Digest.of_json(files), path
    try:
        with open_plain(path) as stream:
            data = stream.read()
    except (OSError, MemoryError) as error:
        why = getattr(error, "strerror", None) or str(error) or "it does not fit into memory"
        raise StorageError(
            f"cannot read {path}: {why}. Name the ONNX file of the release."
        ) from error
    return Digest.of_bytes(data), data


def _refuse_outside(folder: Path, name: str) -> None:
    try:
        inside = is_inside(folder, name)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"cannot read {folder / name}: {error}. Fetch the release again."
        ) from error
    if not inside:
        raise EvidenceError(
            f"the data file {name!r} lies outside of {folder}. Golden vectors must not read other "
            "files of this machine: fetch the release again."
        )
