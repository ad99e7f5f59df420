"""Checks in words, with their numbers: how much of its bound each has used, and why it has that."""

from __future__ import annotations

import math

from gate.decision.checks import CheckResult, Verdict
from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.story.meanings import ROUNDING, meaning_of
from gate.story.story import Word
from gate.story.wording import number, printable


def word(check: CheckResult, evidence: Evidence) -> Word:
    """One check in words, with why its bound is what it is here."""
    row = meaning_of(check.name)
    relative = check.name.startswith("probe_") and "relative_diff" in check.explanation
    return Word(
        check=check,
        meaning=row.meaning,
        formula=row.formula,
        unit="of the largest output" if relative else row.unit,
        why=_why(check, evidence, row.why),
        strain=strain(check),
    )


def words(decision: Decision, evidence: Evidence) -> tuple[Word, ...]:
    """All checks of the decision, in its order."""
    return tuple(word(check, evidence) for check in decision.checks)


def strain(check: CheckResult) -> float | None:
    """How much of its bound a check has used: 1 at the bound, infinite for what is no number.

    Of a share that must be large enough, its shortfall beside the one that is allowed. None: it has
    no number, or no bound.
    """
    value, bound = check.observed, check.bound
    if not isinstance(value, float) or not isinstance(bound, float):
        return None
    if not math.isfinite(value):
        return math.inf
    used, allowed = (1.0 - value, 1.0 - bound) if check.relation == ">=" and bound <= 1.0 else (
        (bound, value) if check.relation == ">=" else (value, bound)
    )  # fmt: skip
    if used <= 0.0:
        return 0.0
    return used / allowed if allowed > 0.0 else math.inf


def is_about_samples(check: CheckResult) -> bool:
    """Whether a check that holds says how many samples there are, and nothing of the file."""
    return check.verdict is Verdict.PASS and check.name in ("samples", "top1_lower_bound")


def measure(check: CheckResult) -> str:
    """What a check saw and what is allowed, in its unit: `33.7 × rounding, allowed 1.67`."""
    unit = meaning_of(check.name).unit
    if not isinstance(check.observed, float) or not isinstance(check.bound, float):
        return ""
    if unit is not None and unit.startswith("share of "):
        least = "at least " if check.relation == ">=" else ""
        return f"{_percent(check.observed)}, allowed {least}{_percent(check.bound)}"
    suffix = f" {ROUNDING}" if unit == ROUNDING and "relative_diff" not in check.explanation else ""
    return f"{number(check.observed)}{suffix}, allowed {number(check.bound)}"


def _percent(share: float) -> str:
    return f"{100.0 * share:.4g} %" if math.isfinite(share) else number(share)


def _why(check: CheckResult, evidence: Evidence, why: str) -> str:
    """The reason of the bound, with its widening for few elements in records of before."""
    if check.name != "noise_ratio" or check.runtime is None:
        return why
    runtime = evidence.runtime(check.runtime)
    outputs = runtime.outputs if runtime else ()
    noise = next((o.noise for o in outputs if o.name == check.output), None)
    if noise is None or not isinstance(check.bound, float):
        return why
    if noise.scatter is None and noise.elements:
        unwidened = check.bound / (1.0 + 2.0 / math.sqrt(noise.elements))
        wide = f"widened to {number(check.bound)} for {noise.elements} elements"
        return f"{why} {number(unwidened)}, {wide}."
    if noise.scatter is not None and noise.scatter > 1.0:
        elements = f"{noise.elements} elements"
        return printable(
            f"{why} Divided by {number(noise.scatter)}, as chance allows of {elements}."
        )
    return why
