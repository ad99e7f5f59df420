"""Compare the new file with the champion."""

from __future__ import annotations

from collections.abc import Iterator

from gate.decision import metric_rules
from gate.decision.bound_rules import BoundedMetric, check_metric
from gate.decision.check_result import CheckResult, Problem, Verdict
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
    if incumbent is None and policy.promotion == "by_service":
        state: tuple[Verdict, str, Problem] = (Verdict.WAIVED, "left_to_service", {})
    else:
        state = _comparison_state(section, evidence, incumbent)
    verdict, code, params = state
    yield CheckResult(
        name="incumbent",
        observed=None
        if incumbent is None
        else incumbent.version and f"version {incumbent.version}",
        samples=None if incumbent is None or not incumbent.samples else incumbent.samples,
        verdict=verdict,
        code=code,
        params=params,
    )
    if incumbent is None or verdict is not Verdict.PASS or incumbent.state != "compared":
        return
    if incumbent.is_same_file:
        return
    yield from metric_rules.check_champion_metrics(policy, evidence, incumbent)
    if section.asks_for_answers:
        yield from _check_answers(policy, section, evidence, incumbent)
    if section.max_latency_ratio is not None:
        ratio, bound = incumbent.latency_ratio, section.max_latency_ratio
        metric = BoundedMetric("incumbent_latency_ratio", ratio, "<=", bound)
        timed = incumbent.latency
        yield check_metric(metric, samples=timed.batches if timed else 0)


def _comparison_state(
    section: ChampionPolicy, evidence: Evidence, incumbent: ChampionComparison | None
) -> tuple[Verdict, str, Problem]:
    """Return whether there is something to compare with: verdict, code, parameters."""
    if incumbent is None:
        return Verdict.ERROR, "not_read", {}
    if incumbent.state == "first":
        allowed = section.first_release == "allow"
        verdict = Verdict.PASS if allowed else Verdict.FAIL
        return verdict, f"first_release_{'allowed' if allowed else 'refused'}", {}
    params: Problem = {"version": incumbent.version or "unknown"}
    code = _problem(evidence, incumbent)
    if code == "not_compared":
        params["reason"] = (incumbent.absent or "no reason is recorded").rstrip(".")
    elif code == "other_file":
        params["sha256"] = incumbent.subject_sha256.short
    elif code == "other_samples":
        params |= {
            "champion_samples": incumbent.samples,
            "champion_data": incumbent.data_sha256.short,
            "file_samples": evidence.dataset.samples,
            "file_data": evidence.dataset.sha256.short,
        }
    if code is not None:
        return Verdict.ERROR, code, params
    return Verdict.PASS, "same_file" if incumbent.is_same_file else "compared", params


def _problem(evidence: Evidence, incumbent: ChampionComparison) -> str | None:
    """Return the code of the reason why the comparison is not about this file and these samples, or
    None."""
    if incumbent.state != "compared":
        return "not_compared"
    if incumbent.subject_sha256 != evidence.subject.sha256:
        return "other_file"
    if None in (incumbent.version, incumbent.sha256, incumbent.evidence_sha256):
        return "no_digests"
    dataset = evidence.dataset
    same = (incumbent.data_sha256, incumbent.samples) == (dataset.sha256, dataset.samples)
    return None if same or incumbent.is_same_file else "other_samples"


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
        drop, agreement = (
            (answers.accuracy_drop, answers.agreement) if answers is not None else (None, None)
        )
        count = 0 if answers is None else answers.samples
        for metric in (
            BoundedMetric(
                "incumbent_accuracy_drop", drop, "<=", section.max_accuracy_drop, least=-1.0
            ),
            BoundedMetric("incumbent_agreement", agreement, ">=", section.min_agreement),
        ):
            if metric.bound is not None:
                yield check_metric(metric, samples=count, output=name)
