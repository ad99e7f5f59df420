"""Export warnings, lint findings, preprocessing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gate.decision.bound_rules import BoundedMetric, check_metric
from gate.decision.check_result import CheckResult, Problem, Verdict, check_result, statement
from gate.policy.policy import Policy
from gate.policy.sections import PreprocessingPolicy
from gate.records.evidence import Evidence, ExportRecord
from gate.records.export import LintLevel, at_least
from gate.records.preprocessing import ConsumerParity, PreprocessingParity

# A file without findings has no rows.


_REFUSED: dict[str, tuple[LintLevel, ...]] = {
    "show": (),
    "refuse_errors": at_least("error"),
    "refuse_warnings": at_least("warning"),
}


def check_export(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """Yield one check for each kind of finding that occurs."""
    section, record = policy.export_findings, evidence.export
    if record is None:
        if section.record == "required" and not evidence.subject.parts:  # each has its own
            yield check_result("export_record", "no_record", Verdict.ERROR)
        return
    if record.lint:
        yield _check_lint(_REFUSED[section.lint], record)
    if section.tracer_warnings == "refuse" and record.tracer_warnings:
        yield _findings("tracer_warnings", record.tracer_warnings, len(record.tracer_warnings))
    if section.hazards == "refuse" and record.hazards:
        yield _findings("hazards", record.hazards, len(record.hazards))


def _check_lint(refused: tuple[LintLevel, ...], record: ExportRecord) -> CheckResult:
    """Return one check for all findings. Those that `# noqa` silences are only counted."""
    active = [finding for finding in record.lint if not finding.suppressed]
    bad = [finding for finding in active if finding.level in refused]
    lines = [f"{f.code} {f.level} at {f.location} ({f.expression})" for f in bad or active]
    check = _findings("lint", lines, len(bad))
    silenced = len(record.lint) - len(active)
    return check.with_code(notes=[{"code": "silenced", "count": silenced}]) if silenced else check


def _findings(name: str, lines: Sequence[str], count: int) -> CheckResult:
    """Return the check on these findings, of which `count` refuse the file."""
    check = check_metric(BoundedMetric(f"export_{name}", float(count), "<=", 0.0), samples=None)
    if not lines:
        return check.with_code("no_findings")
    return check.with_code("findings", lines=[line.rstrip(".") for line in lines])


# Missing evidence that the policy requires is an ERROR. Only an implementation that can't run on
# the measuring machine may be waived (`when_present`).


def check_preprocessing(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """Yield a check of the measurement, then of each consumer; nothing if not required."""
    section, recorded = policy.preprocessing, evidence.preprocessing
    if section is None:
        return
    yield _check_measurement(section, evidence, recorded)
    if recorded is None:
        return
    for name in section.consumers:
        records = [consumer for consumer in recorded.consumers if consumer.consumer == name]
        if len(records) == 1:
            yield from _check_consumer(section, records[0], recorded)
        else:
            params: Problem = {"consumer": name, "count": len(records)}
            yield check_result(f"preprocessing_{name}", "recorded_times", Verdict.ERROR, **params)


def _check_measurement(
    section: PreprocessingPolicy, evidence: Evidence, recorded: PreprocessingParity | None
) -> CheckResult:
    """Check that it was measured for this model's spec, against the training side, on enough
    pictures."""
    problems: list[Problem] = []
    if recorded is None:
        problems.append({"code": "preprocessing_unmeasured"})
        return statement("preprocessing", problems, verdict=Verdict.ERROR)
    trained = evidence.source.preprocess_sha256
    if trained is None:
        problems.append({"code": "no_preprocessing"})
    elif trained != recorded.spec_sha256:
        problems.append({"code": "other_spec"})
    if recorded.reference != section.training_side:
        measured, expected = recorded.reference, section.training_side
        problems.append({"code": "other_reference", "measured": measured, "wanted": expected})
    inputs = ((spec.dtype, spec.shape) for spec in evidence.subject.inputs)
    if not recorded.tensor:
        problems.append({"code": "no_tensor"})
    elif (misfit := recorded.tensor.misfit(inputs)) is not None:
        problems.append({"code": "misfit", "detail": misfit})
    if section.max_flips is not None and recorded.model_sha256 != evidence.subject.sha256:
        problems.append({"code": "other_model"})
    distinct = min(recorded.distinct, recorded.images)
    if distinct < section.min_images:
        required = section.min_images
        problems.append({"code": "few_pictures", "count": distinct, "required": required})
    return statement("preprocessing", problems, verdict=Verdict.ERROR, images=recorded.distinct)


def _check_consumer(
    section: PreprocessingPolicy, record: ConsumerParity, recorded: PreprocessingParity
) -> Iterator[CheckResult]:
    name, params = f"preprocessing_{record.consumer}", {"consumer": record.consumer}
    if record.incapable is not None:
        reason = record.incapable
        yield check_result(name, "unsupported", Verdict.ERROR, **params, reason=reason)
        return
    if record.unavailable is not None:
        measured = record.images or record.max_diff is not None or record.failure
        waived = section.required == "when_present" and not measured
        verdict, reason = Verdict.WAIVED if waived else Verdict.ERROR, record.unavailable
        yield check_result(name, "unavailable", verdict, **params, reason=reason)
        return
    passed = record.within(section.max_diff) and record.images == recorded.images
    verdict = Verdict.PASS if passed else Verdict.FAIL
    metric = BoundedMetric(name, record.max_diff, "<=", section.max_diff)
    check = check_metric(metric, samples=record.images, params=params)
    yield _with_comparison(check, record, recorded).with_code(verdict=verdict)
    if section.max_flips is not None:
        yield _check_flips(section.max_flips, record)


def _with_comparison(
    check: CheckResult, record: ConsumerParity, recorded: PreprocessingParity
) -> CheckResult:
    """Return the check with the code of a comparison, and its parameters."""
    if record.failure is not None:
        return check.with_code("failed", failure=record.failure)
    if record.mismatched:
        return check.with_code("wrong_shape", detail=record.mismatched[0])
    if record.images != recorded.images or record.max_diff is None:
        return check.with_code("incomplete", images=recorded.images)
    if record.nonfinite:
        return check.with_code("nonfinite", count=record.nonfinite)
    notes = [{"code": "causes", "causes": record.causes}]
    return check.with_code(notes=notes) if record.causes else check


def _check_flips(allowed: float, record: ConsumerParity) -> CheckResult:
    name, decisions = f"preprocessing_flips_{record.consumer}", record.decisions
    if decisions is None or decisions.images != record.images or not decisions.images:
        return check_result(name, "unmeasured", Verdict.ERROR, consumer=record.consumer)
    share, most = decisions.flips / decisions.images, decisions.confidence_diff_max
    params = {"consumer": record.consumer, "flips": decisions.flips, "confidence": most}
    metric = BoundedMetric(name, share, "<=", allowed)
    check = check_metric(metric, samples=decisions.images, params=params)
    if math.isfinite(most) and math.isfinite(decisions.confidence_diff_mean):
        return check
    return check.with_code("beyond", Verdict.FAIL)
