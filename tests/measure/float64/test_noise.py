"""The noise ratio: its formula, its laws, and what it must not be blind to."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gate.measure.noise_floor import NoiseStatistics
from gate.records.instruments import NoiseParity, noise_floor
from tests.measure.close import assert_close

NAN, INF = math.nan, math.inf
EPSILON = 2.0**-24


def noise(truth, reference, candidate) -> NoiseParity:
    statistics = NoiseStatistics(columns=True)
    statistics.update(truth, reference, candidate, samples=len(truth))
    return statistics.result()


def rms(values) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def logits(seed: int = 0, *, scale: float = 1.0):
    """Truth, reference and a correct candidate, shape (32, 10)."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(32, 10)) * scale
    reference, candidate = (truth + rng.normal(size=truth.shape) * 1e-6 * scale for _ in range(2))
    return truth, reference, candidate


def test_the_formula():
    truth, reference, candidate = logits()
    candidate = truth + 3.0 * (candidate - truth)
    result = noise(truth, reference, candidate)
    assert result.samples == 32
    assert result.elements == 320
    assert result.truth_rms == pytest.approx(rms(truth))
    assert result.reference_rms == pytest.approx(rms(reference - truth))
    assert result.candidate_rms == pytest.approx(rms(candidate - truth))
    assert result.group is None
    whole = rms(candidate - truth) / rms(reference - truth) / result.scatter
    assert whole <= result.ratio * (1.0 + 1e-9) < 1.1 * whole
    floor = np.abs(reference - truth).max()
    assert result.floor_peak == pytest.approx(floor)
    assert result.diff * result.scatter == pytest.approx(
        np.abs(candidate - reference).max() / floor
    )


@pytest.mark.parametrize("late", [1.0, math.nan, math.inf])
def test_what_late_samples_show_is_taken_as_it_is(late):
    statistics = NoiseStatistics()
    statistics.update(*logits(), samples=32)
    assert statistics.result(diff=late).diff == pytest.approx(late, nan_ok=True)


UNITS = np.array([1e6, 1e6, 1e3, 1.0, 1e-3, 1.0, 1.0, 1e-6, 1e9, 1.0])


@pytest.mark.parametrize("column", [3, 4, 7])
@pytest.mark.parametrize("factor", [-1.0, 1.001, 1.0 + 2.0**-11])
def test_a_wrong_column_beside_larger_ones_is_named(column, factor):
    truth, reference, candidate = (array * UNITS for array in logits())
    assert noise(truth, reference, candidate).ratio < 1.2
    candidate[:, column] *= factor
    result = noise(truth, reference, candidate)
    assert result.ratio > 50
    assert result.group == f"column {column}"


def test_a_wrong_channel_is_named():
    truth, reference, candidate = (a.reshape(16, 4, 5) for a in logits())
    for array in (truth, reference, candidate):
        array[:, 0] *= 1e6
    candidate[:, 2] *= 1.001
    assert noise(truth, reference, candidate).group == "channel 2"


@pytest.mark.parametrize("shape", [(12, 4, 5), (80, 3)], ids=["time first", "flat boxes"])
def test_an_output_without_a_batch_axis_has_columns_too(shape):
    truth, reference, candidate = (np.resize(array, shape) for array in logits())
    for array in (truth, reference, candidate):
        array[..., :2] *= 100.0
    candidate[..., 2] *= 1.00002
    statistics = NoiseStatistics(columns=True)
    statistics.update(truth, reference, candidate, samples=32)
    result = statistics.result()
    assert result.ratio > 5
    assert result.group == "column 2"


def test_who_is_closer_is_told_of_the_elements_of_the_ratio():
    """Over all elements the candidate is closer, thanks to the column of large numbers."""
    truth, reference, candidate = (array * UNITS for array in logits())
    candidate[:, 8] = truth[:, 8]
    candidate[:, 4] *= -1.0
    result = noise(truth, reference, candidate)
    assert result.candidate_rms < result.reference_rms
    assert result.closer == "reference"


