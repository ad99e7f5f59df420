"""Export warnings, lint findings, preprocessing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from gate.decision.check_result import CheckResult, Problem, Verdict, statement
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
            yield CheckResult(name="export_record", verdict=Verdict.ERROR, code="no_record")
        return
    yield from _check_lint(_REFUSED[section.lint], record)
    if section.tracer_warnings == "refuse" and record.tracer_warnings:
        yield _findings("tracer_warnings", record.tracer_warnings)
    if section.hazards == "refuse" and record.hazards:
        yield _findings("hazards", record.hazards)


def _check_lint(refused: tuple[LintLevel, ...], record: ExportRecord) -> Iterator[CheckResult]:
    """Yield one check for all findings. Those that `# noqa` silences are only counted."""
    active = [finding for finding in record.lint if not finding.suppressed]
    bad = [finding for finding in active if finding.level in refused]
    if not record.lint:
        return
    check = _findings(
        "lint",
        [
            f"{finding.code} {finding.level} at {finding.location} ({finding.expression})"
            for finding in bad or active
        ],
        count=len(bad),
    )
    silenced = len(record.lint) - len(active)
    notes = [{"code": "silenced", "count": silenced}] if silenced else []
    yield check.with_code(check.code or "", notes=notes) if notes else check


def _findings(name: str, lines: Sequence[str], *, count: int | None = None) -> CheckResult:
    """Return the check on these findings, of which `count` (default: all) refuse the file."""
    count = len(lines) if count is None else count
    return CheckResult(
        name=f"export_{name}",
        observed=float(count),
        bound=0.0,
        relation="<=",
        verdict=Verdict.FAIL if count else Verdict.PASS,
        code="findings" if lines else "no_findings",
        params={"lines": [line.rstrip(".") for line in lines]} if lines else {},
    )


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
            yield _preprocessing_check(name, Verdict.ERROR, "recorded_times", count=len(records))


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
    name = record.consumer
    if record.incapable is not None:
        reason = record.incapable
        yield _preprocessing_check(name, Verdict.ERROR, "unsupported", reason=reason)
        return
    if record.unavailable is not None:
        measured = record.images or record.max_diff is not None or record.failure
        waived = section.required == "when_present" and not measured
        yield _preprocessing_check(
            name,
            Verdict.WAIVED if waived else Verdict.ERROR,
            "unavailable_waived" if waived else "unavailable",
            reason=record.unavailable,
        )
        return
    passed = record.within(section.max_diff) and record.images == recorded.images
    code, params = _comparison_code(record, recorded, passed=passed)
    check = _preprocessing_check(name, Verdict.PASS if passed else Verdict.FAIL, code, **params)
    yield _with_numbers(check, record.max_diff, section.max_diff, record.images)
    if section.max_flips is not None:
        yield _check_flips(section.max_flips, record)


def _comparison_code(
    record: ConsumerParity, recorded: PreprocessingParity, *, passed: bool
) -> tuple[str, Problem]:
    """Return the code of a comparison, with its parameters."""
    if record.failure is not None:
        return "failed", {"failure": record.failure}
    if record.mismatched:
        return "wrong_shape", {"detail": record.mismatched[0]}
    if record.images != recorded.images or record.max_diff is None:
        return "incomplete", {"images": recorded.images}
    if record.nonfinite:
        return "nonfinite", {"count": record.nonfinite}
    causes = {"notes": [{"code": "causes", "causes": record.causes}]} if record.causes else {}
    return "within" if passed else "beyond", causes


def _check_flips(allowed: float, record: ConsumerParity) -> CheckResult:
    name, decisions = record.consumer, record.decisions
    if decisions is None or decisions.images != record.images or not decisions.images:
        return _preprocessing_check(name, Verdict.ERROR, "unmeasured", kind="flips_")
    share = decisions.flips / decisions.images
    moved = (decisions.confidence_diff_max, decisions.confidence_diff_mean)
    passed = share <= allowed and all(math.isfinite(value) for value in moved)
    check = _preprocessing_check(
        name,
        Verdict.PASS if passed else Verdict.FAIL,
        "within" if passed else "beyond",
        kind="flips_",
        flips=decisions.flips,
        confidence=decisions.confidence_diff_max,
    )
    return _with_numbers(check, share, allowed, decisions.images)


def _preprocessing_check(
    consumer: str, verdict: Verdict, code: str, *, kind: str = "", **params: Any
) -> CheckResult:
    return CheckResult(
        name=f"preprocessing_{kind}{consumer}",
        verdict=verdict,
        code=code,
        params={"consumer": consumer, **params},
    )


def _with_numbers(
    check: CheckResult, observed: float | None, bound: float, samples: int
) -> CheckResult:
    numbers = {"observed": observed, "bound": bound, "relation": "<=", "samples": samples}
    return check.model_copy(update=numbers)
