"""The interface of runtimes: open a file, run batches, report where they ran."""

from __future__ import annotations

import importlib
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel

from gate.errors import EvidenceError, PolicyError
from gate.policy.runtime_options import NoOptions
from gate.policy.sections import CudaProviderPolicy
from gate.records.evidence import BatchAxes, Subject
from gate.records.runtime import CUDA_PROVIDER, BoundsKind, CpuNode
from gate.storage.record import Record

if TYPE_CHECKING:
    import onnx

    from gate.onnx_file.tested_file import TestedFile
    from gate.storage.arrays import Batch, RuntimeArray


# A runtime may report any value. An invalid number counts as missing, because the outputs of a
# runtime are judged, not its reports.
def count_of(value: object) -> int | None:
    """Return a number of bytes; None for a value that is not a nonnegative integer."""
    number = _number(value)
    return int(number) if number is not None and number >= 0 and number == int(number) else None


def seconds_of(value: object) -> float | None:
    """Return a time in seconds; None for a value that is not a positive number."""
    number = _number(value)
    return number if number is not None and number > 0 else None


def _number(value: object) -> float | None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


ON_CUDA = (CUDA_PROVIDER, "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")
"""Providers of ONNX Runtime that need a CUDA device."""


@dataclass(frozen=True)
class Promises:
    """The claims of a runtime about itself."""

    provider: str
    """The provider, which must be the first of `Proof.providers_active`."""
    bounds: BoundsKind = "cpu"
    """The kind of built-in bounds that apply."""


@dataclass(frozen=True)
class Proof:
    """The provider, device and options of a run; fields as in
    `gate.records.evidence.RuntimeEvidence` and `gate.records.runtime.RuntimeIdentity`."""

    providers_active: tuple[str, ...] = ()
    nodes_per_provider: dict[str, int] = field(default_factory=dict)
    fallback_nodes: tuple[str, ...] = ()
    session_options: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    precision: str | None = None
    """`float32` if the running session confirms it; a policy of precision `exact` requires it."""
    memory_bytes: int | None = None
    """Growth of the memory of the runtime's process; None: the gate measures its own process,
    unless `own_process`."""
    peak_bytes: int | None = None
    """Peak resident memory of the runtime's process, if that is not the gate's process."""
    own_process: bool = False
    """True if the runtime computes in another process than the gate. Then memory that it does not
    report counts as not measured."""
    cpu_nodes: tuple[CpuNode, ...] = ()
    cpu_time_share: float | None = None
    plain_failure: str | None = None


class Conditions(Record):
    """The settings of a measurement, for reference and runtimes."""

    threads: int = 1
    deterministic: bool = False
    tf32: bool = False
    cuda_provider: CudaProviderPolicy = CudaProviderPolicy()
    batch_axes: BatchAxes | None = None
    """Batch axes of the file's inputs and outputs; None: always axis 0."""

    @property
    def cuda_options(self) -> dict[str, str]:
        """Return the options of ONNX Runtime's CUDA provider."""
        return self.cuda_provider.provider_options(tf32=self.tf32)