def test_an_axis_whose_length_changes_has_no_columns():
    """As the states of an LSTM, or all pairs of a batch, in a last batch that is smaller."""
    rng = np.random.default_rng(0)
    statistics = NoiseStatistics(columns=True)
    for size in (8, 8, 3):
        truth = rng.normal(size=(size, size))
        statistics.update(truth, truth + 1e-7, truth - 1e-7, samples=size)
    assert statistics.result().elements == 64 + 64 + 9
    assert [group.axis for group in statistics.floors()] == [0]


def test_elements_that_are_the_same_number_on_all_sides_give_no_scale():
    truth, reference, wrong = logits()
    reference[:] = truth
    wrong = truth + 1e-3
    for array in (truth, reference, wrong):
        array[:, :9] = -3.4e38
    assert noise(truth, reference, wrong).ratio > 1000


@pytest.mark.parametrize("scale", [1e-14, 1e-3, 1.0, 1e12])
def test_the_scale_of_the_logits_does_not_matter(scale):
    assert noise(*logits(scale=scale)).ratio == pytest.approx(noise(*logits()).ratio, rel=1e-6)


def test_a_reference_without_any_error_counts_as_half_a_unit_of_float32():
    truth = np.linspace(1.0, 2.0, 320).reshape(32, 10)
    statistics = NoiseStatistics()
    statistics.update(truth, truth, truth + 2 * EPSILON * rms(truth), samples=32)
    result = statistics.result()
    assert result.ratio * result.scatter == pytest.approx(2.0)
    assert result.closer == "reference"


@pytest.mark.parametrize(
    ("reference", "candidate", "closer"),
    [(1, 2, "reference"), (2, 1, "candidate"), (1, 1, "neither")],
)
def test_which_side_is_closer(reference, candidate, closer):
    truth = np.ones((4, 3))
    assert noise(truth, truth + reference / 8, truth - candidate / 8).closer == closer


@pytest.mark.parametrize("mask", [-1e9, -1e4, -float(np.finfo(np.float32).max)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.7, 0.95])
def test_huge_constants_hide_nothing(mask, share):
    """A masked output: the constants are exact on all sides, the rest is off by 1 per mille."""
    truth, reference, _ = logits()
    wrong = truth * 1.001
    masked = np.random.default_rng(1).random(truth.shape) < share
    for array in (truth, reference, wrong):
        array[masked] = mask
    result = noise(truth, reference, wrong)
    assert result.ratio > 150
    assert result.peak > 150
    assert noise(truth, reference, reference).ratio <= 1.0


def test_masks_that_rounding_moves_hide_nothing():
    """-1e4 is added to what is masked: rounding is a thousand times larger there."""
    rng = np.random.default_rng(1)
    truth, reference, wrong = logits()
    masked = rng.random(truth.shape) < 0.95
    for array in (truth, reference, wrong):
        array[masked] -= 1e4
    reference[masked] += rng.normal(size=masked.sum()) * 1e-3
    wrong[masked] += rng.normal(size=masked.sum()) * 1e-3
    wrong[~masked] += 1e-3
    assert noise(truth, reference, wrong).ratio > 50


def test_zeros_that_differ_by_rounding_are_no_scale_of_their_own():
    """After a ReLU most elements are exactly zero, and rounding decides which."""
    truth, reference, candidate = (np.maximum(array, 0.0) for array in logits())
    truth[truth < 0.3] = 0.0
    assert noise(truth, reference, candidate).ratio < 3.0


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_candidate_that_is_not_finite_where_the_truth_is(value):
    truth, reference, candidate = logits()
    candidate[3, 3] = value
    result = noise(truth, reference, candidate)
    assert result.ratio == result.peak == INF


