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
    """Return the float that JSON has as a word (`NaN`, `Infinity`), else the value."""
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


Observed = Annotated[Measured | str | None, BeforeValidator(_as_number)]


class CheckResult(Record):
    """The result of one check. It has no sentence: `gate.summary.render` renders `code`."""

    name: str
    part: str | None = added_field(None)
    """Part of a release of several files; None: the check is about the whole release."""
    runtime: RuntimeName | None = None
    output: str | None = None
    point: str | None = added_field(None)
    """The operating point that it is for: `0.5`, or `0.7 of class 3`. Of a metric its name, and its
    slice: `map50, camera=front`."""
    observed: Observed = None
    bound: Observed = None
    """With its direction in `relation`."""
    relation: Literal["<=", ">=", "=="] | None = None
    samples: int | None = None
    verdict: Verdict
    code: str | None = added_field(None)
    """What was found: a key of `CheckSpec.codes` in `gate.decision.catalog`. None: a record of
    version 1.0 or older, which has `explanation` and `remedy` instead."""
    params: Params = added_field({})
    """The values that the text of `code` names. `problems` and `notes` are lists of
    `{"code": ..., ...}`."""
    explanation: str | None = added_field(None)
    remedy: str | None = added_field(None)

    def __hash__(self) -> int:
        return hash((self.title, self.verdict, self.code))

    @property
    def label(self) -> str:
        """The name with its operating point or its metric: `threshold_crossing at 0.5`,
        `metric_drop of map50, camera=front`."""
        word = "of" if self.name.startswith("metric") else "at"
        return f"{self.name} {word} {self.point}" if self.point else self.name

    @property
    def title(self) -> str:
        """`part / runtime / output / label`, without what does not apply."""
        places = (self.part, self.runtime, self.output, self.label)
        return " / ".join(place for place in places if place)

    def with_code(self, code: str, verdict: Verdict | None = None, **params: Any) -> CheckResult:
        """Return the check with another code, and more parameters."""
        update = {"code": code, "verdict": verdict or self.verdict}
        return self.model_copy(update=update | {"params": as_json({**self.params, **params})})


Problem = dict[str, Any]
"""One of several things that are wrong: `{"code": ..., parameters}`."""


def statement(
    name: str,
    problems: Sequence[Problem],
    *,
    verdict: Verdict = Verdict.FAIL,
    place: tuple[RuntimeName | None, str | None] = (None, None),
    point: str | None = None,
    holds: str = "holds",
    **params: Any,
) -> CheckResult:
    """Return a check without a number. It holds if there are no problems, with the code `holds`
    and these parameters. `place`: runtime and output."""
    return CheckResult(
        name=name,
        runtime=place[0],
        output=place[1],
        point=point,
        verdict=verdict if problems else Verdict.PASS,
        code="violated" if problems else holds,
        params={"problems": problems} if problems else params,
    )
