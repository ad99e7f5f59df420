"""The record `golden.json`, and the result of recomputing the vectors."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from gate.policy.sections import NonFinite
from gate.preprocess.spec import PreprocessSpec
from gate.records.evidence import BatchAxes
from gate.storage.digest import Digest
from gate.storage.files import wrong_name
from gate.storage.record import Count, Measured, Record, Sha256, added_field

DType = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
]  # fmt: skip

_FILE = re.compile(r"[a-z0-9][a-z0-9-]{0,99}\.bin")

_PICTURE = re.compile(r"[a-z0-9][a-z0-9-]{0,99}\.png")

PICTURE_LIMIT = 1 << 26
"""Maximum size of one picture, in bytes."""

_ARRAY_LIMIT = 1 << 32
"""Maximum size of one array: 4 GiB is far more than a few samples need."""

_RANK_LIMIT = 32
"""Maximum rank in all versions of NumPy."""


def _relative(name: str) -> str:
    problem = wrong_name(name)
    if problem is not None:
        raise ValueError(f"{name[:80]!r} {problem}")
    return name


Axis = Annotated[int, Field(ge=1)]

Bound = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]


class GoldenModel(Record):
    """The file that the vectors belong to."""

    sha256: Sha256
    """Digest of the file, or of the manifest of all files with external data."""
    file: str
    """Name of the file at the time of the measurement, which is part of the manifest."""
    external_data: tuple[Annotated[str, AfterValidator(_relative)], ...] = ()
    """Names of the data files, relative to its folder."""


class GoldenTensor(Record):
    """One array in a separate file."""

    name: str
    """Name of the input or output in the ONNX file."""
    dtype: DType
    shape: Annotated[tuple[Count, ...], Field(max_length=_RANK_LIMIT)]
    """Without `batch_axes`, axis 0 of an input is the batch axis. An output may have shape ()."""
    file: str
    sha256: Sha256
    """Digest of the file."""

    @property
    def size_bytes(self) -> int:
        """Return the expected size of the file."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @model_validator(mode="after")
    def _fits_into_memory(self) -> Self:
        if self.size_bytes > _ARRAY_LIMIT:
            raise ValueError(f"an array of more than {_ARRAY_LIMIT} bytes")
        return self


class GoldenOutput(GoldenTensor):
    """An output of the reference, with the tolerances for a runtime."""

    max_abs_diff: Bound
    """Tolerance: maximum absolute difference of an element."""
    top1_agreement: Share | None = None
    """For logits, shape (samples, classes): minimum share of samples with the same argmax."""
    nonfinite: NonFinite = added_field("refuse")
    """`same_places`: the vectors contain NaN, which a runtime must return at the same elements."""

    @model_validator(mode="after")
    def _has_classes(self) -> Self:
        if self.top1_agreement is not None and (len(self.shape) != 2 or self.shape[1] < 2):
            raise ValueError("top-1 agreement needs logits of shape (samples, classes >= 2)")
        return self


class GoldenPicture(Record):
    """The picture of one sample, a PNG file."""

    file: str
    size_bytes: Annotated[int, Field(ge=1, le=PICTURE_LIMIT)]
    sha256: Sha256
    """Digest of the file."""


class GoldenPictures(Record):
    """The pictures of the samples, so that consumers can also verify their preprocessing."""

    input: str
    """Name of the input that they are preprocessed to."""
    spec: PreprocessSpec
    max_diff: Bound
    """Maximum difference of a consumer's tensor from the golden input, in units of 1/255 of the
    value range before normalization."""
    files: Annotated[tuple[GoldenPicture, ...], Field(min_length=1)]
    """In the order of the samples."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        names = [picture.file for picture in self.files]
        unsafe = [name for name in names if not _PICTURE.fullmatch(name)]
        if unsafe:
            raise ValueError(f"{unsafe[0]!r} is not a valid file name of a golden picture")
        if len(set(names)) < len(names):
            raise ValueError("two pictures share a file")
        return self


class Origin(Record):
    """The origin of the vectors."""

    policy_sha256: Sha256
    """Digest of the policy that determined the tolerances."""
    versions: dict[str, str]
    """Distribution name to version: torch, which computed the outputs, and others."""
    code_sha256: Sha256 | None = added_field(None)
    """Digest of the code of the model that computed them (`gate.records.evidence.ModelCode`)."""


class GoldenPart(Record):
    """The vectors of one part of a multi-file release."""

    model: GoldenModel
    """Its file is relative to the release file's folder, external data to the file's folder."""
    samples: Axis
    inputs: Annotated[tuple[GoldenTensor, ...], Field(min_length=1)]
    outputs: Annotated[tuple[GoldenOutput, ...], Field(min_length=1)]
    batch_axes: BatchAxes | None = added_field(None)
    """As in `GoldenManifest`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _relative(self.model.file)
        check_arrays(self)
        return self


