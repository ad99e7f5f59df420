"""A worker process: opens the job once, then measures units."""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from gate.data.location import SampleLocation
from gate.data.open_samples import Opening
from gate.data.reader import Block, SampleReader
from gate.data.samples import SampleSet
from gate.errors import DigestMismatch, EvidenceError, GateError, PolicyError, StorageError, by_name
from gate.installation import package_folder
from gate.measure.job import (
    EvaluationData,
    MeasurementJob,
    Reference,
    SamplesOrigin,
    class_labels,
    open_annotations,
)
from gate.measure.run import MeasurementRun
from gate.measure.work_units import FirstUnitState, UnitResult, WorkUnit
from gate.metrics.slices import Annotations
from gate.model.factory import paused_gc
from gate.onnx_file.reading import read_subject
from gate.policy.policy import Policy
from gate.preprocess.spec import PreprocessSpec
from gate.reference.torch_reference import as_reference
from gate.storage.digest import Digest
from gate.storage.files import temporary_folder
from gate.storage.record import Count, Prose, Record, Sha256, added_field


@functools.cache
def package_digest() -> Digest:
    """Return the SHA-256 of the names and contents of the gate's source files."""
    root = package_folder()
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*.py"))
    return Digest.from_manifest(root, names)


SINGLE_FILE_ONLY = (
    "several processes can measure only a single file of a model of package.module:factory, on "
    "samples in a file, without recordings. Measure with one job."
)


class JobSpec(Record):
    """The job of one check. A worker opens all files itself and verifies the digests."""

    gate_sha256: Sha256
    """Digest of the gate's source files."""
    onnx: str
    subject_sha256: Sha256
    factory: str
    checkpoint: str | None
    model_sha256: Sha256
    """Digest of weights and buffers."""
    code_sha256: Sha256
    """Digest of the model's source files."""
    inputs: str
    preprocessing: str | None
    """The preprocessing spec for pictures."""
    labels: str | None
    labelled: bool
    """True if there are labels, in the file `labels` or in the samples."""
    batch_size: Count
    policy: Policy
    most_units: Count
    """The `units` of the `MeasurementJob`."""
    batch_axes: dict[str, int | None] = added_field({})
    """Stated batch axes (`SampleSet.stated`)."""
    slices: str | None = added_field(None)
    """The file with the columns of the slices of metrics."""
    annotations_sha256: Sha256 | None = added_field(None)
    """Digest of the files with labels and columns for the metrics."""
    reference_sha256: Sha256 | None = added_field(None)
    """The digest of the ONNX file that is the reference; None: the reference is a factory."""

    @classmethod
    def from_job(
        cls, job: MeasurementJob, reference: Reference, workload: EvaluationData
    ) -> JobSpec:
        """Describe a job of this process. Raises PolicyError if other processes can't open it."""
        origin = workload.origin
        if not reference.loaded or origin is None or workload.recordings or job.chained:
            raise PolicyError(SINGLE_FILE_ONLY)
        if urlsplit(origin.inputs).password:
            raise PolicyError(
                "the address of the samples has a password, which would be written to files and "
                "sent to other processes. Use environment variables or a profile of the store."
            )
        return cls(
            gate_sha256=package_digest(),
            onnx=str(job.candidate.path),
            subject_sha256=job.candidate.subject.sha256,
            factory=reference.address,
            checkpoint=_text(reference.checkpoint),
            model_sha256=as_reference(reference.model).weights_digest(),
            code_sha256=_code(reference),
            inputs=origin.inputs,
            preprocessing=_text(origin.preprocessing),
            labels=_text(origin.labels),
            labelled=workload.labels is not None,
            batch_size=workload.batch_size,
            policy=job.policy,
            most_units=job.units,
            batch_axes=job.samples.stated,
            slices=_text(origin.slices),
            annotations_sha256=job.annotations.sha256,
            reference_sha256=reference.source.onnx_sha256,
        )

    def to_job(self, samples: SampleSet | None = None) -> MeasurementJob:
        """Open the job. `samples`: if already open. Raises GateError; DigestMismatch for changed
        files."""
        _verify("parity-gate itself", package_digest(), self.gate_sha256)
        checkpoint = Path(self.checkpoint) if self.checkpoint else None
        reference = Reference.from_factory(self.factory, checkpoint=checkpoint, untrained=True)
        self.verify(Path(self.onnx), reference)
        spec = PreprocessSpec.from_file(Path(self.preprocessing)) if self.preprocessing else None
        if samples is None:
            samples = SampleSet.open(self.inputs, preprocessing=spec)
        samples = samples.with_batch_axes(self.batch_axes)
        origin = SamplesOrigin(self.inputs, _path(self.labels), None, _path(self.slices))
        metrics = self.policy.metrics
        own = samples.labels() if metrics and self.labelled and not self.labels else None
        annotations = open_annotations(origin, metrics, samples.count, source_labels=own)
        self.verify_annotations(annotations)
        labels = None
        if origin.labels:
            labels = class_labels(origin.labels, samples=samples.count, annotations=annotations)
        workload = EvaluationData(
            samples,
            labels,
            annotations=annotations,
            batch_size=self.batch_size,
            units=self.most_units,
            spec=spec,
        )
        job = MeasurementJob.from_files(
            Path(self.onnx), model=reference.model, data=workload, policy=self.policy
        )
        return replace(job, source_labels=self.labelled and labels is None)

    def verify_annotations(self, annotations: Annotations) -> None:
        """Raise DigestMismatch if a file with labels or slices for the metrics has changed."""
        _verify("labels and slices", annotations.sha256, self.annotations_sha256)

    def verify(self, onnx: Path, reference: Reference) -> None:
        """Raise DigestMismatch if the file, the reference file or the model has changed."""
        _verify(str(onnx), read_subject(onnx).sha256, self.subject_sha256)
        source = reference.source
        _verify(f"the reference file {source.factory}", source.onnx_sha256, self.reference_sha256)
        _verify(self.factory, as_reference(reference.model).weights_digest(), self.model_sha256)
        _verify(f"the code of {self.factory}", _code(reference), self.code_sha256)


