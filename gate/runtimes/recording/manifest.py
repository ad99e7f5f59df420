"""What a recording says of itself: `manifest.json`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from gate.storage.record import Record, Sha256

MANIFEST = "manifest.json"
SAMPLES = "samples"
"""The part that the verdict is about; the others are probes."""
Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$")]
_DTYPES = r"^(bool|u?int(8|16|32|64)|float(16|32|64))$"


class Whence(Record):
    """Where the outputs were computed, by the word of whoever packed them: `meta.json`."""

    runtime: Text
    """`TensorRT`."""
    version: Text
    device: Text
    """`Jetson Orin Nano, JetPack 6.1`."""
    precision: Text
    """In which it computed: `float32`, `float16`, `int8`."""
    recorded_at: Text
    """ISO 8601."""
    model_sha256: Sha256 | None = None
    """Of the file that ran there, where it was computed there."""

    @field_validator("recorded_at")
    @classmethod
    def _is_a_time(cls, text: str) -> str:
        from datetime import datetime

        datetime.fromisoformat(text)
        return text


class RecordedArray(Record):
    """One `.npy` file of the recording."""

    name: str
    dtype: Annotated[str, StringConstraints(pattern=_DTYPES)]
    shape: Annotated[tuple[Count, ...], Field(min_length=1, max_length=32)]
    file: str
    sha256: Sha256


class RecordedPart(Record):
    """The samples, or one probe: a batch that was computed as a whole."""

    name: str
    size: Annotated[int, Field(ge=1)]
    """Samples in it."""
    inputs_sha256: Sha256
    """`gate.runtimes.recording.rows.digest_of` its samples."""
    outputs: tuple[RecordedArray, ...] = ()
    """In the file's order; axis 0 is the sample."""
    failed: str | None = None
    """Why the runtime could not compute it: then it has no outputs."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if bool(self.outputs) == (self.failed is not None):
            raise ValueError(f"part '{self.name}' must have either outputs, or why it failed")
        return self


class RecordingManifest(Record):
    """The whole recording."""

    schema_version: Literal[1] = 1
    model_sha256: Sha256
    whence: Whence
    rows: RecordedArray
    """The digest of each sample's inputs."""
    parts: Annotated[tuple[RecordedPart, ...], Field(min_length=1)]

    @property
    def samples(self) -> RecordedPart:
        """The first part."""
        return self.parts[0]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        names = [part.name for part in self.parts]
        if names[0] != SAMPLES or len(set(names)) < len(names):
            raise ValueError(f"the parts are {names[:9]}; '{SAMPLES}' must be first, each once")
        if self.samples.failed is not None:
            raise ValueError(f"the samples were not computed: {self.samples.failed}")
        if self.rows.shape != (self.samples.size, 32) or self.rows.dtype != "uint8":
            raise ValueError(f"rows: {self.rows.dtype} {self.rows.shape} for the samples' digests")
        for part in self.parts:
            for array in part.outputs:
                if array.shape[0] != part.size and part is self.samples:
                    raise ValueError(
                        f"output '{array.name}' has {array.shape[0]} rows on axis 0 for "
                        f"{part.size} samples"
                    )
        return self
