"""Export warnings, lint findings, preprocessing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gate.decision.catalog import REMEDIES
from gate.decision.check_result import CheckResult, Verdict
from gate.policy.policy import Policy
from gate.policy.sections import PreprocessingPolicy
from gate.records.evidence import Evidence, ExportRecord
from gate.records.export import LintFinding, LintLevel, at_least
from gate.records.preprocessing import ConsumerParity, PreprocessingParity

# There are rows only where there is something to say: a file without findings has none.


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
            yield _export_check("record", verdict=Verdict.ERROR, explanation=explanation)
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
    yield _export_check(
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
    return _export_check(
        name, observed=float(len(lines)), verdict=Verdict.FAIL, explanation=_listed(lines)
    )


def _listed(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return f"{'; '.join(lines[:_SHOWN])}{more}." if lines else "Nothing that refuses the file."


def _export_check(
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


# What the policy demands and the evidence lacks is an ERROR; only an implementation that can't run
# on the measuring machine may be waived, where the policy says `when_present`.


def parity(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """One check of the measurement as a whole, then of each consumer; none if nothing is asked."""
    section, recorded = policy.preprocessing, evidence.preprocessing
    if section is None:
        return
    yield _measured(section, evidence, recorded)
    if recorded is None:
        return
    for name in section.consumers:
        records = [consumer for consumer in recorded.consumers if consumer.consumer == name]
        if len(records) == 1:
            yield from _consumer(section, records[0], recorded)
        else:
            explanation = f"{name} is recorded {len(records)} times, expected once."
            yield _preprocessing_check(name, verdict=Verdict.ERROR, explanation=explanation)


def _measured(
    section: PreprocessingPolicy, evidence: Evidence, recorded: PreprocessingParity | None
) -> CheckResult:
    """It was measured, for this model's spec, against the training side, on enough pictures."""
    problems = []
    if recorded is None:
        problems.append("the policy asks for parity of preprocessing, and it was not measured")
    else:
        trained = evidence.source.preprocess_sha256
        if trained is None:
            problems.append("the evidence does not say which preprocessing the model has")
        elif trained != recorded.spec_sha256:
            problems.append("another spec was measured than the model has")
        if recorded.reference != section.training_side:
            problems.append(f"{recorded.reference} was the reference, not {section.training_side}")
        inputs = ((spec.dtype, spec.shape) for spec in evidence.subject.inputs)
        misfit = (
            recorded.tensor.misfit(inputs)
            if recorded.tensor
            else "what the spec makes is not recorded"
        )
        if misfit is not None:
            problems.append(misfit)
        if section.max_flips is not None and recorded.model_sha256 != evidence.subject.sha256:
            problems.append("the answers are of another file than the one that is judged")
        distinct = min(recorded.distinct, recorded.images)
        if distinct < section.min_images:
            problems.append(
                f"{distinct} distinct pictures, at least {section.min_images} are asked for"
            )
    fine = (
        f"Measured for the model's spec on {recorded.distinct} distinct pictures."
        if recorded
        else ""
    )
    return CheckResult(
        name="preprocessing",
        verdict=Verdict.ERROR if problems else Verdict.PASS,
        explanation="; ".join(problems) + "." if problems else fine,
        remedy=REMEDIES["preprocessing"],
    )


def _consumer(
    section: PreprocessingPolicy, record: ConsumerParity, recorded: PreprocessingParity
) -> Iterator[CheckResult]:
    name = record.consumer
    if record.incapable is not None:
        explanation = f"{name} can't do the spec on any machine: {record.incapable}"
        yield _preprocessing_check(name, verdict=Verdict.ERROR, explanation=explanation)
        return
    if record.unavailable is not None:
        measured = record.images or record.max_diff is not None or record.failure
        waived = section.required == "when_present" and not measured
        explanation = f"{name} was not measured: {record.unavailable}"
        yield _preprocessing_check(
            name, verdict=Verdict.WAIVED if waived else Verdict.ERROR, explanation=explanation
        )
        return
    whole = record.images == recorded.images
    within = record.within(section.max_diff)
    yield _preprocessing_check(
        name,
        verdict=Verdict.PASS if within and whole else Verdict.FAIL,
        explanation=_difference(section, record, recorded),
        numbers=(record.max_diff, section.max_diff, record.images),
    )
    if section.max_flips is not None:
        yield _flips(section.max_flips, record)


def _difference(
    section: PreprocessingPolicy, record: ConsumerParity, recorded: PreprocessingParity
) -> str:
    if record.failure is not None:
        return f"it failed: {record.failure}"
    if record.mismatched:
        return f"another shape or dtype: {record.mismatched[0]}"
    if record.images != recorded.images or record.max_diff is None:
        return f"{record.images} of {recorded.images} pictures were compared."
    if record.nonfinite:
        return f"{record.nonfinite} values are NaN or infinite."
    causes = f" Cause: {'; '.join(record.causes)}." if record.causes else ""
    return (
        f"the largest difference is {record.max_diff:.6g}/255, allowed <= {section.max_diff:.6g} "
        f"(n = {record.images}).{causes}"
    )


def _flips(allowed: float, record: ConsumerParity) -> CheckResult:
    name, decisions = f"flips_{record.consumer}", record.decisions
    if decisions is None or decisions.images != record.images or not decisions.images:
        explanation = "the answers on these pictures were not compared."
        return _preprocessing_check(name, verdict=Verdict.ERROR, explanation=explanation)
    share = decisions.flips / decisions.images
    moved = (decisions.confidence_diff_max, decisions.confidence_diff_mean)
    passed = share <= allowed and all(math.isfinite(value) for value in moved)
    return _preprocessing_check(
        name,
        verdict=Verdict.PASS if passed else Verdict.FAIL,
        explanation=f"{decisions.flips} of {decisions.images} answers flip, and the confidence "
        f"moves by at most {decisions.confidence_diff_max:.3g}.",
        numbers=(share, allowed, decisions.images),
    )


def _preprocessing_check(
    name: str,
    *,
    verdict: Verdict,
    explanation: str,
    numbers: tuple[float | None, float, int] | None = None,
) -> CheckResult:
    """`numbers`: observed, bound, samples."""
    observed, bound, samples = numbers or (None, None, None)
    kind = "flips" if name.startswith("flips_") else "diff"
    return CheckResult(
        name=f"preprocessing_{name}",
        observed=observed,
        bound=bound,
        relation=None if bound is None else "<=",
        samples=samples,
        verdict=verdict,
        explanation=explanation,
        remedy=REMEDIES[f"preprocessing_{kind}"],
    )