class Session(ABC):
    """An open file in a runtime."""

    seconds: float | None = None
    """Duration of the last run, if the session measures it; values that are not above 0 are
    ignored."""
    open_seconds: float | None = None
    """Duration of opening the file, likewise, without steps that only the gate needs."""
    live: ClassVar[bool] = True
    """False if it returns recorded outputs, so that repeating a run shows nothing new. Like
    `has_probe` and `run_probe`, this is only for the gate's recordings; others are refused."""
    connections: tuple[int, ...] = ()
    """Numbers of concurrent clients for `run_at_once`; empty if it is not supported."""
    rate: float | None = None
    """Requests per second of the open loop; None without an open loop."""

    @abstractmethod
    def run(self, batch: Batch) -> Sequence[RuntimeArray]:
        """Return all outputs, in the file's order. `batch`: arrays by the names of the file's
        inputs. May raise any exception."""

    def has_probe(self, batch: Batch) -> bool:  # noqa: ARG002 - for recordings
        """Return whether it can run these inputs, which are not samples."""
        return True

    def run_probe(self, batch: Batch) -> Sequence[RuntimeArray]:
        """Run inputs that are not among the samples, like `run`."""
        return self.run(batch)

    def run_at_once(
        self, batches: Sequence[Batch], connections: int, rate: float | None = None
    ) -> tuple[list[list[RuntimeArray]], list[float], float]:
        """Run the batches from `connections` concurrent clients.

        Return the outputs in the order of `batches`, the seconds of each, and the total seconds.
        Only for a session with `connections`.
        """
        raise NotImplementedError

    @abstractmethod
    def proof(self) -> Proof:
        """Return provider, device and options of the past runs."""

    def close(self) -> None:
        """Release resources other than memory; there are no runs afterwards."""
        return


@dataclass(frozen=True)
class RunnableFile:
    """The file that a runtime opens."""

    candidate: TestedFile
    in_torch: Callable[[str], Session] | None = None
    """Opens a session of the PyTorch model on a device; its inputs have the samples' names. Only in
    the measuring process."""

    @property
    def path(self) -> Path:
        """Return the path of the ONNX file, with external data in the same folder."""
        return self.candidate.path

    @property
    def subject(self) -> Subject:
        """Digest, inputs and outputs."""
        return self.candidate.subject

    def read(self) -> bytes:
        """Return the bytes that have the digest, without external data. Raises DigestMismatch."""
        read = self.candidate.verified()
        return Path(read).read_bytes() if isinstance(read, str) else read

    def parsed(self) -> onnx.ModelProto:
        """Return the parsed model, without external data. Raises DigestMismatch."""
        import onnx

        return onnx.load_from_string(self.read())


class Runtime(ABC):
    """A way to run a file. Slow imports belong into `absent_reason` and `open`."""

    promises: Promises
    options: ClassVar[type[BaseModel]] = NoOptions
    """The model of the policy's `options`."""
    runs: ClassVar[Literal["file", "model"]] = "file"
    """`model`: runs the PyTorch model on another device."""
    isolated: ClassVar[bool] = True
    """Whether it runs in a separate process with a time limit; always true for other packages."""
    limit_s: ClassVar[float] = 300.0
    """Time limit for opening the file, and for each batch."""

    def absent_reason(self, options: Any) -> str | None:  # noqa: ARG002 - for overriding methods
        """Return why it can't run on this machine and what to install; None if it can.

        If it is installed but does not work, `open` should raise instead."""
        return None

    def versions(self) -> dict[str, str]:
        """Return the versions of the computing libraries, by name."""
        return {}

    def install(self) -> bool:
        """Install dependencies that are not Python packages; return False if already installed.

        Raises PolicyError if there are none, StorageError if the installation fails.
        """
        raise PolicyError(
            f"{type(self).__name__} only depends on Python packages. gate runtimes shows why it is "
            "absent."
        )

    def promised(self, options: Any) -> Promises:  # noqa: ARG002 - for overriding methods
        """Return the claims of the runtime with these options."""
        return self.promises

    @abstractmethod
    def open(
        self, file: RunnableFile, *, options: Any, conditions: Conditions, example: Batch
    ) -> Session:
        """Open the file. `example`: a small batch. Raises any exception if the file can't run."""


def load_runtime(class_path: str) -> Runtime:
    """Return an instance of the class `module:class`. Raises the exceptions of its module."""
    module, _, name = class_path.partition(":")
    runtime = getattr(importlib.import_module(module), name)()
    if not isinstance(runtime, Runtime):
        raise EvidenceError(
            f"{class_path} is not a runtime: it is a {type(runtime).__name__}. Derive it from "
            "gate.runtimes.runtime.Runtime (docs/runtimes.md)."
        )
    return runtime
