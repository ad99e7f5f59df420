"""The interface: open a file, run batches, report where it ran."""

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


# A runtime may report anything. A report that is no valid number counts as missing, because its
# outputs are judged, not its statements about itself.
def count_of(value: object) -> int | None:
    """Return a number of bytes; None for what is no whole number from 0 on."""
    number = _number(value)
    return int(number) if number is not None and number >= 0 and number == int(number) else None


def seconds_of(value: object) -> float | None:
    """Return a time; None for what is no time above 0."""
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
    """What computes: it must be first among `Proof.providers_active`."""
    bounds: BoundsKind = "cpu"
    """Which of the built-in bounds fit it."""


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
    """`float32`, where that is read back from what runs; a policy of precision `exact` asks for
    it."""
    memory_bytes: int | None = None
    """By how much the memory of another process grew; None: the measuring process reads its own,
    unless `own_process`."""
    peak_bytes: int | None = None
    """Largest resident memory of the process that computes, where that is not the measuring
    one."""
    own_process: bool = False
    """True if it computes in another process than the measuring one. Then memory that it does not
    report counts as not measured."""
    cpu_nodes: tuple[CpuNode, ...] = ()
    cpu_time_share: float | None = None
    plain_failure: str | None = None


class Conditions(Record):
    """The settings in force while measuring, on both sides."""

    threads: int = 1
    deterministic: bool = False
    tf32: bool = False
    cuda_provider: CudaProviderPolicy = CudaProviderPolicy()
    batch_axes: BatchAxes | None = None
    """Of the inputs and outputs of the file; None: axis 0 of all."""

    @property
    def cuda_options(self) -> dict[str, str]:
        """The options of ONNX Runtime's CUDA provider."""
        return self.cuda_provider.provider_options(tf32=self.tf32)


class Session(ABC):
    """A file that was opened."""

    seconds: float | None = None
    """How long the last run took, where the session has a clock of its own; what is no time above
    0 counts as none."""
    open_seconds: float | None = None
    """How long opening the file took, likewise: without what only the gate asks for."""
    live: ClassVar[bool] = True
    """False: it returns what was computed before, so that running it again shows nothing new.
    Of the gate's own recordings only, as `has_probe` and `run_probe`: others are refused."""
    connections: tuple[int, ...] = ()
    """Numbers of clients at once that `run_at_once` is measured with; empty: it can't be."""
    rate: float | None = None
    """Requests per second of the open loop; None: none is asked for."""

    @abstractmethod
    def run(self, batch: Batch) -> Sequence[RuntimeArray]:
        """All outputs, in the file's order; `batch` is by the names of the file's inputs. May
        raise anything."""

    def has_probe(self, batch: Batch) -> bool:  # noqa: ARG002 - for recordings
        """Whether it can be asked about inputs beside the samples."""
        return True

    def run_probe(self, batch: Batch) -> Sequence[RuntimeArray]:
        """Run inputs that are not among the samples, like `run`."""
        return self.run(batch)

    def run_at_once(
        self, batches: Sequence[Batch], connections: int, rate: float | None = None
    ) -> tuple[list[list[RuntimeArray]], list[float], float]:
        """Run the batches from so many clients: outputs in the order of `batches`, the seconds of
        each, and of all together. Only for a session with `connections`."""
        raise NotImplementedError

    @abstractmethod
    def proof(self) -> Proof:
        """Return what is established after the runs."""

    def close(self) -> None:
        """Give back what is held beside memory; nothing runs afterwards."""
        return


@dataclass(frozen=True)
class RunnableFile:
    """The file that a runtime opens."""

    candidate: TestedFile
    in_torch: Callable[[str], Session] | None = None
    """A session of the model itself on a device of PyTorch, which takes the samples by their own
    names; only where the runtime is in the process that measures."""

    @property
    def path(self) -> Path:
        """The ONNX file; external data lies beside it."""
        return self.candidate.path

    @property
    def subject(self) -> Subject:
        """Digest, inputs and outputs."""
        return self.candidate.subject

    def read(self) -> bytes:
        """The very bytes that have the digest, without external data. Raises DigestMismatch."""
        read = self.candidate.verified()
        return Path(read).read_bytes() if isinstance(read, str) else read

    def parsed(self) -> onnx.ModelProto:
        """The same as a model of ONNX."""
        import onnx

        return onnx.load_from_string(self.read())


class Runtime(ABC):
    """One way to run a file. Nothing heavy is imported before `absent_reason` or `open`."""

    promises: Promises
    options: ClassVar[type[BaseModel]] = NoOptions
    """What the policy may set under `options`."""
    runs: ClassVar[Literal["file", "model"]] = "file"
    """`model`: the PyTorch model itself, on another device."""
    apart: ClassVar[bool] = True
    """In a process of its own, which is ended if it takes too long. All of other packages are."""
    limit_s: ClassVar[float] = 300.0
    """How long opening the file, and each batch, may take."""

    def absent_reason(self, options: Any) -> str | None:  # noqa: ARG002 - for who overrides it
        """Why it can't run on this machine, and what to install; None: it can.

        What is there and does not work is no absence: let `open` raise."""
        return None

    def versions(self) -> dict[str, str]:
        """Return the versions of the computing libraries, by name."""
        return {}

    def install(self) -> bool:
        """Bring here what it needs beside packages of Python; False: it was here. Raises
        PolicyError where it needs nothing, StorageError where it can't be brought."""
        raise PolicyError(
            f"{type(self).__name__} has nothing to install but packages of Python. See why it is "
            "absent: gate runtimes."
        )

    def promised(self, options: Any) -> Promises:  # noqa: ARG002 - for who overrides it
        """Return the claims of the runtime with these options."""
        return self.promises

    @abstractmethod
    def open(
        self, file: RunnableFile, *, options: Any, conditions: Conditions, example: Batch
    ) -> Session:
        """A session; `example` is a small batch. Raises whatever shows that it can't run."""


def load_runtime(place: str) -> Runtime:
    """An instance of the class at `module:class`. Raises whatever its module raises."""
    module, _, name = place.partition(":")
    made = getattr(importlib.import_module(module), name)()
    if not isinstance(made, Runtime):
        raise EvidenceError(
            f"{place} is no runtime: it is a {type(made).__name__}. Derive it from "
            "gate.runtimes.runtime.Runtime (docs/runtimes.md)."
        )
    return made
