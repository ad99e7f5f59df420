"""The record `golden.json`, and the result of recomputing the vectors."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, Self

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

ITEM_BYTES: dict[str, int] = {
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2,
    "uint32": 4, "uint64": 8, "float16": 2, "float32": 4, "float64": 8,
}  # fmt: skip

_FILE = re.compile(r"[a-z0-9][a-z0-9-]{0,99}\.bin")

_PICTURE = re.compile(r"[a-z0-9][a-z0-9-]{0,99}\.png")

PICTURE_LIMIT = 1 << 26
"""Bytes of one picture at most."""

_ARRAY_LIMIT = 1 << 32
"""Bytes of one array at most: 4 GiB is far above what a few samples need."""

_RANK_LIMIT = 32
"""What every version of NumPy can shape."""


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
    """As evidence counts it: of the file; with external data, of the manifest of all files."""
    file: str
    """The file's name when it was measured, which the manifest contains."""
    external_data: tuple[Annotated[str, AfterValidator(_relative)], ...] = ()
    """Names of the data files, relative to its folder."""


class GoldenTensor(Record):
    """One array in a file of its own."""

    name: str
    """Of the input or output in the ONNX file."""
    dtype: DType
    shape: Annotated[tuple[Count, ...], Field(max_length=_RANK_LIMIT)]
    """Axis 0 of an input is the samples, without `batch_axes`; an output may be a single number,
    shape ()."""
    file: str
    sha256: Sha256
    """Of the file's bytes."""

    @property
    def size_bytes(self) -> int:
        """How long the file must be."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @model_validator(mode="after")
    def _fits_into_memory(self) -> Self:
        if self.size_bytes > _ARRAY_LIMIT:
            raise ValueError(f"an array of more than {_ARRAY_LIMIT} bytes")
        return self


class GoldenOutput(GoldenTensor):
    """An output of the reference, and how far a runtime may be from it."""

    max_abs_diff: Bound
    """The tolerance: largest absolute difference of an element."""
    top1_agreement: Share | None = None
    """Of logits, shape (samples, classes): the least share of samples with the same argmax."""
    nonfinite: NonFinite = added_field("refuse")
    """`same_places`: NaN stands in the vectors, and must stand in the same places."""

    @model_validator(mode="after")
    def _has_classes(self) -> Self:
        if self.top1_agreement is not None and (len(self.shape) != 2 or self.shape[1] < 2):
            raise ValueError("top-1 agreement needs logits of shape (samples, classes >= 2)")
        return self


class GoldenPicture(Record):
    """One sample as the picture that it was made from, a PNG."""

    file: str
    size_bytes: Annotated[int, Field(ge=1, le=PICTURE_LIMIT)]
    sha256: Sha256
    """Of the file's bytes."""


