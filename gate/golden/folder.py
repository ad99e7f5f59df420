"""Read (verified) and write a folder of golden vectors, including pictures."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError, DigestMismatch, EvidenceError
from gate.golden.manifest import (
    DType,
    GoldenManifest,
    GoldenModel,
    GoldenOutput,
    GoldenPart,
    GoldenPicture,
    GoldenPictures,
    GoldenTensor,
    Origin,
)
from gate.policy.sections import NonFinite
from gate.preprocess.implementations import pillow_incapable, pillow_preprocess
from gate.preprocess.pictures import decoded, read_picture
from gate.preprocess.spec import PreprocessSpec, geometry, to_pixels
from gate.records.evidence import BatchAxes
from gate.storage import files
from gate.storage.arrays import Pixels, Tensor, little_endian
from gate.storage.digest import Digest
from gate.storage.untrusted_files import read_untrusted

GOLDEN_JSON = "golden.json"

_RECORD_LIMIT = 1 << 20
"""Maximum size of golden.json, in bytes."""

SIZE_LIMIT = 1 << 32
"""Maximum size of all arrays and pictures: 4 GiB is far more than a few samples need."""

Array = NDArray[np.generic]


@dataclass(frozen=True)
class PartVectors:
    """The vectors of a part, by the names of the inputs and outputs of its ONNX file."""

    golden: GoldenPart
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


@dataclass(frozen=True)
class Vectors:
    """Golden vectors that were read and verified, by the names of the inputs and outputs of the
    ONNX file or of the chain of a multi-file release."""

    golden: GoldenManifest
    sha256: Digest
    """Digest of golden.json."""
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    pictures: tuple[bytes, ...] = ()
    """PNG of each sample; empty without pictures."""
    parts: Mapping[str, PartVectors] = field(default_factory=dict)


def read_golden(folder: Path, *, sha256: Digest | None = None) -> Vectors:
    """Read the vectors of `folder` and verify every array: file type, size, digest, values.

    sha256: expected digest of golden.json, compared before it is parsed. Raises EvidenceError if
    golden.json is missing or not valid, if the files are too large in total, or an array has NaN;
    DigestMismatch if golden.json or an array differs; StorageError if this machine can't read them.
    """
    try:
        return _read_folder(folder, sha256)
    except (MemoryError, OverflowError, RecursionError) as error:
        raise EvidenceError(
            f"the golden vectors in {folder} can't be read ({type(error).__name__}): they are too "
            "large for this machine, or manipulated. Fetch them again."
        ) from error


def read_record(folder: Path, *, sha256: Digest | None = None) -> tuple[GoldenManifest, Digest]:
    """Read only golden.json and its digest. Raises the exceptions of `read_golden`."""
    path = folder / GOLDEN_JSON
    text = read_untrusted(path, limit=_RECORD_LIMIT, sha256=sha256)
    return GoldenManifest.from_untrusted(text, label=str(path)), Digest.from_bytes(text)


def record_digest(folder: Path) -> Digest:
    """Return the digest of golden.json without parsing it. Raises as `read_golden`."""
    return Digest.from_bytes(read_untrusted(folder / GOLDEN_JSON, limit=_RECORD_LIMIT))


def _read_folder(folder: Path, expected: Digest | None) -> Vectors:
    golden, sha256 = read_record(folder, sha256=expected)
    if golden.size_bytes > SIZE_LIMIT:
        raise EvidenceError(
            f"the golden vectors in {folder} have {golden.size_bytes} bytes, the maximum is "
            f"{SIZE_LIMIT}. Measure with fewer or smaller samples."
        )
    return Vectors(
        golden=golden,
        sha256=sha256,
        inputs=_arrays(folder, golden.inputs, output=False),
        outputs=_arrays(folder, golden.outputs, output=True),
        pictures=_pictures(folder, golden),
        parts={
            name: PartVectors(
                part,
                _arrays(folder, part.inputs, output=False),
                _arrays(folder, part.outputs, output=True),
            )
            for name, part in golden.parts.items()
        },
    )


def files_of(golden: GoldenManifest) -> tuple[str, ...]:
    """Return the names of all files of the vectors, golden.json first."""
    return (GOLDEN_JSON, *golden.files)


def _arrays(folder: Path, tensors: Iterable[GoldenTensor], *, output: bool) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for tensor in tensors:
        path = folder / tensor.file
        data = read_untrusted(path, limit=tensor.size_bytes, sha256=tensor.sha256)
        if len(data) != tensor.size_bytes:
            raise DigestMismatch(
                f"{path} has {len(data)} bytes, {tensor.dtype} {list(tensor.shape)} needs "
                f"{tensor.size_bytes}. It is damaged: fetch the golden vectors again."
            )
        dtype = np.dtype(tensor.dtype)
        little = np.frombuffer(data, dtype=dtype.newbyteorder("<"))
        # A writable copy, which PyTorch requires.
        values: Array = little.astype(dtype).reshape(tensor.shape)
        allowed = tensor.nonfinite if isinstance(tensor, GoldenOutput) else "refuse"
        check_values(tensor.name, values, output=output, nonfinite=allowed)
        arrays[tensor.name] = values
    return arrays


def _pictures(folder: Path, golden: GoldenManifest) -> tuple[bytes, ...]:
    """Return the content of every picture, verified."""
    files = golden.pictures.files if golden.pictures else ()
    return tuple(
        read_untrusted(folder / file.file, limit=file.size_bytes, sha256=file.sha256)
        for file in files
    )


def check_values(
    name: str, values: Array, *, output: bool, nonfinite: NonFinite = "refuse"
) -> None:
    """Raise EvidenceError for arrays with another dtype, without elements, or with NaN."""
    if values.dtype.name not in get_args(DType):
        raise EvidenceError(
            f"'{name}' has dtype {values.dtype}, golden vectors support "
            f"{', '.join(get_args(DType))}. Wrap the model to take and return these dtypes."
        )
    if output and not values.size:
        raise EvidenceError(
            f"'{name}' has shape {values.shape}: nothing to compare. Add samples on axis 0."
        )
    if values.dtype.kind != "f":
        return
    bad = np.isnan(values) if output else ~np.isfinite(values)
    if (bad.size and bad.all()) or (bad.any() and nonfinite == "refuse"):
        kind = "NaN" if output else "NaN or infinite"
        raise EvidenceError(
            f"'{name}' has {int(bad.sum())} {kind} values, first at index "
            f"{int(bad.argmax())}. They can't be compared: remove that sample."
        )


@dataclass(frozen=True)
class ExpectedOutput:
    """An output of the reference, shape (samples, ...), and its tolerances (`GoldenOutput`)."""

    values: Array
    max_abs_diff: float
    top1_agreement: float | None = None
    nonfinite: NonFinite = "refuse"


@dataclass(frozen=True)
class FileVectors:
    """The vectors to write: a file, its inputs and its expected outputs."""

    model: GoldenModel
    inputs: Mapping[str, Array]
    outputs: Mapping[str, ExpectedOutput]
    batch_axes: BatchAxes | None = None
    """The batch axes of the arrays, which form one call. None: axis 0."""

    @property
    def samples(self) -> int:
        """Return the number of samples in the call."""
        axes = self.batch_axes.inputs if self.batch_axes else dict.fromkeys(self.inputs, 0)
        counts = (values.shape[axis] for name, values in self.inputs.items()
                  if (axis := axes.get(name)) is not None)  # fmt: skip
        return next(counts, 1)


def write_golden(
    folder: Path, vectors: FileVectors, *, parts: Mapping[str, FileVectors], origin: Origin
) -> GoldenManifest:
    """Write the vectors into `folder`, which contains nothing else; return the record.

    vectors: of the file, or of the chain of a multi-file release with these `parts`. The same
    vectors give the same bytes. Data files are named by their content and golden.json is written
    last, so that a crash leaves the old or the new vectors complete. Raises EvidenceError for
    vectors that can't be compared: no or empty arrays, NaN that is not allowed or everywhere,
    infinite inputs, other dtypes; StorageError.
    """
    contents: dict[str, bytes] = {}
    try:
        golden = GoldenManifest(
            **_describe_vectors(vectors, "", contents),
            origin=origin,
            parts={
                name: GoldenPart(**_describe_vectors(part, f"part-{index}-", contents))
                for index, (name, part) in enumerate(parts.items())
            },
        )
    except ValueError as error:
        raise EvidenceError(f"the golden vectors are not valid: {error}") from error
    if golden.size_bytes > SIZE_LIMIT:
        raise EvidenceError(
            f"the golden vectors have {golden.size_bytes} bytes, the maximum is {SIZE_LIMIT}. "
            "Measure with smaller samples, or another batch size."
        )
    for file, data in contents.items():
        files.write_bytes(folder / file, data)
    golden.save(folder / GOLDEN_JSON)
    remove_stale(folder, golden)
    return golden


def _describe_vectors(
    vectors: FileVectors, prefix: str, contents: dict[str, bytes]
) -> dict[str, Any]:
    """Return the fields of the record; add the content of its arrays to `contents`."""
    if not vectors.inputs or not vectors.outputs:
        raise EvidenceError(
            f"golden vectors need every input and output of the file, but there are "
            f"{len(vectors.inputs)} inputs and {len(vectors.outputs)} outputs."
        )
    if vectors.batch_axes is None:
        _check_first_axis(vectors.inputs)
    inputs: list[GoldenTensor] = []
    for index, (name, values) in enumerate(vectors.inputs.items()):
        check_values(name, values, output=False)
        fields = _describe_array(name, values, f"{prefix}input-{index}", contents)
        inputs.append(GoldenTensor.model_validate(fields))
    outputs: list[GoldenOutput] = []
    for index, (name, output) in enumerate(vectors.outputs.items()):
        check_values(name, output.values, output=True, nonfinite=output.nonfinite)
        fields = _describe_array(name, output.values, f"{prefix}output-{index}", contents)
        fields |= {"max_abs_diff": output.max_abs_diff, "nonfinite": output.nonfinite}
        fields |= {"top1_agreement": output.top1_agreement}
        outputs.append(GoldenOutput.model_validate(fields))
    return {
        "model": vectors.model,
        "samples": vectors.samples,
        "batch_axes": vectors.batch_axes,
        "inputs": tuple(inputs),
        "outputs": tuple(outputs),
    }


def _check_first_axis(inputs: Mapping[str, Array]) -> None:
    for name, values in inputs.items():
        if not values.ndim or not len(values):
            raise EvidenceError(
                f"'{name}' has shape {values.shape}: nothing to compare. Add samples on axis 0."
            )
    if not any(values.size for values in inputs.values()):
        raise EvidenceError("all inputs are empty: nothing to compare. Add samples with values.")


def remove_stale(folder: Path, golden: GoldenManifest) -> None:
    """Remove arrays and pictures that do not belong to these vectors."""
    for pattern in ("*.bin", "*.png"):
        for path in folder.glob(pattern):
            if path.name not in golden.files:
                path.unlink(missing_ok=True)


def _describe_array(
    name: str, values: Array, prefix: str, contents: dict[str, bytes]
) -> dict[str, object]:
    """Return the fields of the array's record; add its content to `contents`."""
    data = little_endian(values).tobytes()
    digest = Digest.from_bytes(data)
    file = f"{prefix}-{digest.short}.bin"
    contents[file] = data
    return {
        "name": name,
        "dtype": values.dtype.name,
        "shape": tuple(int(size) for size in values.shape),
        "file": file,
        "sha256": digest,
    }