def _code(reference: Reference) -> Digest:
    code = reference.source.code or as_reference(reference.model).collect_code(
        reference.source.factory
    )
    return code.digest()


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _verify(label: str, opened: Digest | None, expected: Digest | None) -> None:
    if opened != expected:
        raise DigestMismatch(
            f"{label} is {opened} for a worker, {expected} was planned. Use the same files and "
            "code for every worker."
        )


class WorkerFailure(Record):
    """The reason why a unit can't be measured, to be raised in the main process."""

    kind: str
    """Name of the error's class."""
    message: Prose

    @classmethod
    def from_error(cls, error: Exception) -> WorkerFailure:
        """Describe an error; one that is not a `GateError` becomes an EvidenceError."""
        if isinstance(error, GateError):
            return cls(kind=type(error).__name__, message=str(error))
        message = f"a worker failed unexpectedly: {type(error).__name__}: {error}"
        return cls(kind=EvidenceError.__name__, message=message)

    def error(self) -> GateError:
        """Return the error itself."""
        return (by_name(self.kind) or EvidenceError)(self.message)


# The functions below return one byte followed by JSON: a part, a failure, or nothing. An exception
# of another process would lose its class on Ray.


def read_answer(data: bytes) -> UnitResult | None:
    """Return a worker's result; None: it opened the job.

    Raises the GateError of the worker, and EvidenceError for an invalid answer.
    """
    if data[:1] == b"F":
        raise WorkerFailure.from_json(data[1:]).error()
    return UnitResult.from_json(data[1:]) if data else None


def open_job(spec: str, threads: int, delivery: Delivery | None) -> bytes:
    """Open the job of a `JobSpec` in this process for `measure`. `threads`: of PyTorch."""
    try:
        _open_once(spec, threads, delivery)
    except Exception as error:
        return b"F" + WorkerFailure.from_error(error).to_json().encode()
    return b""


def measure(spec: str, threads: int, delivery: Delivery | None, lead: str, unit: WorkUnit) -> bytes:
    """Measure one unit with the `FirstUnitState` in `lead`."""
    try:
        run = _open_once(spec, threads, delivery)
        if _open_job.lead != lead:
            run.use_first_unit(FirstUnitState.from_json(lead))
            _open_job.lead = lead
        return b"P" + run.measure_for(unit).to_json().encode()
    except Exception as error:
        return b"F" + WorkerFailure.from_error(error).to_json().encode()


@dataclass
class _OpenJob:
    """The job that this process has open; only one at a time."""

    spec: str = ""
    lead: str = ""
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    run: MeasurementRun | None = None


_open_job = _OpenJob()


def _open_once(text: str, threads: int, delivery: Delivery | None) -> MeasurementRun:
    global _open_job  # noqa: PLW0603 - the one job of this process

    if _open_job.run is None or _open_job.spec != text:
        _open_job.stack.close()
        _open_job = _OpenJob(text)
        atexit.register(_open_job.stack.close)
        with paused_gc(), contextlib.ExitStack() as stack:
            spec, samples = JobSpec.from_json(text), None
            if delivery is not None:
                spec = delivery.unpacked(spec, stack.enter_context(temporary_folder()))
                samples = delivery.samples()
            job = spec.to_job(samples)
            _open_job.run = stack.enter_context(opened(job, threads=threads, noise=False))
            _open_job.stack.push(stack.pop_all())
    return _open_job.run


@contextlib.contextmanager
def opened(job: MeasurementJob, *, threads: int, noise: bool) -> Iterator[MeasurementRun]:
    """Open the model and all runtimes of a job for the `with` block. Raises GateError.

    The number of threads is set now, because importing the model's module may have set another.
    `noise`: use the float64 reference.
    """
    torch.set_num_threads(threads)
    with MeasurementRun.open(job, noise=noise) as run:
        run.open_runtimes()
        yield run


