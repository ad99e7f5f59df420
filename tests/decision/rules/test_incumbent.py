"""Worse or missing results in the comparison with the serving version never pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import Decision, Evidence, Policy, Verdict, decide
from gate.policy.sections import ChampionPolicy
from gate.records.champion_comparison import ChampionComparison
from gate.summary.render import render_check
from tests import builders

NAN, INF = math.nan, math.inf
BOUNDS = ChampionPolicy(max_accuracy_drop=0.01, min_agreement=0.98, max_latency_ratio=1.2)
METRICS = ("incumbent_accuracy_drop", "incumbent_agreement", "incumbent_latency_ratio")


def judge(incumbent: ChampionComparison | None, **section: Any) -> Decision:
    return judge_by(builders.policy(incumbent=BOUNDS.model_copy(update=section)), incumbent)


def judge_by(
    policy: Policy, incumbent: ChampionComparison | None, evidence: Evidence | None = None
) -> Decision:
    return decide(policy, evidence or builders.evidence(), incumbent=incumbent, decided_at="")


def comparison_with_answers(**fields: Any) -> ChampionComparison:
    good = builders.incumbent().outputs[0]
    return builders.incumbent(outputs=(good.model_copy(update=fields),))


def comparison_with_latency(side: str, median_ms: float) -> ChampionComparison:
    good = builders.incumbent().latency
    assert good is not None
    return builders.incumbent(**{side: good.model_copy(update={"median_ms": median_ms})})


def incumbent_verdicts(decision: Decision) -> dict[str, Verdict]:
    return {c.name: c.verdict for c in decision.checks if c.name.startswith("incumbent")}


def test_equal_version_passes_and_is_recorded():
    decision = judge(builders.incumbent())
    assert decision.passed
    assert incumbent_verdicts(decision) == dict.fromkeys(("incumbent", *METRICS), Verdict.PASS)
    assert decision.incumbent == builders.incumbent()
    assert Decision.from_json(decision.to_json()) == decision


def test_comparison_is_ignored_without_policy():
    with_comparison, without_comparison = (
        judge_by(builders.policy(), incumbent) for incumbent in (builders.incumbent(), None)
    )
    assert with_comparison == without_comparison
    assert incumbent_verdicts(with_comparison) == {}
    assert "incumbent" not in with_comparison.to_plain()


@pytest.mark.parametrize(("incumbent", "name", "verdict"), [
    (None, "incumbent", Verdict.ERROR),
    (builders.incumbent(state="unvouched", absent="no line"), "incumbent", Verdict.ERROR),
    (builders.incumbent(state="unrecorded", absent="none"), "incumbent", Verdict.ERROR),
    (builders.incumbent(state="incomparable", absent="other"), "incumbent", Verdict.ERROR),
    (builders.incumbent(subject_sha256=builders.digest("x")), "incumbent", Verdict.ERROR),
    (builders.incumbent(data_sha256=builders.digest("x")), "incumbent", Verdict.ERROR),
    (builders.incumbent(samples=399), "incumbent", Verdict.ERROR),
    (builders.incumbent(version=None), "incumbent", Verdict.ERROR),
    (builders.incumbent(sha256=None), "incumbent", Verdict.ERROR),
    (builders.incumbent(evidence_sha256=None), "incumbent", Verdict.ERROR),
    (builders.incumbent(outputs=()), "incumbent_agreement", Verdict.ERROR),
    (comparison_with_answers(name="other"), "incumbent_agreement", Verdict.ERROR),
    (comparison_with_answers(disagreements=None), "incumbent_agreement", Verdict.ERROR),
    (comparison_with_answers(disagreements=9), "incumbent_agreement", Verdict.FAIL),
    (comparison_with_answers(disagreements=500), "incumbent_agreement", Verdict.FAIL),
    (comparison_with_answers(samples=0, disagreements=0), "incumbent_agreement", Verdict.FAIL),
    (comparison_with_answers(accuracy=None), "incumbent_accuracy_drop", Verdict.ERROR),
    (comparison_with_answers(champion_accuracy=None), "incumbent_accuracy_drop", Verdict.ERROR),
    (comparison_with_answers(accuracy=0.95), "incumbent_accuracy_drop", Verdict.FAIL),
    (comparison_with_answers(accuracy=NAN), "incumbent_accuracy_drop", Verdict.FAIL),
    (comparison_with_answers(accuracy=INF), "incumbent_accuracy_drop", Verdict.FAIL),
    (comparison_with_answers(accuracy=1.01), "incumbent_accuracy_drop", Verdict.FAIL),
    (comparison_with_answers(champion_accuracy=NAN), "incumbent_accuracy_drop", Verdict.FAIL),
    (comparison_with_answers(champion_accuracy=-1.0), "incumbent_accuracy_drop", Verdict.FAIL),
    (comparison_with_latency("latency", 24.1), "incumbent_latency_ratio", Verdict.FAIL),
    (comparison_with_latency("latency", NAN), "incumbent_latency_ratio", Verdict.FAIL),
    (comparison_with_latency("latency", 0.0), "incumbent_latency_ratio", Verdict.FAIL),
    (comparison_with_latency("champion_latency", 0.0), "incumbent_latency_ratio", Verdict.FAIL),
    (comparison_with_latency("champion_latency", INF), "incumbent_latency_ratio", Verdict.FAIL),
    (builders.incumbent(latency=None), "incumbent_latency_ratio", Verdict.ERROR),
    (builders.incumbent(champion_latency=None), "incumbent_latency_ratio", Verdict.ERROR),
])  # fmt: skip
def test_worse_or_missing_comparison_never_passes(incumbent, name, verdict):
    decision = judge(incumbent)
    assert not decision.passed
    problems = {check.name: check for check in decision.problems}
    assert problems[name].verdict is verdict
    assert render_check(problems[name], "remedy")
    assert "None" not in render_check(problems[name])


@pytest.mark.parametrize(
    ("allowed", "verdict"), [("allow", Verdict.PASS), ("refuse", Verdict.FAIL)]
)
def test_first_release_follows_the_policy(allowed, verdict):
    good = builders.incumbent()
    first_release = ChampionComparison(
        state="first", subject_sha256=good.subject_sha256, data_sha256=good.data_sha256
    )
    decision = judge(first_release, first_release=allowed)
    assert incumbent_verdicts(decision) == {"incumbent": verdict}
    assert decision.verdict is verdict


def test_serving_file_is_not_compared_with_itself():
    """Pass without comparison, because two latency measurements of one file may differ."""
    same = builders.incumbent(sha256=builders.digest("model.onnx"), outputs=(), latency=None)
    assert incumbent_verdicts(judge(same)) == {"incumbent": Verdict.PASS}
    untimed = builders.incumbent(latency=None)
    decision = judge(untimed, max_latency_ratio=None, min_agreement=None)
    assert set(incumbent_verdicts(decision)) == {"incumbent", "incumbent_accuracy_drop"}
    assert decision.passed


def test_agreement_without_class_output_is_an_error():
    fields = {"incumbent": ChampionPolicy(min_agreement=0.9), "outputs": {"logits": "scores"}}
    policy = Policy.default(task="auto").model_copy(update=fields)
    decision = judge_by(policy, builders.incumbent())
    assert incumbent_verdicts(decision)["incumbent_agreement"] is Verdict.ERROR


shares = st.floats(0.0, 1.0) | st.just(NAN)
times = st.floats(0.0, 1e6) | st.just(NAN) | st.just(INF)


@given(st.integers(0, 400), shares, times, st.integers(0, 400), shares, times)
def test_worse_comparison_never_turns_fail_into_pass(d, accuracy, ms, more, less, slower):
    def make_comparison(disagreements: int, accuracy: float, ms: float) -> ChampionComparison:
        good = comparison_with_answers(disagreements=disagreements, accuracy=accuracy)
        return good.model_copy(update={"latency": comparison_with_latency("latency", ms).latency})

    if judge(make_comparison(d, accuracy, ms)).passed:
        return
    worse = make_comparison(
        max(d, more),
        accuracy if math.isnan(accuracy) else NAN if math.isnan(less) else min(accuracy, less),
        # A time of zero is not a measurement and fails like the longest time.
        ms if not ms > 0.0 else NAN if math.isnan(slower) else max(ms, slower),
    )
    assert not judge(worse).passed


def test_second_class_output_must_be_compared():
    good = builders.incumbent()
    more = builders.output_parity(name="more")
    evidence = builders.with_outputs(builders.output_parity(), more)
    policy = builders.policy(incumbent=BOUNDS)
    decision = judge_by(policy, good, evidence)
    assert {c.output for c in decision.problems} == {"more"}
    answers = good.outputs[0].model_copy(update={"name": "more"})
    with_both_outputs = builders.incumbent(outputs=(*good.outputs, answers))
    assert judge_by(policy, with_both_outputs, evidence).passed


def test_comparison_is_waived_only_when_the_service_promotes():
    for promotion, verdict in (("by_service", Verdict.WAIVED), ("direct", Verdict.ERROR)):
        decision = judge_by(builders.policy(incumbent=BOUNDS, promotion=promotion), None)
        assert incumbent_verdicts(decision) == {"incumbent": verdict}
        assert decision.passed == (verdict is Verdict.WAIVED)
    # An existing comparison is always checked, also if the service promotes.
    policy = builders.policy(incumbent=BOUNDS, promotion="by_service")
    assert not judge_by(policy, comparison_with_answers(accuracy=0.5)).passed
    assert not judge_by(policy, builders.incumbent(state="unvouched", outputs=())).passed
