"""Statistics of one output, and of differing integers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gate.statistics.accumulators import Moments
from gate.statistics.output import MAX_KEPT, IntegerMismatches, OutputStatistics, Span
from tests.measure.close import assert_close

NAN, INF = math.nan, math.inf


def output_statistics(r, c, *, labels=None, batch=None):
    """Return the statistics of one output in batches of `batch` samples."""
    statistics = OutputStatistics("y", r.dtype.name)
    size = batch or len(r)
    for start in range(0, len(r), size):
        rows = slice(start, start + size)
        span = Span(start, len(r[rows]), None if labels is None else labels[rows])
        statistics.update(r[rows], c[rows], span)
    return statistics.result()


def floats(rows, dtype=np.float32):
    return np.array(rows, dtype)


def test_output_statistics_match_numpy():
    rng = np.random.default_rng(0)
    r = rng.normal(2.0, 3.0, size=(50, 4, 5)).astype(np.float32)
    c = (r + rng.normal(0, 1e-3, size=r.shape)).astype(np.float32)
    result = output_statistics(r, c, batch=8)

    diff = np.abs(c.astype(float) - r.astype(float))
    norms = np.linalg.norm(diff.reshape(50, -1), axis=1)
    assert (result.name, result.dtype, result.samples, result.elements) == (
        "y", "float32", 50, 1000
    )  # fmt: skip
    assert result.max_abs_diff == diff.max()
    assert result.max_abs_diff_sample == diff.reshape(50, -1).max(1).argmax()
    assert result.mean_abs_diff == pytest.approx(diff.mean())
    assert result.reference_std == pytest.approx(r.astype(float).std())
    assert result.reference_abs_max == np.abs(r).max()
    assert result.scaled_diff == pytest.approx(diff.max() / r.astype(float).std())
    assert result.l2_mean == pytest.approx(norms.mean())
    assert result.l2_max == pytest.approx(norms.max())
    assert result.nonfinite_reference == result.nonfinite_mismatched == 0
    assert result.reference_constant is False
    assert result.classification is None


@pytest.mark.parametrize(
    ("r", "c"),
    [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF), (1.0, -INF), (INF, -INF),
     (INF, NAN), (NAN, -INF)],
)  # fmt: skip
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_nonfinite_value_on_one_side_gives_infinite_difference(r, c, batch):
    left = floats([[1, 2], [3, 4], [5, r], [7, 8]])
    right = floats([[1, 2], [3, 4], [5, c], [7, 8]])
    result = output_statistics(left, right, batch=batch)
    assert result.nonfinite_mismatched == 1
    assert result.nonfinite_reference == (not math.isfinite(r))
    assert result.max_abs_diff_sample == 2
    for number in (result.max_abs_diff, result.mean_abs_diff, result.scaled_diff, result.l2_max,
                   result.l2_mean):  # fmt: skip
        assert number == INF


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_nan_on_both_sides_is_counted_separately_without_difference(batch):
    left = floats([[1, 2], [3, 4], [5, NAN], [7, 8]])
    right = floats([[1, 2], [3, 4.5], [5, NAN], [7, 8]])
    result = output_statistics(left, right, batch=batch)
    assert (result.nonfinite_same, result.nonfinite_mismatched) == (1, 0)
    assert result.nonfinite_reference == 1
    assert (result.max_abs_diff, result.max_abs_diff_sample) == (0.5, 1)
    assert result.mean_abs_diff == 0.5 / 8
    assert result.classification.nan_rows == 1


def test_unequal_counts_integers_and_booleans_only():
    left, right = np.arange(8).reshape(4, 2), np.array([[0, 1], [2, 9], [9, 5], [6, 7]])
    assert (
        output_statistics(left, right).unequal
        == output_statistics(left, right, batch=1).unequal
        == 2
    )
    assert output_statistics(left > 3, right > 3).unequal == 1
    assert output_statistics(floats(left), floats(right)).unequal is None


@pytest.mark.parametrize("value", [INF, -INF])
def test_equal_infinities_have_no_difference(value):
    left = floats([[1, value], [3, 4]])
    result = output_statistics(left, left)
    assert (result.nonfinite_reference, result.nonfinite_mismatched) == (1, 0)
    assert result.max_abs_diff == result.l2_max == result.mean_abs_diff == 0.0
    assert result.reference_abs_max == 4.0
    assert result.reference_std == pytest.approx(np.std([1, 3, 4]))


def test_reference_without_finite_elements_has_zero_scale():
    left = np.full((3, 2), np.nan, np.float32)
    result = output_statistics(left, np.ones((3, 2), np.float32))
    assert result.nonfinite_reference == result.elements == result.nonfinite_mismatched == 6
    assert result.reference_abs_max == result.reference_std == 0.0
    assert result.scaled_diff == INF


@pytest.mark.parametrize(("dtype", "r", "c", "least"), [
    (np.int64, 2**60, 2**60 + 1, 1.0),
    (np.uint64, 2**64 - 1, 2**64 - 2, 1.0),
    (np.int64, -(2**63), 2**63 - 1, 1.8e19),
    (np.uint8, 3, 250, 247.0),
    (np.int8, -128, 127, 255.0),
    (np.bool_, False, True, 1.0),
])  # fmt: skip
def test_integer_difference_is_at_least_one_without_overflow(dtype, r, c, least):
    left = np.array([[r, 0], [0, 0]], dtype)
    right = np.array([[c, 0], [0, 0]], dtype)
    result = output_statistics(left, right)
    assert result.max_abs_diff >= least
    assert result.max_abs_diff_sample == 0
    assert result.classification is None
    assert output_statistics(left, left).max_abs_diff == 0.0


def test_overflowing_standard_deviation_keeps_scaled_diff():
    left = np.array([[1e155, -1e155], [3e155, 5e155]])
    result = output_statistics(left, left * 2)
    assert result.reference_std == INF
    assert result.scaled_diff == 1.0


@pytest.mark.parametrize(("r", "c", "expected"), [
    (3.0, 3.0, 0.0), (3.0, 3.0001, INF), (0.0, 1e-30, INF), (0.1, NAN, INF), (1e12, 1e12, 0.0),
])  # fmt: skip
def test_scaled_diff_of_constant_reference_is_zero_only_when_equal(r, c, expected):
    left, right = np.full((7, 3), r, np.float64), np.full((7, 3), c, np.float64)
    result = output_statistics(left, right, batch=2)
    assert result.reference_std == 0.0
    assert result.scaled_diff == pytest.approx(expected, nan_ok=True)
    assert result.reference_constant


@pytest.mark.parametrize(("rows", "constant"), [
    ([[1, 2]] * 4, True),
    ([[1, 2]] * 3 + [[1, 3]], False),
    ([[NAN, 2]] * 4, True),
    ([[1, 1]] * 2 + [[2, 2]] * 2, False),
    ([[1, 2]], True),
])  # fmt: skip
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_reference_constant_compares_all_samples(rows, constant, batch):
    left = floats(rows)
    assert output_statistics(left, left, batch=batch).reference_constant is constant


def statistics_without_batch_axis(batches, *, count=3):
    statistics = OutputStatistics("y", "float32")
    for number, batch in enumerate(batches):
        statistics.update(batch, batch + np.float32(number), Span(number * count, count))
    return statistics.result()


def test_output_without_batch_axis_is_compared_per_batch():
    time_major = np.arange(20, dtype=np.float32).reshape(5, 4)
    result = statistics_without_batch_axis([time_major, time_major + 1])
    assert (result.samples, result.elements) == (6, 40)
    assert result.max_abs_diff == 1.0
    assert result.max_abs_diff_sample == 3
    assert result.l2_max == pytest.approx(math.sqrt(20))
    assert result.l2_mean == pytest.approx(math.sqrt(20) / 2)
    assert result.reference_constant is False
    assert result.classification is None


@pytest.mark.parametrize(("batches", "constant"), [
    ([np.arange(5, dtype=np.float32)], False),
    ([np.ones(5, np.float32)], True),
    ([np.arange(5, dtype=np.float32)] * 2, True),
    ([np.float32(1).reshape(())] * 2, True),
    ([np.float32(1).reshape(()), np.float32(2).reshape(())], False),
    ([np.zeros(5, np.float32), np.zeros(1, np.float32)], False),
])  # fmt: skip
def test_reference_constant_without_batch_axis_compares_batches(batches, constant):
    assert statistics_without_batch_axis(batches).reference_constant is constant


@pytest.mark.parametrize("shapes", [[(3, 6), (4, 6)], [(3, 6), (3, 7)]], ids=["rows", "classes"])
def test_classification_is_none_when_shapes_of_batches_differ(shapes):
    statistics = OutputStatistics("y", "float32")
    for number, shape in enumerate(shapes):
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        statistics.update(array, array, Span(3 * number, 3))
    assert statistics.result().classification is None


@pytest.mark.parametrize(
    ("shape", "dtype", "logits"),
    [((4, 2), np.float32, True), ((4, 2), np.float16, True), ((4, 1), np.float32, False),
     ((4, 2), np.int64, False), ((4, 2, 2), np.float32, False), ((4,), np.float32, False)],
)  # fmt: skip
def test_only_two_dimensional_floats_are_logits(shape, dtype, logits):
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    assert (output_statistics(array, array).classification is not None) is logits


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_empty_output_has_zero_elements(shape):
    statistics = OutputStatistics("y", "float32")
    statistics.update(np.zeros(shape, np.float32), np.zeros(shape, np.float32), Span(0, 4))
    result = statistics.result()
    assert (result.samples, result.elements) == (4, 0)
    assert result.reference_constant
    assert result.max_abs_diff_sample is None
    for number in (result.max_abs_diff, result.mean_abs_diff, result.scaled_diff,
                   result.reference_std, result.reference_abs_max, result.l2_max, result.l2_mean):  # fmt: skip
        assert number == 0.0


def test_numpy_errstate_raise_has_no_effect():
    left = floats([[1, INF, 3], [3, 4, NAN]])
    with np.errstate(all="raise"):
        output_statistics(left, left[::-1].copy())


NUMBERS = st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([NAN, INF, -INF, 0.0, 1.0]))
PAIRS = hnp.arrays(np.float32, st.tuples(st.just(2), st.integers(3, 12), st.just(4)),
                   elements=NUMBERS)  # fmt: skip


def part(pair, start, stop):
    statistics = OutputStatistics("y", "float32")
    if stop > start:
        statistics.update(pair[0, start:stop], pair[1, start:stop], Span(start, stop - start))
    return statistics


@given(pair=PAIRS, cuts=st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_merge_is_associative_and_equals_one_pass(pair, cuts):
    n = pair.shape[1]
    first, second = sorted(min(cut, n) for cut in cuts)
    a, b, c = part(pair, 0, first), part(pair, first, second), part(pair, second, n)
    expected = part(pair, 0, n).result().model_dump()
    assert_close(a.merge(b).merge(c).result().model_dump(), expected)
    assert_close(a.merge(b.merge(c)).result().model_dump(), expected)
    assert_close(c.merge(a).merge(b).result().model_dump(), expected)


@given(
    values=hnp.arrays(np.float64, st.integers(2, 40), elements=st.floats(-1e9, 1e9)),
    cut=st.integers(1, 39),
    offset=st.sampled_from([0.0, 1e9]),
)
def test_merged_moments_match_numpy(values, cut, offset):
    values = values + offset
    merged = Moments.from_values(values[:cut]).merge(Moments.from_values(values[cut:]))
    assert merged.count == len(values)
    assert merged.mean == pytest.approx(values.mean(), rel=1e-12, abs=1e-3)
    assert merged.std == pytest.approx(values.std(), rel=1e-6, abs=1e-5 + 1e-9 * offset)


def test_deviations_of_equal_values_are_exactly_zero():
    values = np.full(7, 0.1)
    assert Moments.from_values(values).merge(Moments.from_values(values[:3])).deviations == 0.0


def mismatches(reference, candidate, *, start=0):
    result = IntegerMismatches()
    result.update(np.abs(candidate - reference).astype(np.float64), candidate, start=start)
    return result


R = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
C = np.array([[1, 2, 3], [4, 9, 7], [7, 8, 1]])


def test_differing_integer_samples_are_listed():
    assert mismatches(R, C, start=10).doubtful == [11, 12]


@pytest.mark.parametrize(("alternative", "excused"), [
    ([[4, 9, 6]], 1), ([[4, 9, 7]], 2), ([[4, 5, 6]], 0), ([[3, 8, 5]], 0), ([[4]], 0),
])  # fmt: skip
def test_only_elements_that_rounding_produces_are_accepted_as_ties(alternative, excused):
    result = mismatches(R, C)
    result.accept_ties(1, np.array(alternative))
    assert result.excused == excused


def test_remaining_mismatches_exclude_accepted_ties():
    result = mismatches(R, C)
    result.accept_ties(1, np.array([[4, 9, 6]]))
    worst, total, (norms, largest) = result.remaining()
    assert (worst.value, worst.sample) == (8.0, 2)
    assert total == 9.0
    assert (norms, largest) == (9.0, 8.0)


def test_no_tie_is_accepted_when_too_many_elements_differ():
    many = np.zeros((1, MAX_KEPT + 1), np.int64)
    result = mismatches(many, many + 1)
    result.accept_ties(0, many + 1)
    assert result.doubtful == []
    assert result.excused == 0


def test_merged_integer_mismatches_equal_one_pass():
    statistics_without_batch_axis, first, rest = (
        mismatches(R, C),
        mismatches(R[:2], C[:2]),
        IntegerMismatches(),
    )
    rest.update(np.abs(C - R)[2:].astype(np.float64), C[2:], start=2)
    assert first.merge(rest).remaining() == statistics_without_batch_axis.remaining()


def test_alternatives_of_different_size_are_ignored():
    result = mismatches(R, C)
    result.accept_ties(1, np.array([[4, 9]]))
    result.accept_ties(1, np.array([[4, 9, 7, 7]]))
    assert result.excused == 0


def test_ties_of_several_runs_accumulate():
    result = mismatches(R, C)
    assert result.unexplained(1) == 2
    result.accept_ties(1, np.array([[4, 9, 6]]))
    assert result.unexplained(1) == 1
    result.accept_ties(1, np.array([[4, 5, 7]]))
    assert (result.unexplained(1), result.excused, result.doubtful) == (0, 2, [2])