_CHUNK_BYTES = 1 << 26
"""Chunk size of a file in Ray's object store, in bytes; the store spills what exceeds memory."""


@dataclass(frozen=True)
class Delivery:
    """The files that workers on other machines of a Ray cluster can't open by themselves."""

    files: dict[str, dict[str, tuple[Any, ...]]]
    """Chunks of the files that `JobSpec` names, and of their data files: lists of Ray object
    references by field and file name."""
    source: Opening | None
    """Samples on this machine; None: workers open their address."""
    node: str
    """The identifier of this machine in Ray."""

    @classmethod
    def from_spec(cls, spec: JobSpec) -> Delivery:
        """Put all files of the job into the object store. Raises StorageError and OnnxFileError."""
        import ray

        files = {"onnx": _stored_onnx(Path(spec.onnx))}
        if spec.reference_sha256 is not None:
            files["factory"] = _stored_onnx(Path(spec.factory))
        for name in ("checkpoint", "preprocessing", "labels", "slices"):
            path = getattr(spec, name)
            if path is not None:
                files[name] = _stored(Path(path))
        return cls(files, _local_source(spec), ray.get_runtime_context().get_node_id())

    def unpacked(self, spec: JobSpec, into: Path) -> JobSpec:
        """Return the job with copies of its files below `into`. Opening them verifies their
        digests."""
        import ray

        copies = {}
        for name, files in self.files.items():
            for file, chunks in files.items():
                path = into / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as stream:
                    for chunk in chunks:
                        stream.write(ray.get(chunk))
            copies[name] = str(into / name / next(iter(files)))
        return spec.model_copy(update=copies)

    def samples(self) -> SampleSet | None:
        """Return the samples on the other machine. Raises the exceptions of opening them."""
        return None if self.source is None else SampleSet(FetchedRows(self.source, self.node))


def _local_source(spec: JobSpec) -> Opening | None:
    named = SampleLocation.parse(spec.inputs)
    if named.is_url or named.is_factory:
        return None
    fields = spec.inputs[len(named.source) :]
    preprocessing = spec.preprocessing
    return Opening(
        f"{Path(named.source).absolute()}{fields}",
        PreprocessSpec.from_file(Path(preprocessing)) if preprocessing else None,
    )


def _stored_onnx(path: Path) -> dict[str, tuple[Any, ...]]:
    return _stored(path, *(path.parent / name for name in read_subject(path).external_data))


def _stored(first: Path, *data_files: Path) -> dict[str, tuple[Any, ...]]:
    import ray

    return {
        str(path.relative_to(first.parent)): tuple(map(ray.put, _chunks(path)))
        for path in (first, *data_files)
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


class FetchedRows(SampleReader):
    """Samples that Ray tasks read on the machine that stores them.

    The next batch is read while a batch is computed.
    """

    def __init__(self, source: Opening, node: str) -> None:
        """Open the samples. Raises the exceptions of opening them there."""
        self._source, self._node = source, node
        self._count: int
        self.origin, self.specs, self._count, self.labelled = self._answer(self._task(None))

    def __len__(self) -> int:
        return self._count

    def read(self, indices: Sequence[int]) -> Block:
        """Return the samples at these indices."""
        return self._block(self._task(indices))

    def batches(self, indices: range, size: int) -> Iterator[Block]:
        """Yield the samples of a range in blocks of `size`."""
        spans = [indices[start : start + size] for start in range(0, len(indices), size)]
        next_task = self._task(spans[0])
        for next_span in [*spans[1:], None]:
            task = next_task
            if next_span is not None:
                next_task = self._task(next_span)
            yield self._block(task)

    def _task(self, indices: Sequence[int] | None) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(self._node, soft=False)
        task: Any = ray.remote(read_source)
        return task.options(num_cpus=0, scheduling_strategy=strategy).remote(self._source, indices)

    def _block(self, reference: Any) -> Block:
        arrays, labels = self._answer(reference)
        return Block({name: np.array(array) for name, array in arrays.items()}, labels)

    @staticmethod
    def _answer(reference: Any) -> Any:
        import ray

        answer = ray.get(reference)
        if isinstance(answer, WorkerFailure):
            raise answer.error()
        return answer


def read_source(source: Opening, indices: Sequence[int] | None) -> Any:
    """Return the arrays and labels at these indices, as read-only arrays of Ray's store.

    With None: the origin, specs, number of samples, and whether they have labels.
    """
    try:
        rows = _rows(source)
        if indices is None:
            return rows.origin, rows.specs, len(rows), rows.labelled
        block = rows.read(indices)
    except GateError as error:
        return WorkerFailure.from_error(error)
    return block.arrays, block.labels


@functools.lru_cache(maxsize=1)
def _rows(source: Opening) -> SampleReader:
    return source.rows()
