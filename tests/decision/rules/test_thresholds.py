"""Checks at operating points: what crosses, what was not measured, and what can't be true."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import bdtr, bdtrc

from gate import CheckResult, Decision, Evidence, Verdict, decide
from gate.decision.bound_rules import (
    BoundedMetric,
    agreement_lower_bound,
    crossing_upper_bound,
    samples_needed,
)
from gate.policy.sections import RuntimePolicy
from gate.records.evidence import TensorSpec
from gate.records.outputs import LISTED, Crossing
from gate.summary.render import render_check
from tests import builders
from tests.builders import SAMPLES, class_parity, output_parity, runtime_evidence

NAMES = ("threshold_crossing", "threshold_crossing_bound")


def crossing(crossed: int = 0, **overrides: Any) -> Crossing:
    """At 0.5: half of the samples are above on both sides, these in the reference alone."""
    fields: dict[str, Any] = {
        "threshold": 0.5,
        "samples": SAMPLES,
        "reference_above": 200 + crossed,
        "candidate_above": 200,
        "crossed": crossed,
        "crossing": tuple(range(min(crossed, LISTED))),
    }
    return Crossing(**fields | overrides)


def policy(share: float | None = 0.01, upper: float | None = 0.05, **overrides: Any):
    plain = builders.policy()
    runtimes = {
        name: RuntimePolicy(
            required=runtime.required,
            bounds=runtime.bounds.model_copy(
                update={"threshold_crossing": share, "threshold_crossing_bound": upper}
            ),
        )
        for name, runtime in plain.runtimes.items()
    }
    return builders.policy(**{"runtimes": runtimes, "operating_points": (0.5,)} | overrides)


def evidence(*crossings, output=None, **classes):
    """Good evidence but for the classes of `ort-cpu` and `ort-cpu-optimized`."""
    logits = output_parity(
        classification=class_parity(crossings=crossings, **classes), **(output or {})
    )
    return builders.with_outputs(logits)


def judge(record: Evidence, **fields: Any) -> Decision:
    return decide(policy(**fields), record, decided_at="2026-01-01T00:00:00+00:00")


def of_points(decision: Decision) -> list[CheckResult]:
    return [c for c in decision.checks if c.name in NAMES and c.runtime == "ort-cpu"]


def test_few_that_cross_pass_and_are_shown_with_their_point():
    decision = judge(evidence(crossing(4)))
    assert decision.verdict is Verdict.PASS
    share, upper = of_points(decision)
    assert (share.title, share.observed, share.bound, share.samples) == (
        "ort-cpu / logits / threshold_crossing at 0.5", 0.01, 0.01, SAMPLES
    )  # fmt: skip
    assert upper.observed == pytest.approx(0.0227, abs=1e-4)
    assert "4 of 400 samples" in render_check(share)
    assert "samples 0, 1, 2, 3." in render_check(share)
    assert Decision.from_json(decision.to_json()) == decision


@pytest.mark.parametrize(("crossed", "bounds", "failing"), [
    (5, {}, {"threshold_crossing"}),
    (5, {"share": None}, set()),
    (13, {}, {"threshold_crossing", "threshold_crossing_bound"}),
    (4, {"upper": 0.02}, {"threshold_crossing_bound"}),
    (4, {"upper": None}, set()),
    (0, {"share": 0.0, "upper": 0.007}, {"threshold_crossing_bound"}),
    (0, {"share": 0.0, "upper": 0.0075}, set()),
    (SAMPLES - 200, {"share": 1.0, "upper": 1.0}, set()),
])  # fmt: skip
def test_each_bound_judges_its_own_number(crossed, bounds, failing):
    decision = judge(evidence(crossing(crossed)), **bounds)
    assert {c.name for c in decision.problems} == failing
    assert {c.verdict for c in decision.problems} <= {Verdict.FAIL}
    assert decision.passed is not bool(failing)


CONTRADICTIONS = {
    "other samples": crossing(samples=SAMPLES + 1),
    "far more samples": crossing(4, samples=10**9),
    "too few samples": crossing(samples=SAMPLES - 1),
    "more cross than there are": crossing(SAMPLES + 1),
    "more above than there are": crossing(200, reference_above=SAMPLES + 1),
    "fewer cross than the sides differ by": crossing(0, reference_above=201),
    "some are not listed": crossing(4, crossing=(1, 2)),
    "one is listed twice": crossing(4, crossing=(1, 1, 2, 3)),
    "listed, and none crosses": crossing(0, crossing=(1,)),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_counts_that_contradict_each_other_never_pass(name):
    decision = judge(evidence(CONTRADICTIONS[name]), share=1.0, upper=1.0)
    assert [c.verdict for c in of_points(decision)] == [Verdict.ERROR] * 2
    assert all(
        "contradict" in render_check(c) and render_check(c, "remedy") for c in of_points(decision)
    )
    assert decision.verdict is Verdict.ERROR


@pytest.mark.parametrize(("record", "words"), [
    (evidence(), "has 0 records of this point"),
    (evidence(crossing(threshold=0.9)), "has 0 records of this point"),
    (evidence(crossing(threshold=math.nan)), "has 0 records of this point"),
    (evidence(crossing(label=3)), "has 0 records of this point"),
    (evidence(crossing(), crossing()), "2 records of this point"),
    (evidence(crossing(), normalised=True), "without a softmax"),
])  # fmt: skip
def test_what_was_not_measured_is_an_error(record, words):
    checks = of_points(judge(record))
    assert [c.verdict for c in checks] == [Verdict.ERROR] * 2
    assert all(words in render_check(c) for c in checks)
    assert not judge(record).passed


def test_probabilities_are_judged_as_they_were_measured():
    stated = {"outputs": {"logits": "probabilities"}}
    rows = builders.row_parity()
    right = evidence(crossing(), output={"rows": rows}, normalised=True)
    assert judge(right, **stated).passed
    by_softmax = evidence(crossing(), output={"rows": rows})
    assert {c.verdict for c in of_points(judge(by_softmax, **stated))} == {Verdict.ERROR}


BY_CLASS = {"operating_points": {3: (0.7,), 12: (0.5,)}}
THIRD = crossing(2, threshold=0.7, label=3, samples=50, reference_above=20, candidate_above=18)


def test_a_point_of_a_class_is_judged_on_the_samples_of_that_class():
    stated = {"operating_points": {3: (0.7,)}}
    share, upper = of_points(judge(evidence(THIRD), share=0.04, upper=0.2, **stated))
    assert (share.point, share.observed, share.samples) == ("0.7 of class 3", 0.04, 50)
    assert (share.verdict, upper.verdict) == (Verdict.PASS, Verdict.PASS)
    empty = crossing(threshold=0.7, label=3, samples=0, reference_above=0, candidate_above=0)
    checks = of_points(judge(evidence(empty), **stated))
    assert {c.verdict for c in checks} == {Verdict.ERROR}
    assert "no sample was compared" in render_check(checks[0])


def test_a_class_that_no_output_has_is_an_error_and_one_of_another_output_is_not():
    decision = judge(evidence(THIRD), share=0.1, upper=0.2, **BY_CLASS)
    problems = [c for c in of_points(decision) if c.verdict is Verdict.ERROR]
    assert {c.point for c in problems} == {"0.5 of class 12"}
    assert "no output has a class 12; this one has 10" in render_check(problems[0])

    twelfth = crossing(label=12, samples=30, reference_above=9, candidate_above=9)
    wide = output_parity(
        name="wide", classification=class_parity(classes=20, crossings=(THIRD, twelfth))
    )
    good = evidence(THIRD)
    spec = good.subject.outputs[0]
    subject = good.subject.model_copy(
        update={"outputs": (spec, TensorSpec(name="wide", dtype="float32", shape=("batch", 20)))}
    )
    runtimes = tuple(
        r.model_copy(update={"outputs": (*r.outputs, wide)}) if r.outputs else r
        for r in good.runtimes
    )
    both = good.model_copy(update={"subject": subject, "runtimes": runtimes})
    decision = judge(both, share=0.1, upper=0.2, **BY_CLASS)
    assert decision.passed, [render_check(c) for c in decision.problems]
    assert [(c.output, c.point) for c in of_points(decision)[::2]] == [
        ("logits", "0.7 of class 3"), ("wide", "0.7 of class 3"), ("wide", "0.5 of class 12")
    ]  # fmt: skip
    # An output that is no classifier takes no point away from one that is.
    beside = judge(both, share=0.1, upper=0.2, outputs={"wide": "scores"}, **BY_CLASS)
    assert {c.point for c in beside.problems} == {"0.5 of class 12"}


def test_near_ties_are_left_out_of_the_samples_and_no_more_than_there_are():
    for excused, verdict in ((0, Verdict.PASS), (2, Verdict.PASS), (3, Verdict.ERROR)):
        record = crossing(1, samples=SAMPLES - excused)
        decision = judge(evidence(record, top1_ties=2))
        assert {c.verdict for c in of_points(decision)} == {verdict}


def test_a_runtime_without_these_bounds_has_no_such_check():
    runtimes = policy().runtimes | {"ort-cpu": builders.policy().runtimes["ort-cpu"]}
    decision = judge(evidence(crossing()), runtimes=runtimes)
    assert of_points(decision) == []
    assert decision.passed


@given(
    st.integers(0, SAMPLES - 200), st.integers(0, SAMPLES - 200), st.floats(0, 1), st.floats(0, 1)
)
def test_one_more_that_crosses_never_turns_a_refusal_into_a_pass(a, b, share, upper):
    fewer, more = sorted((a, b))
    bounds = {"share": share, "upper": upper}
    if not judge(evidence(crossing(fewer)), **bounds).passed:
        assert not judge(evidence(crossing(more)), **bounds).passed


counts = st.integers(0, SAMPLES + 2)


@given(counts, counts, counts, counts, st.integers(0, LISTED))
def test_whatever_is_recorded_it_passes_only_within_the_bound(samples, r, c, crossed, listed):
    record = crossing(samples=samples, reference_above=r, candidate_above=c, crossed=crossed,
                      crossing=tuple(range(listed)))  # fmt: skip
    if judge(evidence(record), upper=1.0).passed:
        assert samples == SAMPLES
        assert crossed <= 4
        assert max(r, c) <= SAMPLES
        assert abs(r - c) <= crossed


@pytest.mark.parametrize(("samples", "bound"), [(299, 0.01), (2995, 0.001)])
def test_samples_needed_without_a_crossing(samples, bound):
    assert crossing_upper_bound(0, samples, confidence=0.95) <= bound
    assert crossing_upper_bound(0, samples - 1, confidence=0.95) > bound


@given(st.integers(1, 2000), st.data(), st.sampled_from([0.9, 0.95, 0.99]))
def test_the_upper_bound_solves_the_binomial_equation(samples, data, confidence):
    """At the bound, seeing so few crossings or fewer has probability 1 - confidence."""
    crossed = data.draw(st.integers(0, samples))
    bound = crossing_upper_bound(crossed, samples, confidence=confidence)
    if crossed == samples:
        assert bound == 1.0
        return
    assert bdtr(crossed, samples, bound) == pytest.approx(1 - confidence, rel=1e-6)
    assert bound > crossed / samples


def test_old_evidence_without_points_is_an_error_where_points_are_asked_for():
    assert not decide(policy(), builders.evidence(), decided_at="now").passed
    assert decide(builders.policy(), evidence(crossing(200)), decided_at="now").passed
    assert runtime_evidence().outputs[0].differences is None


@pytest.mark.parametrize(
    ("samples", "bound"), [(299, 0.99), (2995, 0.999)], ids=["0.99 needs 299", "0.999 needs 2995"]
)
def test_samples_needed_for_agreement(samples, bound):
    assert agreement_lower_bound(0, samples, confidence=0.95) >= bound
    assert agreement_lower_bound(0, samples - 1, confidence=0.95) < bound


@given(st.integers(1, 2000), st.data(), st.sampled_from([0.9, 0.95, 0.99]))
def test_the_lower_bound_solves_the_binomial_equation(samples, data, confidence):
    """At the bound, seeing so many agreements or more has probability 1 - confidence."""
    disagreements = data.draw(st.integers(0, samples))
    bound = agreement_lower_bound(disagreements, samples, confidence=confidence)
    if disagreements == samples:
        assert bound == 0.0
        return
    tail = bdtrc(samples - disagreements - 1, samples, bound)
    assert tail == pytest.approx(1 - confidence, rel=1e-6)


def test_no_samples_prove_nothing():
    assert agreement_lower_bound(0, 0, confidence=0.95) == 0.0
    assert crossing_upper_bound(0, 0, confidence=0.95) == 1.0


@pytest.mark.parametrize("relation", ["<=", ">="])
@pytest.mark.parametrize(("observed", "bound"), [
    (math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (None, 1.0), (1.0, None),
])  # fmt: skip
def test_only_finite_numbers_hold(relation, observed, bound):
    assert not BoundedMetric("x", observed, relation, bound).holds()


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1e300))
def test_holds_is_the_comparison_within_what_can_be_measured(observed, bound):
    assert BoundedMetric("x", observed, "<=", bound).holds() == (0.0 <= observed <= bound)
    assert BoundedMetric("x", observed, ">=", bound).holds() == (bound <= observed <= 1.0)


def test_accuracy_may_rise():
    assert BoundedMetric("accuracy_drop", -0.1, "<=", 0.0, least=-1.0).holds()
    assert not BoundedMetric("accuracy_drop", -1.1, "<=", 0.0, least=-1.0).holds()


@given(st.floats(0.01, 0.9995), st.floats(0.51, 0.999))
def test_the_samples_that_are_asked_for_are_the_fewest_that_do(bound, confidence):
    needed = samples_needed(bound, confidence=confidence)
    assert needed is not None
    assert agreement_lower_bound(0, needed, confidence=confidence) >= bound
    assert needed == 1 or agreement_lower_bound(0, needed - 1, confidence=confidence) < bound


def test_no_number_of_samples_proves_certainty():
    assert samples_needed(1.0, confidence=0.95) is None


@pytest.mark.parametrize(("samples", "disagreements", "verdict", "says"), [
    (100, 0, Verdict.ERROR, "299 samples without a disagreement are needed"),
    (298, 0, Verdict.ERROR, "299 samples"),
    (299, 0, Verdict.PASS, "allowed at least 0.99"),
    (100, 1, Verdict.FAIL, "allowed at least 0.99"),
    (299, 1, Verdict.FAIL, "allowed at least 0.99"),
])  # fmt: skip
def test_too_few_samples_are_no_rejection(samples, disagreements, verdict, says):
    decision = _on(samples, disagreements)
    checks = [check for check in decision.checks if check.name == "top1_lower_bound"]
    assert {check.verdict for check in checks} == {verdict}
    assert says in render_check(checks[0])
    assert decision.verdict is verdict


@given(st.integers(2, 600), st.integers(0, 5), st.integers(1, 5))
def test_more_disagreements_never_turn_a_rejection_into_less(samples, disagreements, more):
    better, worse = _on(samples, disagreements), _on(samples, disagreements + more)
    assert worse.verdict is Verdict.FAIL
    assert better.verdict is not Verdict.PASS or disagreements == 0


def _on(samples, disagreements):
    """Decided by a policy whose lower bound is the only bound that the answers could break."""
    disagreements = min(disagreements, samples)
    classes = builders.class_parity(
        top1_disagreements=disagreements, top1_agreement=1 - disagreements / samples
    )
    output = builders.output_parity(samples=samples, classification=classes)
    evidence = builders.with_outputs(output)
    dataset = evidence.dataset.model_copy(update={"samples": samples})
    evidence = evidence.model_copy(update={"dataset": dataset})
    return decide(builders.policy(min_samples=2), evidence, decided_at="now")
