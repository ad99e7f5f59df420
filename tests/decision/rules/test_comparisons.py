import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from gate.decision.rules.comparisons import BoundedMetric, top1_lower_bound


@pytest.mark.parametrize(
    ("samples", "bound"), [(299, 0.99), (2995, 0.999)], ids=["0.99 needs 299", "0.999 needs 2995"]
)
def test_samples_needed_without_disagreement(samples, bound):
    assert top1_lower_bound(0, samples, confidence=0.95) >= bound
    assert top1_lower_bound(0, samples - 1, confidence=0.95) < bound


@given(st.integers(1, 2000), st.data(), st.sampled_from([0.9, 0.95, 0.99]))
def test_the_bound_solves_the_binomial_equation(samples, data, confidence):
    """At the bound, seeing so many agreements or more has probability 1 - confidence."""
    disagreements = data.draw(st.integers(0, samples))
    bound = top1_lower_bound(disagreements, samples, confidence=confidence)
    if disagreements == samples:
        assert bound == 0.0
        return
    tail = binom.sf(samples - disagreements - 1, samples, bound)
    assert tail == pytest.approx(1 - confidence, rel=1e-6)


@given(st.integers(1, 500), st.integers(0, 499))
def test_one_more_disagreement_never_raises_the_bound(samples, disagreements):
    fewer = top1_lower_bound(min(disagreements, samples), samples, confidence=0.95)
    more = top1_lower_bound(min(disagreements + 1, samples), samples, confidence=0.95)
    assert more <= fewer


def test_no_samples_prove_nothing():
    assert top1_lower_bound(0, 0, confidence=0.95) == 0.0


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
