"""Worker side: open the job once per process; measure units."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import nn

from gate.data.array_files import open_labels
from gate.data.open_samples import Opening
from gate.data.reader import Block, SampleReader
from gate.data.samples import SampleSet
from gate.errors import DigestMismatch, EvidenceError, GateError, PolicyError, StorageError, by_name
from gate.installation import package_folder
from gate.measure.job import EvaluationData, MeasurementJob, Reference
from gate.measure.run import SamplePass
from gate.measure.work_units import FirstUnitState, ReferenceDigests, UnitResult, WorkUnit
from gate.model.factory import paused_gc
from gate.model.loading import collect_code
from gate.onnx_file.reading import read_subject
from gate.policy.policy import Policy
from gate.preprocess.spec import PreprocessSpec
from gate.records.evidence import TensorSpec
from gate.storage.digest import Digest
from gate.storage.record import Count, Prose, Record, Sha256, added_field


@functools.cache
def own_digest() -> Digest:
    """SHA-256 over the names and contents of all of them."""
    root = package_folder()
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*.py"))
    return Digest.of_manifest(root, names)


ONE_FILE = (
    "only one file, of a model of package.module:factory, on samples of a file, without "
    "recordings, can be measured by several processes. Measure with one job."
)


class JobSpec(Record):
    """Of one check. A worker opens all of it by itself and verifies the digests."""

    gate_sha256: Sha256
    """Of the gate's own source files."""
    onnx: str
    subject_sha256: Sha256
    factory: str
    checkpoint: str | None
    model_sha256: Sha256
    """Of the weights and buffers that it computes with."""
    code_sha256: Sha256
    """Of the source files that it is made of."""
    inputs: str
    preprocessing: str | None
    """The spec by which pictures become inputs."""
    labels: str | None
    labelled: bool
    """By that file, or by the source itself."""
    batch_size: Count
    policy: Policy
    most_units: Count
    """As `Case.units`."""
    batch_axes: dict[str, int | None] = added_field({})
    """As `SampleSet.stated`."""

    @classmethod
    def from_job(
        cls, case: MeasurementJob, reference: Reference, workload: EvaluationData
    ) -> JobSpec:
        """Of what this process opened. Raises PolicyError where another one can't open it."""
        origin = workload.origin
        if not reference.loaded or origin is None or workload.recordings or case.chained:
            raise PolicyError(ONE_FILE)
        if urlsplit(origin.inputs).password:
            raise PolicyError(
                "the address of the samples has a password, which would go to other processes and "
                "into files. Give it by the environment or a profile of the store."
            )
        return cls(
            gate_sha256=own_digest(),
            onnx=str(case.candidate.path),
            subject_sha256=case.candidate.subject.sha256,
            factory=reference.source.factory,
            checkpoint=_text(reference.checkpoint),
            model_sha256=digest_of_model(reference.model),
            code_sha256=_code(reference),
            inputs=origin.inputs,
            preprocessing=_text(origin.preprocessing),
            labels=_text(origin.labels),
            labelled=workload.labels is not None,
            batch_size=workload.batch_size,
            policy=case.policy,
            most_units=case.units,
            batch_axes=case.samples.stated,
        )

    def to_job(self, samples: SampleSet | None = None) -> MeasurementJob:
        """Open everything; `samples`: opened already. Raises GateError, DigestMismatch where
        something is another one."""
        _verify("parity-gate itself", own_digest(), self.gate_sha256)
        checkpoint = Path(self.checkpoint) if self.checkpoint else None
        reference = Reference.from_factory(self.factory, checkpoint=checkpoint, untrained=True)
        self.verify(Path(self.onnx), reference)
        spec = PreprocessSpec.from_file(Path(self.preprocessing)) if self.preprocessing else None
        if samples is None:
            samples = SampleSet.open(self.inputs, preprocessing=spec)
        samples = samples.with_batch_axes(self.batch_axes)
        labels = open_labels(Path(self.labels), samples=samples.count) if self.labels else None
        workload = EvaluationData(
            samples, labels, batch_size=self.batch_size, units=self.most_units, spec=spec
        )
        case = MeasurementJob.from_files(
            Path(self.onnx), model=reference.model, data=workload, policy=self.policy
        )
        return replace(case, source_labels=self.labelled and labels is None)

    def verify(self, onnx: Path, reference: Reference) -> None:
        """Raise DigestMismatch where the file or the model is another one."""
        _verify(str(onnx), read_subject(onnx).sha256, self.subject_sha256)
        _verify(self.factory, digest_of_model(reference.model), self.model_sha256)
        _verify(f"the code of {self.factory}", _code(reference), self.code_sha256)


