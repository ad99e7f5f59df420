"""Export samples for a runtime on another machine, and pack its outputs into a recording."""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator
from torch import nn

from gate.data.array_files import SINGLE_NAME, open_array
from gate.data.batch_axes import arrange, bind_samples
from gate.data.input_binding import InputBinding
from gate.data.samples import SampleSet
from gate.errors import DataError, DigestMismatch, EvidenceError, StorageError, first_line
from gate.measure.context import UNLIMITED, MeasurementContext
from gate.measure.job import MeasurementJob
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.probes.instrument import ProbeInstrument, basic_probes
from gate.probes.probe import Probe, SampleProfile
from gate.probes.size_probes import DynamicAxes
from gate.records.evidence import BatchAxes, Subject
from gate.reference.environment import deterministic
from gate.reference.reference import ReferenceModel
from gate.runtimes.recording_format import (
    MANIFEST,
    SAMPLES,
    RecordedArray,
    RecordedPart,
    RecordingManifest,
    RecordingSource,
    Rows,
    digest_of,
    row_digests,
)
from gate.storage import files
from gate.storage.arrays import STRING, Batch, RuntimeArray, little_endian
from gate.storage.digest import Digest
from gate.storage.files import is_inside, open_inside, wrong_name
from gate.storage.record import Record, Sha256, added_field
from gate.storage.untrusted_files import RECORD_LIMIT, parse_strict_json, read_untrusted
from gate.storage.yaml_section import first_problem

# Both headers are made for programs that read raw files: every array has its dtype, shape and file
# name.


SAMPLES_HEADER = "samples.json"

OUTPUTS_HEADER = "outputs.json"

Count = Annotated[int, Field(ge=0)]


class SentArray(Record):
    """One input of one part in two files: `.npy`, and raw little-endian numbers in row-major
    order."""

    name: str
    """Name of the file's input."""
    dtype: str
    """`float32`, `int64`, or `bool` (one byte each)."""
    shape: tuple[Count, ...]
    npy: str
    raw: str


class SentPart(Record):
    """The samples, or one probe."""

    name: str
    """`samples`, or the probe's name."""
    size: Count
    batch: Count | None
    """Batch size: that of a probe, which must run as a whole; None: any size."""
    inputs_sha256: Sha256
    inputs: tuple[SentArray, ...]


class SamplesHeader(Record):
    """The content of `samples.json`."""

    schema_version: Literal[1] = 1
    model_sha256: Sha256
    outputs: tuple[str, ...]
    """Names of the file's outputs, in the order in which they must be returned."""
    parts: Annotated[tuple[SentPart, ...], Field(min_length=1)]
    batch_axes: BatchAxes | None = added_field(None)
    """Batch axes of the file if they are not all axis 0. The sample files and the recorded outputs
    always have the samples on axis 0."""


class ReturnedArray(Record):
    """One output of one part: an `.npy` file, or raw numbers with their dtype and shape."""

    file: str
    dtype: str | None = None
    shape: tuple[Count, ...] | None = None


class ReturnedPart(Record):
    """Outputs in the file's order, or why the runtime could not compute the part."""

    outputs: tuple[ReturnedArray, ...] = ()
    failed: str | None = None

    @model_validator(mode="after")
    def _has_outputs_or_failure(self) -> Self:
        if self.outputs and self.failed is not None:
            raise ValueError("the part has both outputs and failed; set only one of them")
        return self


class OutputsHeader(Record):
    """The content of `outputs.json`."""

    schema_version: Literal[1] = 1
    parts: Annotated[dict[str, ReturnedPart], Field(min_length=1)]
    """Parts by the names in `samples.json`."""


_ROWS = 64
"""Number of samples that are held at a time."""

_KINDS = "biuf"

ZIP = ".zip"


def read_recording_source(path: Path) -> RecordingSource:
    """Read `meta.json`. Raises EvidenceError."""
    data = read_untrusted(path, limit=RECORD_LIMIT)
    parse_strict_json(data, label=str(path))
    try:
        return RecordingSource.model_validate_json(data)
    except ValidationError as error:
        raise EvidenceError(
            f"{path}: {first_problem(error)} Expected the strings runtime, version, device, "
            "precision and recorded_at (ISO 8601), and model_sha256 if it was computed there."
        ) from error


