"""Compare the new file with the champion."""

from __future__ import annotations

from collections.abc import Iterator

from gate.decision.bound_rules import BoundedMetric
from gate.decision.catalog import REMEDIES
from gate.decision.check_result import CheckResult, Verdict
from gate.policy.output_roles import class_metrics_for
from gate.policy.policy import Policy
from gate.policy.sections import ChampionPolicy
from gate.records.champion_comparison import ChampionComparison
from gate.records.evidence import Evidence

_LEFT = (
    "nobody here compared it with the version that serves: the service does, by its own policy and "
    "ledger, before anything serves (promotion: by_service)."
)


def check_champion(
    policy: Policy, evidence: Evidence, incumbent: ChampionComparison | None
) -> Iterator[CheckResult]:
    """Nothing where the policy does not ask; else first whether there is something to compare
    with, then what was compared."""
    section = policy.incumbent
    if section is None:
        return
    if incumbent is None and policy.promotion == "by_service":
        verdict, explanation = Verdict.WAIVED, _LEFT
    else:
        verdict, explanation = _standing(section, evidence, incumbent)
    yield CheckResult(
        name="incumbent",
        observed=None
        if incumbent is None
        else incumbent.version and f"version {incumbent.version}",
        samples=None if incumbent is None or not incumbent.samples else incumbent.samples,
        verdict=verdict,
        explanation=explanation,
        remedy=REMEDIES["incumbent"],
    )
    if incumbent is None or verdict is not Verdict.PASS or incumbent.state != "compared":
        return
    if incumbent.is_same_file:
        return
    if section.asks_for_answers:
        yield from _answers(policy, section, evidence, incumbent)
    if section.max_latency_ratio is not None:
        ratio, bound = incumbent.latency_ratio, section.max_latency_ratio
        metric = BoundedMetric("incumbent_latency_ratio", ratio, "<=", bound)
        timed = incumbent.latency
        yield _check(metric, samples=timed.batches if timed else 0, unit="batches")


def _standing(
    section: ChampionPolicy, evidence: Evidence, incumbent: ChampionComparison | None
) -> tuple[Verdict, str]:
    """Whether there is something to compare with."""
    if incumbent is not None and incumbent.state == "first":
        allowed = section.first_release == "allow"
        outcome = "the policy allows a first release" if allowed else "the policy refuses that"
        return Verdict.PASS if allowed else Verdict.FAIL, f"no version serves: {outcome}."
    problem = _problem(evidence, incumbent)
    if incumbent is None or problem is not None:
        return Verdict.ERROR, f"{problem}."
    if incumbent.is_same_file:
        return Verdict.PASS, f"version {incumbent.version}, which serves now, is this very file."
    return Verdict.PASS, f"compared with version {incumbent.version}, which serves now."


def _problem(evidence: Evidence, incumbent: ChampionComparison | None) -> str | None:
    """Why the comparison proves nothing about this file on these samples; None where it does."""
    if incumbent is None:
        return "nobody looked which version serves now, and how it compares"
    which = f"version {incumbent.version or '(unknown)'}, which serves now,"
    if incumbent.state != "compared":
        return f"{which} was not compared: {incumbent.absent or 'nobody says why'}"
    if incumbent.subject_sha256 != evidence.subject.sha256:
        return f"{which} was compared with another file: {incumbent.subject_sha256.short}"
    if None in (incumbent.version, incumbent.sha256, incumbent.evidence_sha256):
        return f"{which} is not named with the digests of its file and of its evidence"
    dataset = evidence.dataset
    same = (incumbent.data_sha256, incumbent.samples) == (dataset.sha256, dataset.samples)
    if not same and not incumbent.is_same_file:
        return (
            f"{which} was compared on other samples: {incumbent.samples} of "
            f"{incumbent.data_sha256.short}, the evidence is on {dataset.samples} of "
            f"{dataset.sha256.short}"
        )
    return None


def _answers(
    policy: Policy, section: ChampionPolicy, evidence: Evidence, incumbent: ChampionComparison
) -> Iterator[CheckResult]:
    """Two checks for each output that is judged as one of classes; what was not measured is an
    ERROR, as is a policy that asks for answers where no output has any."""
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
                yield _check(metric, samples=count, output=name)


def _check(
    metric: BoundedMetric, *, samples: int, output: str | None = None, unit: str = "samples"
) -> CheckResult:
    name, observed, relation, bound, _ = metric
    assert bound is not None
    if observed is None:
        verdict, outcome = Verdict.ERROR, "was not measured"
    else:
        verdict = Verdict.PASS if metric.holds() and samples > 0 else Verdict.FAIL
        outcome = f"is {observed:.6g}"
    return CheckResult(
        name=name,
        output=output,
        observed=observed,
        bound=bound,
        relation=relation,
        samples=samples,
        verdict=verdict,
        explanation=f"{name} {outcome}, allowed {relation} {bound:.6g} ({samples} {unit}).",
        remedy=REMEDIES[name],
    )