def digest_of_model(model: nn.Module) -> Digest:
    """SHA-256 over names, dtypes, shapes and bytes of all parameters and buffers. Raises
    PolicyError where they have no bytes to compare: several processes can't be held together."""
    sha256 = hashlib.sha256()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    try:
        for name, tensor in sorted(tensors.items()):
            value = tensor.detach().cpu().contiguous()
            sha256.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            if value.numel():
                sha256.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    except Exception as error:  # sparse, quantized, on no device
        raise PolicyError(
            f"the tensors of this model can't be compared between processes: {error}. Measure "
            "with one job."
        ) from error
    return Digest(sha256.hexdigest())


def _code(reference: Reference) -> Digest:
    code = reference.source.code or collect_code(reference.model, factory=reference.source.factory)
    return code.digest()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _verify(what: str, opened: Digest, expected: Digest) -> None:
    if opened != expected:
        raise DigestMismatch(
            f"{what} is {opened} for a worker, {expected} was planned. Give every worker the same "
            "files and code."
        )


_CHUNK_BYTES = 1 << 26
"""Of a file, that are an object of the store each: what memory can't hold, the store spills."""


@dataclass(frozen=True)
class Freight:
    """By field of `Assignment`: the first file, which the field names, and others beside it."""

    files: dict[str, dict[str, tuple[Any, ...]]]
    """File name to its chunks, as references of Ray."""

    @classmethod
    def of(cls, assignment: JobSpec) -> Freight:
        """Put all files of the assignment into the object store. Raises StorageError and
        OnnxFileError."""
        onnx = Path(assignment.onnx)
        beside = [onnx.parent / name for name in read_subject(onnx).external_data]
        files = {"onnx": _stored(onnx, *beside)}
        for field in ("checkpoint", "preprocessing", "labels"):
            named = getattr(assignment, field)
            if named is not None:
                files[field] = _stored(Path(named))
        return cls(files)

    def unpacked(self, assignment: JobSpec, into: Path) -> JobSpec:
        """The assignment on copies below `into`; whoever opens it verifies their digests."""
        import ray

        copies = {}
        for field, files in self.files.items():
            for name, chunks in files.items():
                path = into / field / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as stream:
                    for chunk in chunks:
                        stream.write(ray.get(chunk))
            copies[field] = str(into / field / next(iter(files)))
        return assignment.model_copy(update=copies)


def _stored(first: Path, *beside: Path) -> dict[str, tuple[Any, ...]]:
    import ray

    return {
        str(path.relative_to(first.parent)): tuple(map(ray.put, _chunks(path)))
        for path in (first, *beside)
    }


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror or error}. Fix permissions, or name another file."
        ) from error


_KINDS: dict[bytes, type[UnitResult | ReferenceDigests]] = {
    b"P": UnitResult,
    b"A": ReferenceDigests,
}


class WorkerFailure(Record):
    """Why a unit can't be measured: for the measurement, as if it had happened there."""

    kind: str
    """Name of the error's class."""
    message: Prose

    @classmethod
    def of(cls, error: Exception) -> WorkerFailure:
        """What is no error of the gate is an EvidenceError."""
        if isinstance(error, GateError):
            return cls(kind=type(error).__name__, message=str(error))
        message = f"a worker failed unexpectedly: {type(error).__name__}: {error}"
        return cls(kind=EvidenceError.__name__, message=message)

    def error(self) -> GateError:
        """The error itself."""
        return (by_name(self.kind) or EvidenceError)(self.message)


Answer = UnitResult | ReferenceDigests | WorkerFailure
"""What a worker says."""


@contextlib.contextmanager
def opened(case: MeasurementJob, *, threads: int, noise: bool) -> Iterator[SamplePass]:
    """Inside, the model and all runtimes are open. `case`: opened before, as the model's module
    may set threads of its own. `noise`: with the float64 reference. Raises GateError."""
    torch.set_num_threads(threads)
    with SamplePass.open(case, noise=noise) as sample_pass:
        sample_pass.open_runtimes()
        yield sample_pass


