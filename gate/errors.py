"""All exceptions raised on purpose."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Each message states the observed value, the expected one, and the fix. All errors mean "not
# judged" (exit code 2). A rejection is a returned `Decision`, never an error, except for
# `ExportRefused`, which has no evidence.
#
#     GateError
#     ├── PackageMissing         a required package is not installed
#     │   └── PackageBroken      a package is installed but does not load
#     ├── PolicyError            the policy (or params.yaml) can't be used
#     ├── DataError              inputs, labels or images can't be used
#     ├── ModelError             the PyTorch model can't be built or loaded
#     │   └── CheckpointError    the checkpoint is missing, unsafe or for another model
#     ├── ExportError            the export failed, or gave another file than requested
#     │   └── ExportRefused      the settings do not allow to export this source (exit code 1)
#     ├── OnnxFileError          the file is not a complete, valid ONNX model
#     ├── EvidenceError          the measurement can't be made, or a record can't be read
#     │   ├── InputMismatch      the samples don't fit the model's inputs
#     │   ├── OutputMismatch     a runtime's outputs can't be used
#     │   │   └── ModelMismatch  the outputs do not match the model's
#     │   ├── RuntimeAbsent      a runtime does not support this model
#     │   ├── RuntimeUnusable    a runtime is installed but can't run any file
#     │   ├── PlainSessionFailed a file does not open with optimizations off
#     │   └── PastChanged        the ledger was truncated or replaced
#     ├── LimitExceeded          an untrusted file exceeds the limits of time or memory
#     ├── Untrusted              a statement is missing, or not signed by a trusted key
#     ├── KeyUnusable            a key can't be read, or can't sign
#     ├── DigestMismatch         bytes do not have the expected digest
#     ├── StorageError           a file can't be written (disk full, no permission)
#     │   └── StateUnavailable   the database of the ledger can't be read or written now
#     ├── ServiceError           the webhook service can't run with its settings
#     └── RegistryError          the registry can't be used
#         ├── RegistryUnavailable   no server answers
#         ├── ArtifactMissing       a version's file is not available (now)
#         ├── MismatchUnconfirmed   one download had wrong bytes; not confirmed yet
#         ├── ResourceGone          the registry reports that the model or version does not exist
#         ├── RegistryDenied        the server refuses this user
#         └── PromotionConflict     another promotion holds or moved the alias


def first_line(error: BaseException, *, empty: str = "no message") -> str:
    """Return the first nonempty line of an error's message, or `empty`.

    Libraries append graphs, stacks and advice, but the gate's messages have one line.
    """
    return next((line.strip() for line in str(error).splitlines() if line.strip()), empty)


def describe_error(error: BaseException) -> str:
    """Return the text of an exception of the user's code, with its line that raised it."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and not Path(frame.filename).is_relative_to(Path(__file__).parent)
    ]
    if not frames:
        return text
    called = [frame for frame in frames if "site-packages" not in frame.filename]
    frame = (called or frames)[-1]
    return f"{text} ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"


def describe_failure(error: Exception) -> str:
    """Return the exception in one line, without the class name for the gate's errors."""
    if isinstance(error, GateError):
        return str(error).strip()
    line, remedy = first_line(error), ""
    if isinstance(error, MemoryError) or "memory" in line.lower():
        remedy = " Use a smaller batch size, or free the device."
    return f"{type(error).__name__}: {line}{remedy}"


class GateError(Exception):
    """Base of all errors that the gate raises on purpose."""


def by_name(name: str) -> type[GateError] | None:
    """Return the GateError class with this name, as sent by another process, or None."""
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, GateError) else None


class PackageMissing(GateError):
    """A required package is not installed. The message continues a sentence that starts with the
    command (`gate.installation`)."""


class PackageBroken(PackageMissing):
    """A package is installed but does not load: files of it or a library are missing."""


class PolicyError(GateError):
    """The policy, or another section of params.yaml, is missing, malformed or empty."""


class DataError(GateError):
    """Images, labels or arrays are missing, unreadable or inconsistent."""


class ModelError(GateError):
    """The PyTorch model can't be built."""


class CheckpointError(ModelError):
    """The checkpoint is missing, unreadable, unsafe, or belongs to another architecture."""


class ExportError(GateError):
    """The export produced no file, or not the requested file."""


class NothingQuantized(ExportError):
    """The file has no operator that can compute in eight bits."""


class ExportRefused(ExportError):
    """The lint rules forbid every strategy. This is a verdict on the model's source, which callers
    turn into a rejection."""


class OnnxFileError(GateError):
    """The file is not a complete, valid ONNX model."""


class EvidenceError(GateError):
    """The evidence can't be measured, or a stored record can't be read."""


class InputMismatch(EvidenceError):
    """The samples don't fit the model's inputs: names, number, rank, size or dtype."""


class OutputMismatch(EvidenceError):
    """The runtime's outputs cannot be used: they are not the file's, or not the model's."""


class ModelMismatch(OutputMismatch):
    """The outputs of a file have another number, shape, dtype or order than the model's."""

    def __init__(self, text: str, code: str, params: Mapping[str, Any]) -> None:
        """`text`: what differs and what to do, as `code` and `params` say in the catalog."""
        super().__init__(text, code, params)
        self.text, self.code, self.params = text, code, params

    def __str__(self) -> str:
        return self.text


class RuntimeAbsent(EvidenceError):
    """A runtime does not support this model. The policy may waive it, like a missing device."""


class RuntimeUnusable(EvidenceError):
    """A runtime or its device is present but can't run any file, which is not a fault of the
    file."""


class PlainSessionFailed(EvidenceError):
    """ONNX Runtime can open a file neither with optimizations off nor with the basic ones. Higher
    levels may work."""


class PastChanged(EvidenceError):
    """The ledger is shorter than, or differs from, a state that was stored elsewhere."""


class LimitExceeded(GateError):
    """Reading or running an untrusted file exceeds the limits of time or memory, or kills the child
    process."""


class Untrusted(GateError):
    """A signed statement is missing, malformed, not signed by a trusted key, expired, or about
    something else."""


class KeyUnusable(GateError):
    """A key can't be made or read, or can't sign."""


class DigestMismatch(GateError):
    """The bytes do not have the expected digest."""


class StorageError(GateError):
    """A file can't be written: the disk is full, or permission is missing."""


class StateUnavailable(StorageError):
    """The database of the ledger can't be read or written now."""


class ServiceError(GateError):
    """The webhook service can't run with its settings, secrets or port."""


class RegistryError(GateError):
    """The model registry can't be used."""


class ArtifactMissing(RegistryError):
    """A version's file is missing: it was removed, or its store is temporarily unavailable."""


class MismatchUnconfirmed(RegistryError):
    """A download of a version has wrong bytes, and no second one has confirmed that: the version is
    not flagged, and no alias moves."""


class ResourceGone(RegistryError):
    """The registry has no such model or version: it was deleted or renamed."""


class RegistryUnavailable(RegistryError):
    """No registry answers at the tracking URI."""


class RegistryDenied(RegistryError):
    """The registry refuses this user."""


class PromotionConflict(RegistryError):
    """Another promotion holds the lock, or moved the alias in the meantime."""


class TooLarge(Exception):
    """The data exceeds its size limit. The input is refused; this machine has no fault."""
