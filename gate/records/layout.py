"""File names in reports and registered versions; the size of a version."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt

from gate.errors import TooLarge
from gate.storage.record import Record

PREPROCESSING = "preprocessing"
"""Folder of the preprocessing spec, next to the ONNX file."""

SPEC = "spec.json"

SPEC_LIMIT = 1 << 16
"""Maximum size of a spec in bytes; a usual one has about 400."""

EVIDENCE = "evidence.json"
DECISION = "decision.json"
POLICY = "policy.json"
EVIDENCE_STATEMENT = "evidence.dsse.json"
"""Signed statement about the evidence."""

DECISION_STATEMENT = "decision.dsse.json"
"""Signed statement about the decision."""

TREND = "trend.json"
EXPLANATION = "explanation.json"
CHANGE = "change.json"
"""Changes since the version that served."""

LOCALISATION = "localisation.json"
MARKDOWN = "report.md"
PAGE = "report.html"
PLOTS = "plots"
SAMPLES = "samples.csv"
METRICS = "metrics.safetensors"
"""Values of the metrics for each sample."""

PICTURES = "pictures"
"""Folder with pictures of the worst samples."""

GOLDEN = "golden"
"""Folder of the golden vectors."""

RUN = "run.json"
"""ID of the MLflow run with the same record."""

ARGUMENTS = "arguments.json"
"""Arguments of the check."""

REPORT_FILES = (
    EVIDENCE,
    DECISION,
    POLICY,
    EVIDENCE_STATEMENT,
    DECISION_STATEMENT,
    TREND,
    EXPLANATION,
    CHANGE,
    LOCALISATION,
    MARKDOWN,
    PAGE,
    PLOTS,
    SAMPLES,
    METRICS,
    PICTURES,
    GOLDEN,
    RUN,
    ARGUMENTS,
)
"""All files and folders of a report."""


# The records alone prove nothing, since every writer to the registry can change them. The ledger
# contains their expected digests.


RECORDS = "gate"
"""Folder of the records, next to the ONNX file."""


# quantized/model.onnx           the ONNX file (of any name) with its external data, or the release
#                                file with its parts
# quantized/gate/…               the twin's evidence and decision
# quantized/golden/…             the twin's golden vectors


QUANTIZED = "quantized"
"""Folder of the quantized twin, next to the exact file; also a slot of a deployed release."""

MAX_BYTES = 8 << 30
"""Maximum size of a version with all files."""

_MAX_FILES = 10_000

_MORE_BYTES, _MORE_FILES = 64 << 20, 100
"""Size and number of files that registries and reviewers may add to a version."""


class CheckArguments(Record):
    """The arguments of `gate check` by which `gate reproduce` finds the files again.

    Paths are those of the command line, without passwords."""

    model: str
    inputs: str
    checkpoint: str | None = None
    preprocessing: str | None = None
    batch_axes: dict[str, int | None] = Field(default={})

    @property
    def names(self) -> dict[str, str]:
        """Return the files that replace the words in capitals of a command."""
        paths = (self.model, self.inputs, self.checkpoint, self.preprocessing)
        words = zip(("MODEL.onnx", "SAMPLES", "CHECKPOINT", "SPEC"), paths, strict=True)
        return {word: path for word, path in words if path is not None}


class VersionSize(Record):
    """The size of a version at its promotion, with all files in its folder."""

    size_bytes: NonNegativeInt
    files: NonNegativeInt

    @property
    def most_bytes(self) -> int:
        """Return the maximum size of the version in bytes."""
        return self.size_bytes + _MORE_BYTES

    def check(self, size_bytes: int, files: int) -> None:
        """Raise TooLarge if a version is now much larger than this."""
        if size_bytes > self.most_bytes:
            raise TooLarge(f"there are {size_bytes} bytes or more, expected {self.size_bytes}")
        if files > self.files + _MORE_FILES:
            raise TooLarge(f"there are {files} files and folders or more, expected {self.files}")


MAX_EXTENT = VersionSize(size_bytes=MAX_BYTES, files=_MAX_FILES)
"""Default for versions without a recorded size."""
