"""Operating points and confidence bounds of agreement are checked."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import bdtr

from gate import CheckResult, Decision, Evidence, Verdict
from gate.decision.bound_rules import agreement_lower_bound, crossing_upper_bound, samples_needed
from gate.policy.sections import RuntimePolicy
from gate.records.outputs import LISTED, Crossing
from gate.summary.render import render_check
from tests import builders
from tests.builders import SAMPLES, class_parity, output_parity

NAMES = ("threshold_crossing", "threshold_crossing_bound")


def crossing(crossed: int = 0, **overrides: Any) -> Crossing:
    """Return a crossing at 0.5: half of the samples are above on both sides, `crossed` only in the
    reference.
    """
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
    """Return valid evidence with these crossings and class statistics in both CPU runtimes."""
    logits = output_parity(
        classification=class_parity(crossings=crossings, **classes), **(output or {})
    )
    return builders.with_outputs(logits)


def judge(record: Evidence, **fields: Any) -> Decision:
    return builders.judge(record, by=policy(**fields))


def crossing_checks(decision: Decision) -> list[CheckResult]:
    return [c for c in decision.checks if c.name in NAMES and c.runtime == "ort-cpu"]


def test_few_crossings_pass_and_are_listed():
    decision = judge(evidence(crossing(4)))
    assert decision.verdict is Verdict.PASS
    share, upper = crossing_checks(decision)
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
def test_share_and_upper_bound_are_checked_separately(crossed, bounds, failing):
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
def test_contradicting_counts_are_an_error(name):
    decision = judge(evidence(CONTRADICTIONS[name]), share=1.0, upper=1.0)
    assert [c.verdict for c in crossing_checks(decision)] == [Verdict.ERROR] * 2
    assert all(
        "contradict" in render_check(c) and render_check(c, "remedy")
        for c in crossing_checks(decision)
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
def test_missing_operating_point_is_an_error(record, words):
    checks = crossing_checks(judge(record))
    assert [c.verdict for c in checks] == [Verdict.ERROR] * 2
    assert all(words in render_check(c) for c in checks)
    assert not judge(record).passed


def test_probabilities_need_crossings_without_softmax():
    stated = {"outputs": {"logits": "probabilities"}}
    rows = builders.row_parity()
    without_softmax = evidence(crossing(), output={"rows": rows}, normalised=True)
    assert judge(without_softmax, **stated).passed
    with_softmax = evidence(crossing(), output={"rows": rows})
    assert {c.verdict for c in crossing_checks(judge(with_softmax, **stated))} == {Verdict.ERROR}


POINTS_BY_CLASS = {"operating_points": {3: (0.7,), 12: (0.5,)}}
CLASS_3_CROSSING = crossing(
    2, threshold=0.7, label=3, samples=50, reference_above=20, candidate_above=18
)


def test_class_point_uses_samples_of_that_class():
    stated = {"operating_points": {3: (0.7,)}}
    share, upper = crossing_checks(
        judge(evidence(CLASS_3_CROSSING), share=0.04, upper=0.2, **stated)
    )
    assert (share.point, share.observed, share.samples) == ("0.7 of class 3", 0.04, 50)
    assert (share.verdict, upper.verdict) == (Verdict.PASS, Verdict.PASS)
    empty = crossing(threshold=0.7, label=3, samples=0, reference_above=0, candidate_above=0)
    checks = crossing_checks(judge(evidence(empty), **stated))
    assert {c.verdict for c in checks} == {Verdict.ERROR}
    assert "no sample was compared" in render_check(checks[0])


def test_class_point_needs_an_output_with_that_class():
    decision = judge(evidence(CLASS_3_CROSSING), share=0.1, upper=0.2, **POINTS_BY_CLASS)
    problems = [c for c in crossing_checks(decision) if c.verdict is Verdict.ERROR]
    assert {c.point for c in problems} == {"0.5 of class 12"}
    assert "no output has a class 12; this one has 10" in render_check(problems[0])

    twelfth = crossing(label=12, samples=30, reference_above=9, candidate_above=9)
    narrow = output_parity(classification=class_parity(crossings=(CLASS_3_CROSSING,)))
    wide = output_parity(
        name="wide", classification=class_parity(classes=20, crossings=(CLASS_3_CROSSING, twelfth))
    )
    pair = builders.with_outputs(narrow, wide)
    decision = judge(pair, share=0.1, upper=0.2, **POINTS_BY_CLASS)
    assert decision.passed, [render_check(c) for c in decision.problems]
    assert [(c.output, c.point) for c in crossing_checks(decision)[::2]] == [
        ("logits", "0.7 of class 3"), ("wide", "0.7 of class 3"), ("wide", "0.5 of class 12")
    ]  # fmt: skip
    # An output that is not a classifier does not take a point from one that is.
    decision = judge(pair, share=0.1, upper=0.2, outputs={"wide": "scores"}, **POINTS_BY_CLASS)
    assert {c.point for c in decision.problems} == {"0.5 of class 12"}


def test_crossing_samples_exclude_at_most_the_near_ties():
    for excused, verdict in ((0, Verdict.PASS), (2, Verdict.PASS), (3, Verdict.ERROR)):
        record = crossing(1, samples=SAMPLES - excused)
        decision = judge(evidence(record, top1_ties=2))
        assert {c.verdict for c in crossing_checks(decision)} == {verdict}


def test_runtime_without_crossing_bounds_has_no_crossing_check():
    runtimes = policy().runtimes | {"ort-cpu": builders.policy().runtimes["ort-cpu"]}
    decision = judge(evidence(crossing()), runtimes=runtimes)
    assert crossing_checks(decision) == []
    assert decision.passed


@given(
    st.integers(0, SAMPLES - 200), st.integers(0, SAMPLES - 200), st.floats(0, 1), st.floats(0, 1)
)
def test_more_crossings_never_turn_fail_into_pass(a, b, share, upper):
    fewer, more = sorted((a, b))
    bounds = {"share": share, "upper": upper}
    if not judge(evidence(crossing(fewer)), **bounds).passed:
        assert not judge(evidence(crossing(more)), **bounds).passed


sample_counts = st.integers(0, SAMPLES + 2)


@given(sample_counts, sample_counts, sample_counts, sample_counts, st.integers(0, LISTED))
def test_any_crossing_record_passes_only_within_the_bound(samples, r, c, crossed, listed):
    record = crossing(samples=samples, reference_above=r, candidate_above=c, crossed=crossed,
                      crossing=tuple(range(listed)))  # fmt: skip
    if judge(evidence(record), upper=1.0).passed:
        assert samples == SAMPLES
        assert crossed <= 4
        assert max(r, c) <= SAMPLES
        assert abs(r - c) <= crossed


@given(st.integers(1, 2000), st.data(), st.sampled_from([0.9, 0.95, 0.99]))
def test_bounds_solve_the_binomial_equation(samples, data, confidence):
    """Give so many crossings or fewer the probability 1 - confidence at the upper bound, and so
    many agreements or more at the lower bound of their share.
    """
    crossed = data.draw(st.integers(0, samples))
    upper = crossing_upper_bound(crossed, samples, confidence=confidence)
    lower = agreement_lower_bound(crossed, samples, confidence=confidence)
    if crossed == samples:
        assert (lower, upper) == (0.0, 1.0)
        return
    assert bdtr(crossed, samples, upper) == pytest.approx(1 - confidence, rel=1e-6)
    assert upper > crossed / samples
    assert lower == pytest.approx(1 - upper, rel=1e-6)


def test_bounds_without_samples_are_trivial():
    assert agreement_lower_bound(0, 0, confidence=0.95) == 0.0
    assert crossing_upper_bound(0, 0, confidence=0.95) == 1.0


@pytest.mark.parametrize(("drop", "verdict"), [
    (-0.1, Verdict.PASS), (-1.1, Verdict.FAIL), (math.nan, Verdict.FAIL), (-math.inf, Verdict.FAIL),
])  # fmt: skip
def test_accuracy_drop_may_be_negative(drop, verdict):
    accuracy = class_parity().accuracy.model_copy(update={"drop": drop})
    decision = judge(evidence(crossing(), accuracy=accuracy))
    assert builders.find_check(decision, "accuracy_drop").verdict is verdict


@pytest.mark.parametrize(("diff", "agreement"), [(-1e-9, 1.0), (0.0, 1.1)])
def test_impossible_numbers_fail(diff, agreement):
    record = evidence(crossing(), output={"max_abs_diff": diff}, top5_agreement=agreement)
    (check,) = [each for each in judge(record).problems if each.runtime == "ort-cpu"]
    assert (check.name, check.verdict) == (
        "max_abs_diff" if diff else "top5_agreement", Verdict.FAIL
    )  # fmt: skip


@given(st.floats(0.01, 0.9995), st.floats(0.51, 0.999))
def test_samples_needed_is_the_smallest_sufficient_number(bound, confidence):
    needed = samples_needed(bound, confidence=confidence)
    assert needed is not None
    assert agreement_lower_bound(0, needed, confidence=confidence) >= bound
    assert needed == 1 or agreement_lower_bound(0, needed - 1, confidence=confidence) < bound


def test_samples_needed_is_none_for_certainty():
    assert samples_needed(1.0, confidence=0.95) is None


@pytest.mark.parametrize(("samples", "disagreements", "verdict", "says"), [
    (100, 0, Verdict.ERROR, "299 samples without a disagreement are needed"),
    (298, 0, Verdict.ERROR, "299 samples"),
    (299, 0, Verdict.PASS, "allowed at least 0.99"),
    (100, 1, Verdict.FAIL, "allowed at least 0.99"),
    (299, 1, Verdict.FAIL, "allowed at least 0.99"),
])  # fmt: skip
def test_too_few_samples_are_an_error_instead_of_fail(samples, disagreements, verdict, says):
    decision = decide_with_disagreements(samples, disagreements)
    checks = [check for check in decision.checks if check.name == "top1_lower_bound"]
    assert {check.verdict for check in checks} == {verdict}
    assert says in render_check(checks[0])
    assert decision.verdict is verdict


@given(st.integers(2, 600), st.integers(0, 5), st.integers(1, 5))
def test_more_disagreements_never_improve_the_verdict(samples, disagreements, more):
    better, worse = (
        decide_with_disagreements(samples, disagreements),
        decide_with_disagreements(samples, disagreements + more),
    )
    assert worse.verdict is Verdict.FAIL
    assert better.verdict is not Verdict.PASS or disagreements == 0


def decide_with_disagreements(samples, disagreements):
    """Decide by a policy in which only the lower bound of the agreement can fail."""
    disagreements = min(disagreements, samples)
    classes = builders.class_parity(
        top1_disagreements=disagreements, top1_agreement=1 - disagreements / samples
    )
    dataset = builders.evidence().dataset.model_copy(update={"samples": samples})
    output = builders.output_parity(samples=samples, classification=classes)
    return builders.judge(builders.with_outputs(output, dataset=dataset), min_samples=2)