@dataclass(frozen=True)
class Packing:
    """The sources of one recording."""

    subject: Subject
    """The file that ran."""
    inputs: Path
    """The samples, or the result of `gate samples export`."""
    outputs: Path
    """File or folder of arrays with the samples' outputs, or a folder with `outputs.json`."""
    whence: RecordingSource

    def write(self, target: Path) -> RecordingManifest:
        """Write a folder, or a zip if `target` ends with .zip, atomically.

        Raises DataError, InputMismatch, EvidenceError or DigestMismatch if the sources do not fit
        together, StorageError.
        """
        if target.exists():
            raise StorageError(f"{target} exists already. Choose a new path, or remove it.")
        ran = self.whence.model_sha256
        if ran is not None:
            ran.verify(self.subject.sha256, label="the file that is recorded")
        rows, sent = self._inputs()
        returned = _returned_parts(self.outputs)
        unexpected = sorted(set(returned) - {part.name for part in sent})
        if unexpected or SAMPLES not in returned:
            raise DataError(
                f"{self.outputs} has outputs of {unexpected or sorted(returned)}, expected "
                f"'{SAMPLES}' and probes that the inputs have. Give --inputs the folder that gate "
                "samples export wrote."
            )
        with _scratch(target) as staging:
            manifest = self._written(staging, rows, [p for p in sent if p.name in returned])
            files.write_text(staging / MANIFEST, manifest.to_json(indent=1) + "\n")
            if target.suffix.lower() == ZIP:
                _zip(staging, target)
            else:
                staging.rename(target)
        return manifest

    def _inputs(self) -> tuple[Rows, list[SentPart]]:
        """Return the digests of the samples, and all parts."""
        if (self.inputs / SAMPLES_HEADER).is_file():
            data = read_untrusted(self.inputs / SAMPLES_HEADER, limit=RECORD_LIMIT)
            header = SamplesHeader.from_json(data)
            if header.model_sha256 != self.subject.sha256:
                raise DigestMismatch(
                    f"{self.inputs} was exported for the file {header.model_sha256}, this one is "
                    f"{self.subject.sha256}. Export the samples of this file."
                )
            for part in header.parts:
                rows = _rows_of(self.inputs, part)
                part.inputs_sha256.verify(digest_of(rows), label=f"inputs of {part.name}")
            return _rows_of(self.inputs, header.parts[0]), list(header.parts)
        samples = SampleSet.open(self.inputs).allow_nan()
        samples = arrange(samples, self.subject.inputs, self.subject.outputs)
        binding = bind_samples(self.subject.inputs, samples, batch_size=_ROWS)
        rows = np.concatenate(
            [row_digests(binding.rows_by_input(batch)) for batch in samples.batches(_ROWS)]
        )
        part = SentPart(
            name=SAMPLES, size=len(rows), batch=None, inputs_sha256=digest_of(rows), inputs=()
        )
        return rows, [part]

    def _written(self, staging: Path, rows: Rows, sent: list[SentPart]) -> RecordingManifest:
        returned, parts = _returned_parts(self.outputs), []
        for number, part in enumerate(sent):
            folder = SAMPLES if part.name == SAMPLES else f"probes/{number:03}"
            returned_part = returned[part.name]
            arrays = [] if returned_part.failed else list(self._arrays(part, returned_part))
            (staging / folder).mkdir(parents=True)
            files = [
                _save_array(staging, f"{folder}/{index}.npy", spec.name, array)
                for index, (spec, array) in enumerate(
                    zip(self.subject.outputs, arrays, strict=False)
                )
            ]
            parts.append(
                RecordedPart(
                    name=part.name,
                    size=part.size,
                    inputs_sha256=part.inputs_sha256,
                    outputs=tuple(files),
                    failed=returned_part.failed,
                )
            )
        return RecordingManifest(
            model_sha256=self.subject.sha256,
            whence=self.whence,
            rows=_save_array(staging, "rows.npy", "rows", rows),
            parts=tuple(parts),
        )

    def _arrays(self, part: SentPart, returned_part: ReturnedPart) -> Iterator[RuntimeArray]:
        names = [spec.name for spec in self.subject.outputs]
        if (self.outputs / OUTPUTS_HEADER).is_file():
            arrays = [_opened(self.outputs, array) for array in returned_part.outputs]
        else:
            arrays = _by_name(SampleSet.open(self.outputs), names)
        if len(arrays) != len(names):
            raise DataError(
                f"there are {len(arrays)} outputs of {part.name}, the file has {names}. Give all "
                "of them, in the file's order."
            )
        for name, array in zip(names, arrays, strict=True):
            if array.dtype.kind not in _KINDS:
                raise DataError(
                    f"output '{name}' of {part.name} has dtype {array.dtype}, expected numbers."
                )
            if array.ndim == 0 or (part.name == SAMPLES and len(array) != part.size):
                raise DataError(
                    f"output '{name}' of {part.name} has shape {list(array.shape)} for "
                    f"{part.size} samples. Axis 0 must be the samples: an output that has none "
                    "can't be recorded."
                )
            yield array


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `target`. Raises StorageError for any OSError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.scratch(target) as staging:
            yield staging
    except OSError as error:
        raise StorageError(
            f"cannot write {target}: {error.strerror or error}. Free space, or name another place."
        ) from error


