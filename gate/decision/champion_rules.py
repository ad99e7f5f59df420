"""Compare the new file with the champion."""

from __future__ import annotations

from collections.abc import Iterator

from gate.decision import metric_rules
from gate.decision.bound_rules import BoundedMetric, check_metric
from gate.decision.check_result import CheckResult, Problem, Verdict, check_result
from gate.policy.output_roles import class_metrics_for
from gate.policy.policy import Policy
from gate.policy.sections import ChampionPolicy
from gate.records.champion_comparison import ChampionComparison
from gate.records.evidence import Evidence


def check_champion(
    policy: Policy, evidence: Evidence, incumbent: ChampionComparison | None
) -> Iterator[CheckResult]:
    """Yield the checks against the champion if the policy requires them.

    The first check is whether a comparison is possible.
    """
    section = policy.incumbent
    if section is None:
        return
    if incumbent is None:
        by_service = policy.promotion == "by_service"
        verdict, code = Verdict.ERROR, "not_read"
        if by_service:
            verdict, code = Verdict.WAIVED, "left_to_service"
        yield check_result("incumbent", code, verdict)
        return
    check = _check_comparison(section, evidence, incumbent)
    version = incumbent.version and f"version {incumbent.version}"
    yield check.model_copy(update={"observed": version, "samples": incumbent.samples or None})
    if check.code != "compared":
        return
    yield from metric_rules.check_champion_metrics(policy, evidence, incumbent)
    if section.asks_for_answers:
        yield from _check_answers(policy, section, evidence, incumbent)
    if section.max_latency_ratio is not None:
        ratio, bound = incumbent.latency_ratio, section.max_latency_ratio
        metric = BoundedMetric("incumbent_latency_ratio", ratio, "<=", bound)
        timed = incumbent.latency
        yield check_metric(metric, samples=timed.batches if timed else 0)


def _check_comparison(
    section: ChampionPolicy, evidence: Evidence, incumbent: ChampionComparison
) -> CheckResult:
    """Check that there is a comparison, and that it is about this file and these samples."""
    if incumbent.state == "first":
        if section.first_release == "allow":
            return check_result("incumbent", "first_release_allowed", Verdict.PASS)
        return check_result("incumbent", "first_release_refused", Verdict.FAIL)
    params: Problem = {"version": incumbent.version or "unknown"}
    dataset, code = evidence.dataset, "no_digests"
    if incumbent.state != "compared":
        code = "not_compared"
        params["reason"] = (incumbent.absent or "no reason is recorded").rstrip(".")
    elif incumbent.subject_sha256 != evidence.subject.sha256:
        code = "other_file"
        params["sha256"] = incumbent.subject_sha256.short
    elif None not in (incumbent.version, incumbent.sha256, incumbent.evidence_sha256):
        if incumbent.is_same_file:
            return check_result("incumbent", "same_file", Verdict.PASS, **params)
        if (incumbent.data_sha256, incumbent.samples) == (dataset.sha256, dataset.samples):
            return check_result("incumbent", "compared", Verdict.PASS, **params)
        code = "other_samples"
        params |= {
            "champion_samples": incumbent.samples,
            "champion_data": incumbent.data_sha256.short,
            "file_samples": dataset.samples,
            "file_data": dataset.sha256.short,
        }
    return check_result("incumbent", code, Verdict.ERROR, **params)


def _check_answers(
    policy: Policy, section: ChampionPolicy, evidence: Evidence, incumbent: ChampionComparison
) -> Iterator[CheckResult]:
    """Yield two checks for each output of classes.

    ERROR if nothing was measured, and if the policy bounds answers but no output has any.
    """
    outputs = [output for runtime in evidence.runtimes for output in runtime.outputs]
    names = dict.fromkeys(o.name for o in outputs if class_metrics_for(policy, o) is not None)
    for name in names or (None,):
        answers = incumbent.answers(name) if name is not None else None
        drop = BoundedMetric(
            "incumbent_accuracy_drop",
            answers.accuracy_drop if answers else None,
            "<=",
            section.max_accuracy_drop,
            least=-1.0,
        )
        share = answers.agreement if answers else None
        agreement = BoundedMetric("incumbent_agreement", share, ">=", section.min_agreement)
        for metric in (drop, agreement):
            if metric.bound is not None:
                yield check_metric(metric, samples=answers.samples if answers else 0, output=name)
