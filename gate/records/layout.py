"""File names in reports and registered versions; the size of a version."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt

from gate.errors import TooLarge
from gate.storage.record import Record

# Apart, so that who promotes and who deploys look for it in one place.


PREPROCESSING = "preprocessing"
"""The folder of the spec, next to the ONNX file."""

SPEC = "spec.json"

_LIMIT = 1 << 16
"""Bytes of a spec at most; a whole one has some 400."""


EVIDENCE = "evidence.json"

DECISION = "decision.json"

POLICY = "policy.json"

EVIDENCE_STATEMENT = "evidence.dsse.json"
"""Signed: what was measured."""

DECISION_STATEMENT = "decision.dsse.json"
"""Signed: what was decided."""

TREND = "trend.json"

EXPLANATION = "explanation.json"

CHANGE = "change.json"
"""Against the version that served."""

LOCALISATION = "localisation.json"

MARKDOWN = "report.md"

PAGE = "report.html"

PLOTS = "plots"

SAMPLES = "samples.csv"

METRICS = "metrics.safetensors"
"""Values per sample of the metrics."""

PICTURES = "pictures"
"""The folder of the worst samples as pictures."""

GOLDEN = "golden"
"""The folder of golden vectors."""

RUN = "run.json"
"""Names the run of MLflow with the same record."""

ARGUMENTS = "arguments.json"
"""Names the files of the check."""

OF_REPORTS = (
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
"""All that a report may hold: files and folders."""


# They prove nothing by themselves, since every user who may write to the registry may write them.
# The ledger holds the digests that they must have.


RECORDS = "gate"
"""The folder of the records, next to the ONNX file."""


# quantized/model.onnx           the file (of any name), with its external data; of a release
#                                of several files its release file, with the parts
# quantized/gate/…               its own evidence and decision
# quantized/golden/…             its own golden vectors


QUANTIZED = "quantized"
"""The folder next to the exact file; a deployed release has a slot of this name, too."""


MAX_BYTES = 8 << 30
"""Size of a model with all other files of its folder."""

_MAX_FILES = 10_000

_MORE_BYTES, _MORE_FILES = 64 << 20, 100
"""Files that registries and reviewers may add to a version."""


class CheckArguments(Record):
    """The arguments of `gate check` by which `gate reproduce` finds its files again; paths are as
    they were given, without passwords."""

    model: str
    inputs: str
    checkpoint: str | None = None
    preprocessing: str | None = None
    batch_axes: dict[str, int | None] = Field(default={})


class VersionSize(Record):
    """The size of a version at its promotion, with all files in its folder."""

    size_bytes: NonNegativeInt
    files: NonNegativeInt

    @property
    def most_bytes(self) -> int:
        """Return the largest size that the version may have now."""
        return self.size_bytes + _MORE_BYTES

    def check(self, size_bytes: int, files: int) -> None:
        """Raise TooLarge where there is far more now than this."""
        if size_bytes > self.most_bytes:
            raise TooLarge(f"there are {size_bytes} bytes or more, expected {self.size_bytes}")
        if files > self.files + _MORE_FILES:
            raise TooLarge(f"there are {files} files and folders or more, expected {self.files}")


MAX_EXTENT = VersionSize(size_bytes=MAX_BYTES, files=_MAX_FILES)
"""Of what was promoted by a version of the gate that did not write it down."""
