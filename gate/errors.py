"""All exceptions raised on purpose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Each message says what was seen, what was expected, and the way out. All of them mean
# "could not judge" (exit code 2); a rejection is a returned `Decision`, never an error, but for
# `ExportRefused`, of which there is no evidence to decide on.
#
#     GateError
#     ├── PackageMissing         a package is not installed that this needs
#     │   └── PackageBroken      it is installed, and does not load
#     ├── PolicyError            the policy (or params.yaml) can't be used
#     ├── DataError              inputs, labels or images can't be used
#     ├── ModelError             the PyTorch model can't be built or loaded
#     │   └── CheckpointError    the checkpoint is missing, unsafe or for another model
#     ├── ExportError            no ONNX file came out, or not the one that was asked for
#     │   └── ExportRefused      the settings forbid to export this source (exit code 1)
#     ├── OnnxFileError          the file is not a whole, valid ONNX model
#     ├── EvidenceError          the measurement can't be made, or a record can't be read
#     │   ├── InputMismatch      the samples don't fit the model's inputs
#     │   ├── OutputMismatch     a runtime's outputs cannot be used
#     │   │   └── ModelMismatch  they are not the model's
#     │   ├── RuntimeAbsent      a runtime is not there for this model
#     │   ├── RuntimeUnusable    a runtime is there and can run no file at all
#     │   ├── PlainSessionFailed a file does not open with optimizations off
#     │   └── PastChanged        the ledger is shorter, or other, than it once was
#     ├── LimitExceeded          a foreign file takes more time or memory than is allowed
#     ├── Untrusted              a statement is missing, or no trusted key vouches for this with it
#     ├── KeyUnusable            a key can't be read, or can't sign
#     ├── DigestMismatch         bytes are not the bytes they were said to be
#     ├── StorageError           a file can't be written (disk full, no permission)
#     │   └── StateUnavailable   the database of the ledger can't be read or written now
#     ├── ServiceError           the webhook service can't run as it is set
#     └── RegistryError          the registry can't be used
#         ├── RegistryUnavailable   no server answers
#         ├── ArtifactMissing       a version's file is not there (now)
#         ├── MismatchUnconfirmed   a download has wrong bytes, so far once
#         ├── ResourceGone          the registry answers that it has no such model or version
#         ├── RegistryDenied        the server refuses this user
#         └── PromotionConflict     another promotion holds or moved the alias


def first_line(error: BaseException, *, empty: str = "no message") -> str:
    """The first line of an error's message that says something; `empty` where none does.

    Libraries append graphs, stacks and advice of their own: a message of ours has one line.
    """
    return next((line.strip() for line in str(error).splitlines() if line.strip()), empty)


def describe_failure(error: Exception) -> str:
    """The exception in one line; the gate's own errors speak for themselves."""
    if isinstance(error, GateError):
        return str(error).strip()
    line, remedy = first_line(error), ""
    if isinstance(error, MemoryError) or "memory" in line.lower():
        remedy = " Use a smaller batch size, or free the device."
    return f"{type(error).__name__}: {line}{remedy}"


class GateError(Exception):
    """Base of all errors that the gate raises on purpose."""


def by_name(name: str) -> type[GateError] | None:
    """The error of this name, as another process gives it; None: there is none."""
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, GateError) else None


class PackageMissing(GateError):
    """A package is not installed that a command needs. The message is the rest of a sentence about
    what needs it (`gate.installation`)."""


class PackageBroken(PackageMissing):
    """A package is installed and does not load: half of it is gone, or a library that it needs."""


class PolicyError(GateError):
    """The policy, or another section of params.yaml, is missing, malformed or empty."""


class DataError(GateError):
    """Images, labels or arrays are missing, unreadable or inconsistent."""


class ModelError(GateError):
    """The PyTorch model can't be built."""


class CheckpointError(ModelError):
    """The checkpoint is missing, unreadable, unsafe, or belongs to another architecture."""


class ExportError(GateError):
    """The export produced no file, or not the file that was asked for."""


class NothingQuantized(ExportError):
    """The file has nothing that could compute in eight bits."""


class ExportRefused(ExportError):
    """The rules of trace safety forbid every strategy that may be tried: a verdict on the model's
    source, no fault. Callers turn it into a rejection."""


class OnnxFileError(GateError):
    """The file is not a whole and valid ONNX model."""


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
    """A runtime of the model, not of the file, is not there for this model: the policy may do
    without it, as without a device."""


class RuntimeUnusable(EvidenceError):
    """A runtime or its device is there, and can run no file at all: that is no fault of a file."""


class PlainSessionFailed(EvidenceError):
    """ONNX Runtime opens a file neither with optimizations off nor with the basic ones. That says
    nothing of the configuration that is served."""


class PastChanged(EvidenceError):
    """The ledger is shorter, or other, than a place elsewhere saw it once."""


class LimitExceeded(GateError):
    """Reading or running a foreign file takes more time or memory than is allowed, or kills the
    process that does it."""


class Untrusted(GateError):
    """A signed statement is missing, malformed, not signed by a trusted key, expired, or about
    something else."""


class KeyUnusable(GateError):
    """A key can't be made or read, or can't sign."""


class DigestMismatch(GateError):
    """The bytes are not the bytes that they were said to be."""


class StorageError(GateError):
    """A file can't be written: the disk is full, or permission is missing."""


class StateUnavailable(StorageError):
    """The database of the ledger can't be read or written now."""


class ServiceError(GateError):
    """The webhook service can't run as it is set: a setting, its secrets, its port."""


class RegistryError(GateError):
    """The model registry can't be used."""


class ArtifactMissing(RegistryError):
    """A version's file is not there: it was removed, or its store is away for a while."""


class MismatchUnconfirmed(RegistryError):
    """A download of a version has wrong bytes, and no second one has confirmed that: the version is
    not flagged, and no alias moves."""


class ResourceGone(RegistryError):
    """The registry answers, and has no such model or version: it was deleted or renamed."""


class RegistryUnavailable(RegistryError):
    """No registry answers at the tracking URI."""


class RegistryDenied(RegistryError):
    """The registry answers, and refuses this user."""


class PromotionConflict(RegistryError):
    """Another promotion holds the lock, or moved the alias in the meantime."""


class TooLarge(Exception):
    """More bytes came than were allowed. A refusal, not a fault of this machine."""
