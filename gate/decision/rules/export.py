"""Checks on what the export told: findings in the model's source, warnings, hazards.

There are rows only where there is something to say: a file without findings has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gate.decision.checks import CheckResult, Verdict
from gate.decision.remedies import REMEDIES
from gate.policy.policy import Policy
from gate.records.evidence import Evidence, ExportRecord
from gate.records.lint import LintFinding, LintLevel, at_least

_SHOWN = 3
_REFUSED: dict[str, tuple[LintLevel, ...]] = {
    "show": (),
    "refuse_errors": at_least("error"),
    "refuse_warnings": at_least("warning"),
}


def export_checks(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """One check for each kind of finding that is there."""
    section, record = policy.export_findings, evidence.export
    if record is None:
        if section.record == "required" and not evidence.subject.parts:  # each has its own
            explanation = "the evidence does not say how the file was exported."
            yield _check("record", verdict=Verdict.ERROR, explanation=explanation)
        return
    yield from _lint(_REFUSED[section.lint], record)
    if section.tracer_warnings == "refuse" and record.tracer_warnings:
        yield _refused("tracer_warnings", record.tracer_warnings)
    if section.hazards == "refuse" and record.hazards:
        yield _refused("hazards", record.hazards)


def _lint(refused: tuple[LintLevel, ...], record: ExportRecord) -> Iterator[CheckResult]:
    """A row for all findings; what a `# noqa` silences is counted and refuses nothing."""
    active = [finding for finding in record.lint if not finding.suppressed]
    bad = [finding for finding in active if finding.level in refused]
    if not record.lint:
        return
    yield _check(
        "lint",
        observed=float(len(bad)),
        verdict=Verdict.FAIL if bad else Verdict.PASS,
        explanation=_listed([_line(finding) for finding in bad or active])
        + _silenced(len(record.lint) - len(active)),
    )


def _line(finding: LintFinding) -> str:
    return f"{finding.code} {finding.level} at {finding.place} ({finding.expression})"


def _silenced(count: int) -> str:
    return f" {count} silenced by noqa." if count else ""


def _refused(name: str, lines: Sequence[str]) -> CheckResult:
    return _check(
        name, observed=float(len(lines)), verdict=Verdict.FAIL, explanation=_listed(lines)
    )


def _listed(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return f"{'; '.join(lines[:_SHOWN])}{more}." if lines else "Nothing that refuses the file."


def _check(
    name: str, *, verdict: Verdict, explanation: str, observed: float | None = None
) -> CheckResult:
    return CheckResult(
        name=f"export_{name}",
        observed=observed,
        bound=None if observed is None else 0.0,
        relation=None if observed is None else "<=",
        verdict=verdict,
        explanation=explanation,
        remedy=REMEDIES[f"export_{name}"],
    )