class GoldenManifest(Record):
    """The content of `golden.json`. For a multi-file release, `inputs` and `outputs` are those of
    the chain."""

    schema_version: Literal[1] = 1
    model: GoldenModel
    samples: Axis
    inputs: Annotated[tuple[GoldenTensor, ...], Field(min_length=1)]
    outputs: Annotated[tuple[GoldenOutput, ...], Field(min_length=1)]
    origin: Origin
    pictures: GoldenPictures | None = added_field(None)
    """None: the samples are tensors only."""
    parts: dict[str, GoldenPart] = added_field({})
    """The parts of a multi-file release, by name. Empty: one ONNX file."""
    batch_axes: BatchAxes | None = added_field(None)
    """The batch axes of the arrays, which form one call. None: axis 0."""

    @property
    def arrays(self) -> tuple[GoldenTensor, ...]:
        """Return the arrays of the file or chain, then of each part."""
        each: tuple[GoldenManifest | GoldenPart, ...] = (self, *self.parts.values())
        return tuple(tensor for part in each for tensor in (*part.inputs, *part.outputs))

    @property
    def files(self) -> dict[str, Digest]:
        """Return the digest of each file other than golden.json, by name."""
        return {each.file: each.sha256 for each in self._files}

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file other than golden.json, by name."""
        return {each.file: each.size_bytes for each in self._files}

    @property
    def _files(self) -> tuple[GoldenTensor | GoldenPicture, ...]:
        return (*self.arrays, *(self.pictures.files if self.pictures else ()))

    @property
    def size_bytes(self) -> int:
        """Return the size of all files other than golden.json."""
        return sum(self.sizes.values())

    @model_validator(mode="after")
    def _has_a_picture_for_each_sample(self) -> Self:
        if self.pictures is None:
            return self
        shapes = {tensor.name: tensor.shape for tensor in self.inputs}
        if len(shapes.get(self.pictures.input, ())) != 4:
            raise ValueError(f"pictures are for the input '{self.pictures.input}', of rank 4")
        if len(self.pictures.files) != self.samples:
            raise ValueError(f"{len(self.pictures.files)} pictures for {self.samples} samples")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_arrays(self)
        files = [tensor.file for tensor in self.arrays]
        if len(set(files)) < len(files):
            raise ValueError("two arrays share a file")
        return self


def check_arrays(vectors: GoldenManifest | GoldenPart) -> None:
    """Raise ValueError if arrays share a name or have another number of samples."""
    for side in (vectors.inputs, vectors.outputs):
        if len({tensor.name for tensor in side}) < len(side):
            raise ValueError("two inputs, or two outputs, have the same name")
    unsafe = [t.file for t in (*vectors.inputs, *vectors.outputs) if not _FILE.fullmatch(t.file)]
    if unsafe:
        raise ValueError(f"{unsafe[0]!r} is not a valid file name of a golden vector")
    layout = vectors.batch_axes
    axes = None if layout is None else {**layout.outputs, **layout.inputs}
    logits = (output for output in vectors.outputs if output.top1_agreement is not None)
    for tensor in (*vectors.inputs, *logits):
        axis = 0 if axes is None else axes.get(tensor.name)
        if axis is not None and tensor.shape[axis : axis + 1] != (vectors.samples,):
            raise ValueError(
                f"axis {axis} of '{tensor.name}' must have the length {vectors.samples}, the "
                "number of samples, like all inputs and logits with a batch axis"
            )
    if any(0 in tensor.shape for tensor in vectors.outputs):
        raise ValueError("an output without elements")


class OutputResult(Record):
    """The result of recomputing one output: a `problem`, or within its tolerances."""

    name: str
    part: str | None = added_field(None)
    """The part of a multi-file release. None: one ONNX file."""
    tolerance: Measured
    max_abs_diff: Measured | None = None
    """None: not compared."""
    top1_agreement: Measured | None = None
    """None: not required, or not compared."""
    problem: str | None = None


class GoldenResult(Record):
    """The result of recomputing the vectors. Only `passed` means that they agree."""

    schema_version: Literal[1] = 1
    passed: bool
    model_sha256: Sha256
    """Digest of the file that was verified."""
    golden_sha256: Sha256
    """Digest of golden.json, which contains the digests of all arrays."""
    samples: int
    onnxruntime: str
    providers: tuple[str, ...] = ()
    """Providers of the session, in order. Empty: no session was opened."""
    outputs: tuple[OutputResult, ...] = ()
    problems: tuple[str, ...] = ()
    """All problems, including those of the outputs."""

    @model_validator(mode="after")
    def _honest(self) -> Self:
        clean = not self.problems and all(output.problem is None for output in self.outputs)
        if self.passed and not (clean and self.outputs and self.samples and self.providers):
            raise ValueError("a result passed without a complete comparison, or with problems")
        return self
