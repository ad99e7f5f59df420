import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import bdtrc

from gate.decision.bound_rules import BoundedMetric, agreement_lower_bound, samples_needed
from gate.decision.check_result import Verdict
from gate.decision.decide import decide
from gate.summary.render import render_check
from tests import builders


@pytest.mark.parametrize(
    ("samples", "bound"), [(299, 0.99), (2995, 0.999)], ids=["0.99 needs 299", "0.999 needs 2995"]
)
def test_samples_needed_without_disagreement(samples, bound):
    assert agreement_lower_bound(0, samples, confidence=0.95) >= bound
    assert agreement_lower_bound(0, samples - 1, confidence=0.95) < bound


@given(st.integers(1, 2000), st.data(), st.sampled_from([0.9, 0.95, 0.99]))
def test_the_bound_solves_the_binomial_equation(samples, data, confidence):
    """At the bound, seeing so many agreements or more has probability 1 - confidence."""
    disagreements = data.draw(st.integers(0, samples))
    bound = agreement_lower_bound(disagreements, samples, confidence=confidence)
    if disagreements == samples:
        assert bound == 0.0
        return
    tail = bdtrc(samples - disagreements - 1, samples, bound)
    assert tail == pytest.approx(1 - confidence, rel=1e-6)


@given(st.integers(1, 500), st.integers(0, 499))
def test_one_more_disagreement_never_raises_the_bound(samples, disagreements):
    fewer = agreement_lower_bound(min(disagreements, samples), samples, confidence=0.95)
    more = agreement_lower_bound(min(disagreements + 1, samples), samples, confidence=0.95)
    assert more <= fewer


def test_no_samples_prove_nothing():
    assert agreement_lower_bound(0, 0, confidence=0.95) == 0.0


@pytest.mark.parametrize("relation", ["<=", ">="])
@pytest.mark.parametrize(
    ("observed", "bound"),
    [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (None, 1.0), (1.0, None)],
)
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


@pytest.mark.parametrize(
    ("samples", "disagreements", "verdict", "says"),
    [
        (100, 0, Verdict.ERROR, "299 samples without a disagreement are needed"),
        (298, 0, Verdict.ERROR, "299 samples"),
        (299, 0, Verdict.PASS, "allowed at least 0.99"),
        (100, 1, Verdict.FAIL, "allowed at least 0.99"),
        (299, 1, Verdict.FAIL, "allowed at least 0.99"),
    ],
)
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
    evidence = builders.evidence()
    disagreements = min(disagreements, samples)
    runtimes = tuple(
        runtime.model_copy(
            update={
                "outputs": tuple(
                    output.model_copy(
                        update={
                            "samples": samples,
                            "classification": output.classification.model_copy(
                                update={
                                    "top1_disagreements": disagreements,
                                    "top1_agreement": 1 - disagreements / samples,
                                }
                            ),
                        }
                    )
                    for output in runtime.outputs
                )
            }
        )
        for runtime in evidence.runtimes
    )
    dataset = evidence.dataset.model_copy(update={"samples": samples})
    evidence = evidence.model_copy(update={"runtimes": runtimes, "dataset": dataset})
    return decide(builders.policy(min_samples=2), evidence, decided_at="now")