@pytest.mark.parametrize("side", ["truth", "reference"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_elements_without_a_finite_truth_are_left_out(side, value):
    """The check `finite` judges them."""
    truth, reference, candidate = logits()
    (truth if side == "truth" else reference)[3, 3] = value
    result = noise(truth, reference, candidate)
    assert result.elements == 319
    assert math.isfinite(result.ratio)


def test_without_elements_every_number_is_zero():
    for result in (
        NoiseStatistics().result(),
        noise(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3))),
        noise(np.full((2, 3), NAN), np.zeros((2, 3)), np.zeros((2, 3))),
    ):
        assert result.elements == 0
        assert (result.ratio, result.peak, result.candidate_rms) == (0.0, 0.0, 0.0)


def test_on_zeros_only_what_a_runtime_may_flush_to_zero_is_no_error():
    zeros = np.zeros((4, 3))
    assert noise(zeros, zeros, zeros).ratio == 0.0
    assert 0.0 < noise(zeros, zeros, zeros + 2.0**-126).ratio <= 1.0
    assert noise(zeros, zeros, zeros + 1e-30).ratio > 1e6


def tossed(truth, reference, moved) -> NoiseStatistics:
    statistics = NoiseStatistics()
    statistics.update(truth, reference, moved, samples=len(truth))
    return statistics


@pytest.mark.parametrize(("times", "unit"), [(0.1, 1.0), (1.0, 1.0), (5.0, 5.0)])
def test_random_rounding_widens_the_floor_where_it_is_larger(times, unit):
    truth, reference, candidate = logits()
    moved = truth + (reference - truth) * times
    statistics = tossed(truth, reference, candidate)
    alone = statistics.result()
    widened = statistics.result(rounding=tossed(truth, reference, moved))
    assert alone.rounding_rms is None
    assert widened.rounding_rms == pytest.approx(times * alone.reference_rms)
    for name in ("ratio", "peak", "diff"):
        assert getattr(widened, name) == pytest.approx(getattr(alone, name) / unit)
    assert widened.ratio == pytest.approx(
        widened.candidate_rms / widened.floor_rms / widened.scatter
    )


def test_random_rounding_excuses_no_infinity():
    truth, reference, candidate = logits()
    candidate[3, 3] = INF
    rounding = tossed(truth, reference, truth + 1e9)
    assert tossed(truth, reference, candidate).result(rounding=rounding).ratio == INF


@pytest.mark.parametrize("place", range(3))
def test_a_floor_of_nan_is_nan(place):
    errors = [1.0, 1.0, 1.0]
    errors[place] = NAN
    assert math.isnan(noise_floor(*errors))


ARRAYS = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 6), st.just(3)),
    elements=st.floats(-1e6, 1e6) | st.sampled_from([0.0, NAN, INF, 1e-310]),
)


@given(ARRAYS, st.data())
def test_merging_any_split_is_one_pass(truth, data):
    reference, candidate = (
        data.draw(hnp.arrays(np.float64, truth.shape, elements=st.floats(-1e6, 1e6)))
        for _ in range(2)
    )
    cut = data.draw(st.integers(0, len(truth)))
    parts = []
    for rows in (slice(0, cut), slice(cut, None)):
        part = NoiseStatistics(columns=True)
        part.update(truth[rows], reference[rows], candidate[rows], samples=len(truth[rows]))
        parts.append(part)
    whole = NoiseStatistics(columns=True)
    whole.update(truth, reference, candidate, samples=len(truth))
    whole = whole.result().model_dump()
    assert_close(parts[0].merge(parts[1]).result().model_dump(), whole)
    assert_close(parts[1].merge(parts[0]).result().model_dump(), whole)
    assert_close(
        NoiseStatistics(columns=True).merge(parts[0]).merge(parts[1]).result().model_dump(),
        whole,
    )


@given(st.integers(0, 319), st.floats(1e-5, 1e6))
def test_one_wrong_element_never_lowers_the_peak(place, amount):
    truth, reference, candidate = logits()
    before = noise(truth, reference, candidate)
    candidate.flat[place] += math.copysign(amount, candidate.flat[place] - truth.flat[place])
    after = noise(truth, reference, candidate)
    assert after.peak >= before.peak
    assert after.ratio >= before.ratio