def _returned_parts(outputs: Path) -> dict[str, ReturnedPart]:
    header = outputs / OUTPUTS_HEADER
    if not header.is_file():
        return {SAMPLES: ReturnedPart()}
    data = read_untrusted(header, limit=RECORD_LIMIT)
    parse_strict_json(data, label=str(header))
    parts = OutputsHeader.from_json(data).parts
    if SAMPLES in parts and parts[SAMPLES].failed is not None:
        raise EvidenceError(
            f"the samples could not be computed: {parts[SAMPLES].failed}. There is nothing to pack."
        )
    return parts


def _by_name(outputs: SampleSet, names: list[str]) -> list[RuntimeArray]:
    arrays = outputs.allow_nan().at(range(len(outputs)))
    if outputs.names == (SINGLE_NAME,) and len(names) == 1:
        return [arrays[SINGLE_NAME]]
    if sorted(outputs.names) != sorted(names):
        raise DataError(
            f"the outputs hold the arrays {list(outputs.names)}, the file has the outputs {names}. "
            "Give an .npz with one array for each output, named as the outputs."
        )
    return [arrays[name] for name in names]


def _opened(folder: Path, spec: ReturnedArray) -> RuntimeArray:
    try:
        problem = wrong_name(spec.file)
        if problem is not None or not is_inside(folder, spec.file):
            raise ValueError(problem or "leads out of the folder")
        if spec.file.endswith(".npy"):
            return open_array(folder / spec.file)
        if spec.dtype is None or spec.shape is None or np.dtype(spec.dtype).kind not in _KINDS:
            raise ValueError(f"needs dtype and shape of numbers: {spec.dtype} {spec.shape}")
        dtype = np.dtype(spec.dtype).newbyteorder("<")
        expected = math.prod(spec.shape) * dtype.itemsize
        with open_inside(folder, spec.file) as stream:
            size = stream.seek(0, 2)
            if size != expected:
                raise ValueError(
                    f"has {size} bytes, {spec.dtype} {list(spec.shape)} are {expected}"
                )
            if not size:
                return np.empty(spec.shape, dtype)
            return np.memmap(stream, dtype=dtype, mode="r", shape=spec.shape)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise DataError(
            f"{folder / spec.file}: {first_line(error)}. Write the outputs again, and "
            f"{OUTPUTS_HEADER} with them."
        ) from error


def _rows_of(folder: Path, part: SentPart) -> Rows:
    arrays = {each.name: _opened(folder, ReturnedArray(file=each.npy)) for each in part.inputs}
    sizes = {len(array) for array in arrays.values()}
    if sizes != {part.size}:
        raise DataError(
            f"the inputs of {part.name} in {folder} have {sorted(sizes)} samples, {SAMPLES_HEADER} "
            f"says {part.size}. Export the samples again."
        )
    steps = range(0, part.size, _ROWS)
    parts = [row_digests({n: a[s : s + _ROWS] for n, a in arrays.items()}) for s in steps]
    return np.concatenate(parts)


def _save_array(staging: Path, file: str, name: str, array: RuntimeArray) -> RecordedArray:
    np.save(staging / file, little_endian(array), allow_pickle=False)
    return RecordedArray(
        name=name,
        dtype=array.dtype.name,
        shape=array.shape,
        file=file,
        sha256=Digest.from_file(staging / file),
    )


def _zip(staging: Path, target: Path) -> None:
    """Write a zip without compression, so that its size when unpacked is known."""
    with (
        files.replacing(target) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
    ):
        for file in sorted(staging.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(staging).as_posix())