MAX_DIFF = 1.0
"""Default tolerance of a consumer's tensor, in gray levels: rounding to the next level."""

PIXEL_LIMIT = 1 << 25
"""Maximum size of a picture, before and after resizing: 33 megapixels."""

_DIGITS = 3


def add_pictures(
    folder: Path,
    spec: PreprocessSpec,
    pictures: Sequence[Path],
    *,
    max_diff: float = MAX_DIFF,
    sha256: Digest | None = None,
) -> GoldenManifest:
    """Add the picture of each golden sample to the vectors in `folder`, as PNG.

    A picture belongs to a sample if preprocessing it by `spec` gives exactly the golden input.
    sha256: expected digest of golden.json, which is written last, so that a crash leaves vectors
    without pictures. Raises EvidenceError if Pillow does not support the spec, the file has several
    inputs, or a sample has no picture; DigestMismatch for another golden.json.
    """
    golden = read_golden(folder, sha256=sha256)
    problem = pillow_incapable(spec)
    if problem is not None:
        raise EvidenceError(f"golden pictures are verified with Pillow: {problem}.")
    if len(golden.inputs) != 1:
        raise EvidenceError(
            f"golden pictures need a file with one input, this one has {len(golden.inputs)}."
        )
    ((name, samples),) = golden.inputs.items()
    by_sample = {
        pillow_preprocess(pixels, spec).tobytes(): pixels for pixels in map(read_picture, pictures)
    }
    picture_records = []
    for index, sample in enumerate(samples):
        pixels = by_sample.get(np.ascontiguousarray(sample).tobytes())
        if pixels is None:
            raise EvidenceError(
                f"no picture gives the golden sample {index} with this spec. Name the pictures "
                "that the samples were made from."
            )
        picture_records.append(_write_picture(folder, index, pixels))
    with_pictures = golden.golden.model_copy(
        update={
            "pictures": GoldenPictures(
                input=name, spec=spec, max_diff=max_diff, files=tuple(picture_records)
            )
        }
    )
    checked = GoldenManifest.from_json(with_pictures.to_json())
    checked.save(folder / GOLDEN_JSON)
    remove_stale(folder, checked)
    return checked


