"""The two headers between the gate and a consumer: what to compute, and what came of it.

Both are made for programs that read raw files: every array has its dtype, shape and file name.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gate.storage.record import Record, Sha256

SAMPLES_HEADER = "samples.json"
OUTPUTS_HEADER = "outputs.json"
Count = Annotated[int, Field(ge=0)]


class SentArray(Record):
    """One input of one part, twice: as `.npy`, and its numbers alone, little-endian, row by row."""

    name: str
    """Of the file's input."""
    dtype: str
    """`float32`, `int64`, `bool` (one byte each)."""
    shape: tuple[Count, ...]
    npy: str
    raw: str


class SentPart(Record):
    """The samples, or one probe."""

    name: str
    """`samples`, or the probe's name."""
    size: Count
    batch: Count | None
    """In which batches to run it: a probe as a whole; None: any size will do."""
    inputs_sha256: Sha256
    inputs: tuple[SentArray, ...]


class SamplesHeader(Record):
    """`samples.json`."""

    schema_version: Literal[1] = 1
    model_sha256: Sha256
    outputs: tuple[str, ...]
    """Names of the file's outputs, in the order in which they come back."""
    parts: Annotated[tuple[SentPart, ...], Field(min_length=1)]


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
    def _is_not_both(self) -> Self:
        if self.outputs and self.failed is not None:
            raise ValueError("the part has outputs, and why it failed; say one of them")
        return self


class OutputsHeader(Record):
    """`outputs.json`."""

    schema_version: Literal[1] = 1
    parts: Annotated[dict[str, ReturnedPart], Field(min_length=1)]
    """By the names of `samples.json`."""