class GoldenPictures(Record):
    """The samples as pictures, so that a consumer starts from the file and not from the tensor."""

    input: str
    """The input that they become."""
    spec: PreprocessSpec
    max_diff: Bound
    """How far a consumer's tensor may be from the golden input: 1/255 of the value range before
    normalisation."""
    files: Annotated[tuple[GoldenPicture, ...], Field(min_length=1)]
    """In the order of the samples."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        names = [picture.file for picture in self.files]
        unsafe = [name for name in names if not _PICTURE.fullmatch(name)]
        if unsafe:
            raise ValueError(f"{unsafe[0]!r} is no file name that golden pictures have")
        if len(set(names)) < len(names):
            raise ValueError("two pictures share a file")
        return self


class Origin(Record):
    """The origin of the vectors."""

    policy_sha256: Sha256
    """The policy that the tolerances come from."""
    versions: dict[str, str]
    """Distribution name to version: torch, which computed the outputs, and others."""
    code_sha256: Sha256 | None = added_field(None)
    """Digest of the code of the model that computed them (`gate.records.evidence.ModelCode`)."""


class GoldenPart(Record):
    """The vectors of one part of a release: its file and arrays, as those of the whole."""

    model: GoldenModel
    """Its file is named relative to the release file's folder, its data to its own."""
    samples: Axis
    inputs: Annotated[tuple[GoldenTensor, ...], Field(min_length=1)]
    outputs: Annotated[tuple[GoldenOutput, ...], Field(min_length=1)]
    batch_axes: BatchAxes | None = added_field(None)
    """As of the whole."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _relative(self.model.file)
        check_arrays(self)
        return self


class GoldenManifest(Record):
    """`golden.json`. Of a release the arrays of the whole are what the chain takes and gives."""

    schema_version: Literal[1] = 1
    model: GoldenModel
    samples: Axis
    inputs: Annotated[tuple[GoldenTensor, ...], Field(min_length=1)]
    outputs: Annotated[tuple[GoldenOutput, ...], Field(min_length=1)]
    origin: Origin
    pictures: GoldenPictures | None = added_field(None)
    """None: the samples are tensors only."""
    parts: dict[str, GoldenPart] = added_field({})
    """Of a release of several files, by name; empty: one ONNX file."""
    batch_axes: BatchAxes | None = added_field(None)
    """The arrays are those of one call of the file. None: with the samples on axis 0."""

    @property
    def arrays(self) -> tuple[GoldenTensor, ...]:
        """Return the arrays of the whole, then of each part."""
        each: tuple[GoldenManifest | GoldenPart, ...] = (self, *self.parts.values())
        return tuple(tensor for of in each for tensor in (*of.inputs, *of.outputs))

    @property
    def files(self) -> dict[str, Digest]:
        """Every file beside golden.json, with the digest of its bytes."""
        arrays = {tensor.file: tensor.sha256 for tensor in self.arrays}
        pictures = self.pictures.files if self.pictures else ()
        return arrays | {picture.file: picture.sha256 for picture in pictures}

    @property
    def sizes(self) -> dict[str, int]:
        """Every file beside golden.json, with its bytes."""
        arrays = {tensor.file: tensor.size_bytes for tensor in self.arrays}
        pictures = self.pictures.files if self.pictures else ()
        return arrays | {picture.file: picture.size_bytes for picture in pictures}

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


def check_arrays(of: GoldenManifest | GoldenPart) -> None:
    """Raise ValueError for arrays that can't be told apart, or are not of the same samples."""
    for side in (of.inputs, of.outputs):
        if len({tensor.name for tensor in side}) < len(side):
            raise ValueError("two inputs, or two outputs, have the same name")
    unsafe = [t.file for t in (*of.inputs, *of.outputs) if not _FILE.fullmatch(t.file)]
    if unsafe:
        raise ValueError(f"{unsafe[0]!r} is no file name that golden vectors have")
    axes = None if of.batch_axes is None else {**of.batch_axes.outputs, **of.batch_axes.inputs}
    counted = [*of.inputs, *(o for o in of.outputs if o.top1_agreement is not None)]
    for tensor in counted:
        axis = 0 if axes is None else axes.get(tensor.name)
        if axis is not None and tensor.shape[axis : axis + 1] != (of.samples,):
            raise ValueError(
                f"axis {axis} of '{tensor.name}' must be the {of.samples} samples, as of all "
                "inputs and logits with a batch axis"
            )
    if any(0 in tensor.shape for tensor in of.outputs):
        raise ValueError("an output without elements")


class OutputResult(Record):
    """One output, computed again. Either `problem`, or within its bounds."""

    name: str
    part: str | None = added_field(None)
    """Of a release; None: of one ONNX file."""
    tolerance: Measured
    max_abs_diff: Measured | None = None
    """None: there is nothing to compare."""
    top1_agreement: Measured | None = None
    """None: not asked for, or nothing to compare."""
    problem: str | None = None


class GoldenResult(Record):
    """The result of computing the vectors again. Only `passed` means that they agree."""

    schema_version: Literal[1] = 1
    passed: bool
    model_sha256: Sha256
    """Of the file that was looked at."""
    golden_sha256: Sha256
    """Of golden.json, which names the digests of all arrays."""
    samples: int
    onnxruntime: str
    providers: tuple[str, ...] = ()
    """Of the session, in its order; empty: none was opened."""
    outputs: tuple[OutputResult, ...] = ()
    problems: tuple[str, ...] = ()
    """Everything that is wrong, that of the outputs included."""

    @model_validator(mode="after")
    def _honest(self) -> Self:
        clean = not self.problems and all(output.problem is None for output in self.outputs)
        if self.passed and not (clean and self.outputs and self.samples and self.providers):
            raise ValueError("a result without a whole and clean comparison did not pass")
        return self
