"""Pack what was computed elsewhere into a recording, bound to the file and to each sample."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from gate.errors import DataError, DigestMismatch, EvidenceError, StorageError, first_line
from gate.parity.arrays.binding import bind
from gate.parity.arrays.samples import Samples
from gate.parity.arrays.shards import SINGLE_NAME, open_array
from gate.parity.elsewhere.headers import (
    OUTPUTS_HEADER,
    SAMPLES_HEADER,
    OutputsHeader,
    ReturnedArray,
    ReturnedPart,
    SamplesHeader,
    SentPart,
)
from gate.records.evidence import Subject
from gate.runtimes.recording.manifest import (
    MANIFEST,
    SAMPLES,
    RecordedArray,
    RecordedPart,
    RecordingManifest,
    Whence,
)
from gate.runtimes.recording.rows import Rows, digest_of, row_digests
from gate.runtimes.runtime import Array
from gate.storage import atomic
from gate.storage.digest import Digest
from gate.storage.files import is_inside, open_inside, wrong_name
from gate.storage.foreign import RECORD_LIMIT, read_foreign, strict_json
from gate.storage.yaml_section import first_problem

_ROWS = 64
"""Samples that are held at a time."""
_KINDS = "biuf"
ZIP = ".zip"


def read_whence(path: Path) -> Whence:
    """`meta.json`. Raises EvidenceError."""
    data = read_foreign(path, limit=RECORD_LIMIT)
    strict_json(data, what=str(path))
    try:
        return Whence.model_validate_json(data)
    except ValidationError as error:
        raise EvidenceError(
            f"{path}: {first_problem(error)} Expected runtime, version, device, precision and "
            "recorded_at (ISO 8601), all of them texts, and model_sha256 if it was computed there."
        ) from error


@dataclass(frozen=True)
class Packing:
    """What becomes one recording."""

    subject: Subject
    """Of the file that ran."""
    inputs: Path
    """The samples, or what `gate samples export` wrote."""
    outputs: Path
    """A file or folder of arrays of the samples' outputs, or a folder with `outputs.json`."""
    whence: Whence

    def write(self, target: Path) -> RecordingManifest:
        """Write a folder, or a zip where `target` ends so; it appears whole or not at all.

        Raises DataError, InputMismatch, EvidenceError and DigestMismatch for what does not fit
        together, StorageError.
        """
        if target.exists():
            raise StorageError(f"{target} is there already. Name a new place, or remove it.")
        ran = self.whence.model_sha256
        if ran is not None:
            ran.verify(self.subject.sha256, what="the file that is recorded")
        rows, sent = self._inputs()
        returned = _returned(self.outputs)
        strangers = sorted(set(returned) - {part.name for part in sent})
        if strangers or SAMPLES not in returned:
            raise DataError(
                f"{self.outputs} has outputs of {strangers or sorted(returned)}, expected "
                f"'{SAMPLES}' and probes that the inputs have. Give --inputs the folder that gate "
                "samples export wrote."
            )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic.scratch(target) as room:
                manifest = self._written(room, rows, [p for p in sent if p.name in returned])
                atomic.write_text(room / MANIFEST, manifest.to_json(indent=1) + "\n")
                if target.suffix.lower() == ZIP:
                    _zip(room, target)
                else:
                    room.rename(target)
        except OSError as error:
            raise StorageError(
                f"cannot write {target}: {error.strerror or error}. Free space, or name another "
                "place."
            ) from error
        return manifest

    def _inputs(self) -> tuple[Rows, list[SentPart]]:
        """The digests of the samples, and all parts."""
        if (self.inputs / SAMPLES_HEADER).is_file():
            data = read_foreign(self.inputs / SAMPLES_HEADER, limit=RECORD_LIMIT)
            header = SamplesHeader.from_json(data)
            if header.model_sha256 != self.subject.sha256:
                raise DigestMismatch(
                    f"{self.inputs} was exported for the file {header.model_sha256}, this one is "
                    f"{self.subject.sha256}. Export the samples of this file."
                )
            for part in header.parts:
                rows = _rows_of(self.inputs, part)
                part.inputs_sha256.verify(digest_of(rows), what=f"inputs of {part.name}")
            return _rows_of(self.inputs, header.parts[0]), list(header.parts)
        samples = Samples.open(self.inputs).with_gaps()
        binding = bind(self.subject.inputs, samples.specs, count=len(samples), batch_size=_ROWS)
        rows = np.concatenate(
            [row_digests(binding.by_input(batch)) for batch in samples.batches(_ROWS)]
        )
        part = SentPart(
            name=SAMPLES, size=len(rows), batch=None, inputs_sha256=digest_of(rows), inputs=()
        )
        return rows, [part]

    def _written(self, room: Path, rows: Rows, sent: list[SentPart]) -> RecordingManifest:
        returned, parts = _returned(self.outputs), []
        for number, part in enumerate(sent):
            folder = SAMPLES if part.name == SAMPLES else f"probes/{number:03}"
            came = returned[part.name]
            arrays = [] if came.failed else list(self._arrays(part, came))
            (room / folder).mkdir(parents=True)
            files = [
                _saved(room, f"{folder}/{place}.npy", spec.name, array)
                for place, (spec, array) in enumerate(
                    zip(self.subject.outputs, arrays, strict=False)
                )
            ]
            parts.append(
                RecordedPart(
                    name=part.name,
                    size=part.size,
                    inputs_sha256=part.inputs_sha256,
                    outputs=tuple(files),
                    failed=came.failed,
                )
            )
        return RecordingManifest(
            model_sha256=self.subject.sha256,
            whence=self.whence,
            rows=_saved(room, "rows.npy", "rows", rows),
            parts=tuple(parts),
        )

    def _arrays(self, part: SentPart, came: ReturnedPart) -> Iterator[Array]:
        names = [spec.name for spec in self.subject.outputs]
        if (self.outputs / OUTPUTS_HEADER).is_file():
            arrays = [_opened(self.outputs, array) for array in came.outputs]
        else:
            arrays = _by_name(Samples.open(self.outputs), names)
        if len(arrays) != len(names):
            raise DataError(
                f"there are {len(arrays)} outputs of {part.name}, the file has {names}. Give all "
                "of them, in the file's order."
            )
        for name, array in zip(names, arrays, strict=True):
            if array.ndim == 0 or (part.name == SAMPLES and len(array) != part.size):
                raise DataError(
                    f"output '{name}' of {part.name} has shape {list(array.shape)} for "
                    f"{part.size} samples. Axis 0 must be the samples: an output that has none "
                    "can't be recorded."
                )
            yield array