@dataclass(frozen=True)
class Sending:
    """The samples and probes for another machine."""

    candidate: TestedFile
    samples: SampleSet
    policy: Policy
    model: nn.Module | ReferenceModel | None = None
    """The model; with it, probes that depend on the model are included."""
    batch_size: int = 32

    def write(
        self, folder: Path, *, progress: Callable[[int, int], None] | None = None
    ) -> SamplesHeader:
        """Write the folder, which must not exist, atomically.

        Raises InputMismatch and DataError for samples that do not fit, EvidenceError if the model
        can't compute them, StorageError.
        """
        if folder.exists():
            raise StorageError(f"{folder} exists already. Choose a new folder, or remove it.")
        self.candidate.verify()
        with deterministic(self.policy.determinism):
            context = self._context()
            with _scratch(folder) as staging:
                header = self._written(staging, context, progress)
                files.write_text(staging / SAMPLES_HEADER, header.to_json(indent=1) + "\n")
                staging.rename(folder)
        return header

    def _written(
        self,
        staging: Path,
        context: MeasurementContext | _SampleSource,
        progress: Callable[[int, int], None] | None,
    ) -> SamplesHeader:
        binding, total = context.binding, len(context.samples)
        texts = [spec.name for spec in context.samples.specs if spec.dtype == STRING]
        if texts:
            raise EvidenceError(
                f"the samples of '{texts[0]}' are texts, and a recording is of numbers. Measure "
                "this file where it can be run: gate check."
            )
        samples_writer = _Writer(staging, SAMPLES, SAMPLES)
        for batch in context.samples.batches(_ROWS):
            samples_writer.add(binding.rows_by_input(batch))
            if progress is not None:
                progress(samples_writer.size, total)
        parts = [samples_writer.part(binding.batch_size if binding.fixed else None)]
        sent = set()
        for probe in self._probes(context):
            inputs = binding.rows_by_input(probe.batch)
            digest = digest_of(row_digests(inputs))
            if digest in sent:
                continue
            sent.add(digest)
            writer = _Writer(staging, probe.name, f"probes/{len(parts):03}")
            writer.add(inputs)
            parts.append(writer.part(writer.size))
        subject = self.candidate.subject
        return SamplesHeader(
            model_sha256=subject.sha256,
            outputs=tuple(spec.name for spec in subject.outputs),
            parts=tuple(parts),
            batch_axes=binding.layout,
        )

    def _context(self) -> MeasurementContext | _SampleSource:
        subject = self.candidate.subject
        if self.model is None:
            gaps = self.policy.nonfinite == "same_places"
            samples = self.samples.allow_nan() if gaps else self.samples
            samples = arrange(samples, subject.inputs, subject.outputs)
            reduced = self.policy.precision == "reduced"
            binding = bind_samples(
                subject.inputs, samples, batch_size=self.batch_size, reduced=reduced
            )
            return _SampleSource(binding, samples, self.policy)
        return MeasurementContext.bare(
            MeasurementJob(self.model, self.candidate, self.samples, self.policy, self.batch_size)
        )

    def _probes(self, context: MeasurementContext | _SampleSource) -> Iterator[Probe]:
        if not self.policy.instruments.probes:
            return
        subject = self.candidate.subject
        if isinstance(context, MeasurementContext):
            yield from ProbeInstrument(context).everything()
            return
        axes = DynamicAxes.from_file(context, SampleProfile.from_source(context), self.candidate)
        yield from basic_probes(context, axes, sha256=subject.sha256)


@dataclass(frozen=True)
class _SampleSource:
    binding: InputBinding
    samples: SampleSet
    policy: Policy

    @property
    def smallest(self) -> int:
        return self.binding.batch_size if self.binding.fixed else 1

    @property
    def most(self) -> int:
        return UNLIMITED  # without the model its activations are unknown


class _Writer:
    """Writes one part batch by batch."""

    def __init__(self, staging: Path, name: str, folder: str) -> None:
        self._staging, self._name, self._folder = staging, name, folder
        self._rows = hashlib.sha256()
        self._last_batch: Batch = {}
        self.size = 0
        (staging / folder).mkdir(parents=True)

    def add(self, batch: Batch) -> None:
        """Append the samples of a batch, by the names of the file's inputs."""
        self._last_batch = batch
        self._rows.update(row_digests(batch).tobytes())
        for number, array in enumerate(batch.values()):
            with (self._staging / self._folder / f"{number}.raw").open("ab") as raw:
                raw.write(little_endian(array).reshape(-1).view(np.uint8).data)
            self.size += len(array) if number == 0 else 0

    def part(self, batch: int | None) -> SentPart:
        """Return the header after all batches; this converts the raw files to `.npy`."""
        arrays = []
        for number, (name, array) in enumerate(self._last_batch.items()):
            stem = f"{self._folder}/{number}"
            shape = (self.size, *array.shape[1:])
            _convert_to_npy(self._staging / stem, little_endian(array).dtype, shape)
            arrays.append(
                SentArray(
                    name=name,
                    dtype=array.dtype.name,
                    shape=shape,
                    npy=f"{stem}.npy",
                    raw=f"{stem}.raw",
                )
            )
        return SentPart(
            name=self._name,
            size=self.size,
            batch=batch,
            inputs_sha256=Digest(self._rows.hexdigest()),
            inputs=tuple(arrays),
        )


def _convert_to_npy(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with path.with_suffix(".raw").open("rb") as raw, path.with_suffix(".npy").open("wb") as npy:
        np.lib.format.write_array_header_1_0(npy, header)
        shutil.copyfileobj(raw, npy, 1 << 20)
