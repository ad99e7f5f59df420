"""The result of one check: name, code, parameters, numbers, verdict."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from gate.records.runtime import RuntimeName
from gate.storage.record import Measured, Params, Record, added_field, as_json


class Verdict(StrEnum):
    """`WAIVED` only for checks: the policy says that this check does not refuse a file."""

    PASS = "PASS"
    FAIL = "FAIL"
    ERROR = "ERROR"
    WAIVED = "WAIVED"


def _as_number(value: Any) -> Any:
    """Return the float of a JSON string (`NaN`, `Infinity`), else the value unchanged."""
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


Observed = Annotated[Measured | str | None, BeforeValidator(_as_number)]


class CheckResult(Record):
    """The result of one check. It holds no text: `gate.summary.render` renders `code`."""

    name: str
    part: str | None = added_field(None)
    """Part of a release of several files. None: the whole release."""
    runtime: RuntimeName | None = None
    output: str | None = None
    point: str | None = added_field(None)
    """The operating point: `0.5`, or `0.7 of class 3`. For a metric its name and slice: `map50,
    camera=front`."""
    observed: Observed = None
    bound: Observed = None
    """The bound; `relation` is its direction."""
    relation: Literal["<=", ">=", "=="] | None = None
    samples: int | None = None
    verdict: Verdict
    code: str | None = added_field(None)
    """The finding: a key of `CheckSpec.codes` in `gate.decision.catalog`. None in records up to
    version 1.0, which have `explanation` and `remedy` instead."""
    params: Params = added_field({})
    """The values for the text of `code`. `problems` and `notes` are lists of `{"code": ...,
    ...}`."""
    explanation: str | None = added_field(None)
    remedy: str | None = added_field(None)

    def __hash__(self) -> int:
        return hash((self.title, self.verdict, self.code))

    @property
    def label(self) -> str:
        """The name with its operating point or its metric: `threshold_crossing at 0.5`,
        `metric_drop of map50, camera=front`."""
        preposition = "of" if self.name.startswith("metric") else "at"
        return f"{self.name} {preposition} {self.point}" if self.point else self.name

    @property
    def title(self) -> str:
        """`part / runtime / output / label`, without the parts that do not apply."""
        names = (self.part, self.runtime, self.output, self.label)
        return " / ".join(name for name in names if name)

    def with_code(
        self, code: str | None = None, verdict: Verdict | None = None, **params: Any
    ) -> CheckResult:
        """Return the check with another code or verdict, and more parameters."""
        update = {"code": code or self.code, "verdict": verdict or self.verdict}
        return self.model_copy(update=update | {"params": as_json({**self.params, **params})})


Problem = dict[str, Any]
"""One of several problems: `{"code": ..., parameters}`."""


def check_result(name: str, code: str, verdict: Verdict, /, **params: Any) -> CheckResult:
    """Return a check without a number."""
    return CheckResult(name=name, code=code, verdict=verdict, params=params)


def statement(
    name: str,
    problems: Sequence[Problem],
    *,
    verdict: Verdict = Verdict.FAIL,
    holds: str = "holds",
    **params: Any,
) -> CheckResult:
    """Return the check `violated` with this verdict; without problems, the passed check `holds`
    with these parameters."""
    if problems:
        return check_result(name, "violated", verdict, problems=problems)
    return check_result(name, holds, Verdict.PASS, **params)