def read_answer(data: bytes) -> Answer:
    """What a worker said. Raises EvidenceError."""
    kind = _KINDS.get(data[:1])
    return WorkerFailure.from_json(data[1:]) if kind is None else kind.from_json(data[1:])


def answer_to(sample_pass: SamplePass, unit: WorkUnit, *, again: bool) -> bytes:
    """Measure a unit; `again`: it was measured before, and only what the reference answers is asked
    for. What goes wrong is an answer, too."""
    try:
        return written(sample_pass.answers(unit) if again else sample_pass.part(unit))
    except Exception as error:
        return written(WorkerFailure.of(error))


def serve(connection: Connection) -> None:
    """Take an assignment and a number of threads, then answer one message with another until there
    is none: first the lead, with nothing; then each unit, with its part or why there is none."""
    os.dup2(2, 1)  # what the model prints is no output of the command
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        try:
            _serve(connection)
        except Exception as error:
            connection.send_bytes(written(WorkerFailure.of(error)))


def _serve(connection: Connection) -> None:
    with contextlib.ExitStack() as held:
        with paused_gc():
            text, threads = connection.recv()
            case = JobSpec.from_json(text).to_job()
            sample_pass = held.enter_context(opened(case, threads=threads, noise=False))
        sample_pass.judge_by(FirstUnitState.from_json(connection.recv_bytes().decode()))
        while True:
            *unit, again = connection.recv()
            connection.send_bytes(answer_to(sample_pass, WorkUnit(*unit), again=again))


def written(answer: Answer) -> bytes:
    """An answer, as `read_answer` takes it."""
    mark = next((mark for mark, kind in _KINDS.items() if type(answer) is kind), b"F")
    return mark + answer.to_json().encode()


# Whoever creates it imports nothing heavy for it: it may start before the check has read anything.


@dataclass(frozen=True)
class SourceForm:
    """What is to be known of samples before any is read."""

    origin: str
    specs: tuple[TensorSpec, ...]
    count: int
    labelled: bool


class SampleActor:
    """An actor beside the driver, where the samples are."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._rows: dict[str, SampleReader] = {}
        """By who reads: each goes on where it was, in a file that is read from its beginning."""

    def form(self) -> SourceForm | WorkerFailure:
        """Open the samples."""
        try:
            rows = self._opened("")
        except GateError as error:
            return WorkerFailure.of(error)
        return SourceForm(rows.origin, rows.specs, len(rows), rows.labelled)

    def read(self, places: Sequence[int], who: str) -> Block | WorkerFailure:
        """As `SampleReader.read`, for one of many."""
        try:
            return self._opened(who).read(places)
        except GateError as error:
            return WorkerFailure.of(error)

    def _opened(self, who: str) -> SampleReader:
        if who not in self._rows:
            self._rows[who] = self._opening.rows()
        return self._rows[who]


class FetchedRows(SampleReader):
    """What a `SampleActor` reads. While a batch is computed, the next one is on its way."""

    def __init__(self, reader: Any) -> None:
        """`reader`: the actor's handle. Raises what opening the samples raised there."""
        form: SourceForm = _answer(reader.form.remote())
        self._reader, self._count, self._who = reader, form.count, uuid.uuid4().hex
        self.origin, self.specs, self.labelled = form.origin, form.specs, form.labelled

    def __len__(self) -> int:
        """Number of samples."""
        return self._count

    def read(self, places: Sequence[int]) -> Block:
        """The samples at these places."""
        return _own(_answer(self._request(places)))

    def batches(self, places: range, size: int) -> Iterator[Block]:
        """The samples of a range by `size`."""
        spans = [places[start : start + size] for start in range(0, len(places), size)]
        coming = self._request(spans[0])
        for after in [*spans[1:], None]:
            here = coming
            if after is not None:
                coming = self._request(after)
            yield _own(_answer(here))

    def _request(self, places: Sequence[int]) -> Any:
        return self._reader.read.remote(places, self._who)


def _answer(reference: Any) -> Any:
    import ray

    answer = ray.get(reference)
    if isinstance(answer, WorkerFailure):
        raise answer.error()
    return answer


def _own(block: Block) -> Block:
    """Arrays of the object store are read only."""
    return Block({name: np.array(array) for name, array in block.arrays.items()}, block.labels)
