"""The result of one check: name, code, parameters, numbers, verdict."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from gate.records.runtime import RuntimeName
from gate.storage.record import Measured, Record, added_field


class Verdict(StrEnum):
    """`WAIVED` only for checks: the policy says in words that it may be left out."""

    PASS = "PASS"
    FAIL = "FAIL"
    ERROR = "ERROR"
    WAIVED = "WAIVED"


def _as_number(value: Any) -> Any:
    """What JSON can't write as a number is a word there, and a number again here."""
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


Observed = Annotated[Measured | str | None, BeforeValidator(_as_number)]


CheckCode = Literal["beyond_range", "undefined", "cpu_optimized"]


class CheckResult(Record):
    """One check: what was seen, what was allowed, on how many samples, and what to try."""

    name: str
    part: str | None = added_field(None)
    """Of a release of several files; None: of the file, or of all together."""
    runtime: RuntimeName | None = None
    output: str | None = None
    point: str | None = added_field(None)
    """The operating point that it is for: `0.5`, or `0.7 of class 3`."""
    observed: Observed = None
    bound: Observed = None
    """With its direction in `relation`."""
    relation: Literal["<=", ">=", "=="] | None = None
    samples: int | None = None
    verdict: Verdict
    explanation: str
    remedy: str | None = None
    code: CheckCode | None = added_field(None)
    """The reason of a difference on a probe or of a fallback. `beyond_range`: the file breaks only
    far beyond the samples' values (`instruments.probe_beyond_range`). `undefined`: ONNX leaves the
    result of an operator open on this input. `cpu_optimized`: ONNX Runtime optimized the file for
    the CPU before it was judged."""

    @property
    def label(self) -> str:
        """The name with its operating point: `threshold_crossing at 0.5`."""
        return f"{self.name} at {self.point}" if self.point else self.name

    @property
    def title(self) -> str:
        """`part / runtime / output / label`, without what does not apply."""
        places = (self.part, self.runtime, self.output, self.label)
        return " / ".join(place for place in places if place)