def _returned(outputs: Path) -> dict[str, ReturnedPart]:
    header = outputs / OUTPUTS_HEADER
    if not header.is_file():
        return {SAMPLES: ReturnedPart()}
    data = read_foreign(header, limit=RECORD_LIMIT)
    strict_json(data, what=str(header))
    parts = OutputsHeader.from_json(data).parts
    if SAMPLES in parts and parts[SAMPLES].failed is not None:
        raise EvidenceError(
            f"the samples could not be computed: {parts[SAMPLES].failed}. There is nothing to pack."
        )
    return parts


def _by_name(outputs: Samples, names: list[str]) -> list[Array]:
    whole = outputs.with_gaps().at(range(len(outputs)))
    if outputs.names == (SINGLE_NAME,) and len(names) == 1:
        return [whole[SINGLE_NAME]]
    if sorted(outputs.names) != sorted(names):
        raise DataError(
            f"the outputs hold the arrays {list(outputs.names)}, the file has the outputs {names}. "
            "Give an .npz with one array for each output, named as the outputs."
        )
    return [whole[name] for name in names]


def _opened(folder: Path, spec: ReturnedArray) -> Array:
    try:
        wrong = wrong_name(spec.file)
        if wrong is not None or not is_inside(folder, spec.file):
            raise ValueError(wrong or "leads out of the folder")
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


def _saved(room: Path, file: str, name: str, array: Array) -> RecordedArray:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    np.save(room / file, little, allow_pickle=False)
    return RecordedArray(
        name=name,
        dtype=array.dtype.name,
        shape=array.shape,
        file=file,
        sha256=Digest.of_file(room / file),
    )


def _zip(room: Path, target: Path) -> None:
    """Without compression, so that whoever reads it knows how large it is."""
    with (
        atomic.replacing(target) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
    ):
        for file in sorted(room.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(room).as_posix())