def pictures_problem(vectors: Vectors) -> str | None:
    """Return why a picture does not give its golden input with Pillow, or None."""
    recorded = vectors.golden.pictures
    if recorded is None:
        return None
    for picture, data, sample in zip(
        recorded.files, vectors.pictures, vectors.inputs[recorded.input], strict=True
    ):
        try:
            pixels = decoded(data, name=picture.file, formats=("PNG",), max_pixels=PIXEL_LIMIT)
            difference = _max_difference(pixels, sample, recorded.spec)
        except DataError as error:
            return str(error)
        if not difference <= recorded.max_diff:
            return (
                f"{picture.file} gives a tensor that differs by {difference:.4g}/255 from its "
                f"golden input, allowed {recorded.max_diff:.4g}"
            )
    return None


def _max_difference(pixels: Pixels, sample: Tensor, spec: PreprocessSpec) -> float:
    """Return the maximum difference in gray levels; infinite for another shape or dtype.

    The spec's geometry is checked first, because the tensor could exhaust the memory.
    """
    box = geometry(spec, *pixels.shape[:2])
    height, width = sample.shape[1:] if spec.layout == "nchw" else sample.shape[:2]
    if (box.bottom - box.top, box.right - box.left) != (height, width):
        return float("inf")
    if box.height * box.width > PIXEL_LIMIT:
        raise DataError(
            f"resizing a golden picture to {box.height} x {box.width} pixels exceeds the maximum "
            f"of {PIXEL_LIMIT}. Fetch the golden vectors again."
        )
    tensor = pillow_preprocess(pixels, spec)
    if (tensor.shape, tensor.dtype) != (sample.shape, sample.dtype):
        return float("inf")
    return round(float(np.abs(to_pixels(tensor, spec) - to_pixels(sample, spec)).max()), _DIGITS)


def _write_picture(folder: Path, index: int, pixels: Pixels) -> GoldenPicture:
    from PIL import Image

    if pixels.shape[0] * pixels.shape[1] > PIXEL_LIMIT:
        raise EvidenceError(
            f"the picture of the golden sample {index} has {pixels.shape[0]} x {pixels.shape[1]} "
            f"pixels, the maximum is {PIXEL_LIMIT}. Use smaller pictures."
        )
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    data = stream.getvalue()
    digest = Digest.from_bytes(data)
    file = f"picture-{index}-{digest.short}.png"
    files.write_bytes(folder / file, data)
    return GoldenPicture(file=file, size_bytes=len(data), sha256=digest)
