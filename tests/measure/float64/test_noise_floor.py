"""The noise ratio and the rounding floor: formula, properties, and faults they must not hide."""

from __future__ import annotations

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from gate.measure.noise_floor import (
    KEPT,
    MORE_DRAWS,
    NoiseStatistics,
    OutlierTracker,
    rounding_floor,
)
from gate.records.instruments import NoiseParity, noise_floor
from gate.statistics.error_groups import CANDIDATE
from gate.statistics.output import Span
from tests.measure.close import assert_close
from tests.modules import Function, Layers
from tests.probes import benches

NAN, INF = math.nan, math.inf
EPSILON = 2.0**-24


def measure_noise(truth, reference, candidate) -> NoiseParity:
    statistics = NoiseStatistics(columns=True)
    statistics.update(truth, reference, candidate, samples=len(truth))
    return statistics.result()


def rms(values) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def make_logits(seed: int = 0, *, scale: float = 1.0):
    """Return the truth, the reference and a correct candidate, each of shape (32, 10)."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(32, 10)) * scale
    reference, candidate = (truth + rng.normal(size=truth.shape) * 1e-6 * scale for _ in range(2))
    return truth, reference, candidate


def test_noise_ratio_formula():
    truth, reference, candidate = make_logits()
    candidate = truth + 3.0 * (candidate - truth)
    result = measure_noise(truth, reference, candidate)
    assert result.samples == 32
    assert result.elements == 320
    assert result.truth_rms == pytest.approx(rms(truth))
    assert result.reference_rms == pytest.approx(rms(reference - truth))
    assert result.candidate_rms == pytest.approx(rms(candidate - truth))
    assert result.group is None
    expected = rms(candidate - truth) / rms(reference - truth) / result.scatter
    assert expected <= result.ratio * (1.0 + 1e-9) < 1.1 * expected
    floor = np.abs(reference - truth).max()
    assert result.floor_peak == pytest.approx(floor)
    assert result.diff * result.scatter == pytest.approx(
        np.abs(candidate - reference).max() / floor
    )


@pytest.mark.parametrize("late", [1.0, math.nan, math.inf])
def test_late_diff_replaces_diff(late):
    statistics = NoiseStatistics()
    statistics.update(*make_logits(), samples=32)
    assert statistics.result(diff=late).diff == pytest.approx(late, nan_ok=True)


UNITS = np.array([1e6, 1e6, 1e3, 1.0, 1e-3, 1.0, 1.0, 1e-6, 1e9, 1.0])


@pytest.mark.parametrize("column", [3, 4, 7])
@pytest.mark.parametrize("factor", [-1.0, 1.001, 1.0 + 2.0**-11])
def test_wrong_column_next_to_larger_ones_is_named(column, factor):
    truth, reference, candidate = (array * UNITS for array in make_logits())
    assert measure_noise(truth, reference, candidate).ratio < 1.2
    candidate[:, column] *= factor
    result = measure_noise(truth, reference, candidate)
    assert result.ratio > 50
    assert result.group == f"column {column}"


def test_wrong_channel_is_named():
    truth, reference, candidate = (a.reshape(16, 4, 5) for a in make_logits())
    for array in (truth, reference, candidate):
        array[:, 0] *= 1e6
    candidate[:, 2] *= 1.001
    assert measure_noise(truth, reference, candidate).group == "channel 2"


@pytest.mark.parametrize("shape", [(12, 4, 5), (80, 3)], ids=["time first", "flat boxes"])
def test_output_without_batch_axis_has_columns(shape):
    truth, reference, candidate = (np.resize(array, shape) for array in make_logits())
    for array in (truth, reference, candidate):
        array[..., :2] *= 100.0
    candidate[..., 2] *= 1.00002
    statistics = NoiseStatistics(columns=True)
    statistics.update(truth, reference, candidate, samples=32)
    result = statistics.result()
    assert result.ratio > 5
    assert result.group == "column 2"


def test_closer_side_refers_to_the_group_of_the_ratio():
    """Compare the sides on the group with the largest ratio, although the candidate is closer over
    all elements because of the column of large numbers.
    """
    truth, reference, candidate = (array * UNITS for array in make_logits())
    candidate[:, 8] = truth[:, 8]
    candidate[:, 4] *= -1.0
    result = measure_noise(truth, reference, candidate)
    assert result.candidate_rms < result.reference_rms
    assert result.closer == "reference"


def test_axis_of_changing_length_has_no_columns():
    """Report no columns if an axis changes its length, as for pairs of samples in a smaller last
    batch.
    """
    rng = np.random.default_rng(0)
    statistics = NoiseStatistics(columns=True)
    for size in (8, 8, 3):
        truth = rng.normal(size=(size, size))
        statistics.update(truth, truth + 1e-7, truth - 1e-7, samples=size)
    assert statistics.result().elements == 64 + 64 + 9
    assert [group.axis for group in statistics.floors()] == [0]


@pytest.mark.parametrize("scale", [1e-14, 1e-3, 1.0, 1e12])
def test_ratio_does_not_depend_on_scale(scale):
    assert measure_noise(*make_logits(scale=scale)).ratio == pytest.approx(
        measure_noise(*make_logits()).ratio, rel=1e-6
    )


def test_exact_reference_has_a_floor_of_half_an_ulp():
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
def test_closer_side(reference, candidate, closer):
    truth = np.ones((4, 3))
    assert measure_noise(truth, truth + reference / 8, truth - candidate / 8).closer == closer


@pytest.mark.parametrize("mask", [-1e9, -1e4, -float(np.finfo(np.float32).max)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.7, 0.95])
def test_large_constant_masks_do_not_hide_errors(mask, share):
    """Find an error of 0.1 % in a column next to constant masks, which have no error."""
    truth, reference, _ = make_logits()
    wrong = truth * 1.001
    is_masked = np.random.default_rng(1).random(truth.shape) < share
    for array in (truth, reference, wrong):
        array[is_masked] = mask
    result = measure_noise(truth, reference, wrong)
    assert result.ratio > 150
    assert result.peak > 150
    assert measure_noise(truth, reference, reference).ratio <= 1.0


def test_masks_changed_by_rounding_do_not_hide_errors():
    """Find an error although rounding is a thousand times larger at masks near -1e4."""
    rng = np.random.default_rng(1)
    truth, reference, wrong = make_logits()
    is_masked = rng.random(truth.shape) < 0.95
    for array in (truth, reference, wrong):
        array[is_masked] -= 1e4
    reference[is_masked] += rng.normal(size=is_masked.sum()) * 1e-3
    wrong[is_masked] += rng.normal(size=is_masked.sum()) * 1e-3
    wrong[~is_masked] += 1e-3
    assert measure_noise(truth, reference, wrong).ratio > 50


def test_zeros_changed_by_rounding_do_not_set_the_scale():
    """Ignore zeros in the scale: after a ReLU, rounding decides which elements are zero."""
    truth, reference, candidate = (np.maximum(array, 0.0) for array in make_logits())
    truth[truth < 0.3] = 0.0
    assert measure_noise(truth, reference, candidate).ratio < 3.0


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nonfinite_candidate_has_infinite_ratio(value):
    truth, reference, candidate = make_logits()
    candidate[3, 3] = value
    result = measure_noise(truth, reference, candidate)
    assert result.ratio == result.peak == INF


@pytest.mark.parametrize("side", ["truth", "reference"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_elements_without_finite_truth_are_excluded(side, value):
    """Exclude elements without finite truth; the check `finite` covers them."""
    truth, reference, candidate = make_logits()
    (truth if side == "truth" else reference)[3, 3] = value
    result = measure_noise(truth, reference, candidate)
    assert result.elements == 319
    assert math.isfinite(result.ratio)


def test_noise_without_elements_is_zero():
    for result in (
        NoiseStatistics().result(),
        measure_noise(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3))),
        measure_noise(np.full((2, 3), NAN), np.zeros((2, 3)), np.zeros((2, 3))),
    ):
        assert result.elements == 0
        assert (result.ratio, result.peak, result.candidate_rms) == (0.0, 0.0, 0.0)


def test_subnormal_error_on_zeros_is_within_the_floor():
    zeros = np.zeros((4, 3))
    assert measure_noise(zeros, zeros, zeros).ratio == 0.0
    assert 0.0 < measure_noise(zeros, zeros, zeros + 2.0**-126).ratio <= 1.0
    assert measure_noise(zeros, zeros, zeros + 1e-30).ratio > 1e6


def noise_statistics(truth, reference, candidate) -> NoiseStatistics:
    statistics = NoiseStatistics()
    statistics.update(truth, reference, candidate, samples=len(truth))
    return statistics


@pytest.mark.parametrize(("times", "unit"), [(0.1, 1.0), (1.0, 1.0), (5.0, 5.0)])
def test_random_rounding_widens_the_floor(times, unit):
    truth, reference, candidate = make_logits()
    rounded = truth + (reference - truth) * times
    statistics = noise_statistics(truth, reference, candidate)
    without_rounding = statistics.result()
    widened = statistics.result(rounding=noise_statistics(truth, reference, rounded))
    assert without_rounding.rounding_rms is None
    assert widened.rounding_rms == pytest.approx(times * without_rounding.reference_rms)
    for name in ("ratio", "peak", "diff"):
        assert getattr(widened, name) == pytest.approx(getattr(without_rounding, name) / unit)
    assert widened.ratio == pytest.approx(
        widened.candidate_rms / widened.floor_rms / widened.scatter
    )


def test_random_rounding_does_not_hide_infinity():
    truth, reference, candidate = make_logits()
    candidate[3, 3] = INF
    rounding = noise_statistics(truth, reference, truth + 1e9)
    assert noise_statistics(truth, reference, candidate).result(rounding=rounding).ratio == INF


@pytest.mark.parametrize("place", range(3))
def test_nan_in_the_floor_is_propagated(place):
    errors = [1.0, 1.0, 1.0]
    errors[place] = NAN
    assert math.isnan(noise_floor(*errors))


ARRAYS = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 6), st.just(3)),
    elements=st.floats(-1e6, 1e6) | st.sampled_from([0.0, NAN, INF, 1e-310]),
)


@given(ARRAYS, st.data())
def test_merged_noise_equals_one_pass(truth, data):
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
    expected = NoiseStatistics(columns=True)
    expected.update(truth, reference, candidate, samples=len(truth))
    expected = expected.result().model_dump()
    assert_close(parts[0].merge(parts[1]).result().model_dump(), expected)
    assert_close(parts[1].merge(parts[0]).result().model_dump(), expected)
    assert_close(
        NoiseStatistics(columns=True).merge(parts[0]).merge(parts[1]).result().model_dump(),
        expected,
    )


@given(st.integers(0, 319), st.floats(1e-5, 1e6))
def test_wrong_element_never_decreases_peak_or_ratio(place, amount):
    truth, reference, candidate = make_logits()
    original = measure_noise(truth, reference, candidate)
    candidate.flat[place] += math.copysign(amount, candidate.flat[place] - truth.flat[place])
    increased = measure_noise(truth, reference, candidate)
    assert increased.peak >= original.peak
    assert increased.ratio >= original.ratio


SCALE = np.array([1.0, 1e6, 1e-3])


def first_floors(rng, *, scale=SCALE, first_error=0.0):
    """Return the noise floors of 32 first samples. `first_error`: the error of one of them."""
    noise = NoiseStatistics(columns=True)
    truth = rng.normal(size=(32, 3)) * scale
    reference, candidate = (truth + rng.normal(size=truth.shape) * 1e-7 * scale for _ in range(2))
    reference[5] += first_error * scale
    noise.update(truth, reference, candidate, samples=32)
    return noise.floors()


def track_late_samples(reference, candidate, *, scale=SCALE, first_error=0.0):
    errors = OutlierTracker(
        first_floors(np.random.default_rng(0), scale=scale, first_error=first_error)
    )
    errors.update(reference, candidate, Span(32, len(reference)))
    return errors


def make_late_values(count=100, *, size=1.0):
    rng = np.random.default_rng(1)
    reference = rng.normal(size=(count, 3)) * SCALE * size
    return reference, reference + rng.normal(size=reference.shape) * 1e-7 * SCALE * size


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_late_error_is_relative_to_the_size_of_the_values(size):
    errors = track_late_samples(*make_late_values(size=size))
    assert errors.worst < 100.0
    assert len(errors.doubtful) < 0.2 * 100


@pytest.mark.parametrize("column", range(3))
def test_late_sample_with_one_wrong_column_is_doubtful(column):
    reference, candidate = make_late_values()
    candidate[70, column] *= 1.001
    assert track_late_samples(reference, candidate).doubtful == [102]


def test_recorded_analysis_replaces_the_score():
    reference, candidate = make_late_values()
    candidate[70, 0] += 1.0
    errors = track_late_samples(reference, candidate)
    errors.record(102, by_rounding=1.5, by_first=1.5)
    assert errors.worst < 8.0


def test_large_difference_is_doubtful_for_any_floor():
    reference, candidate = make_late_values()
    candidate[70] *= 1.2
    errors = track_late_samples(reference, candidate, first_error=10.0)
    assert errors.doubtful == [102]
    errors.record(102, by_rounding=1e5, by_first=0.1)
    assert errors.worst == 1e5


@pytest.mark.parametrize(("axis", "count", "doubtful"), [(1, 100, 102), (None, 50, 32)])
def test_late_samples_on_another_axis(axis, count, doubtful):
    """Find a wrong late sample on axis 1, as in the states of an LSTM (layers, samples, width).
    Score an output without batch axis per batch.
    """
    reference, candidate = make_late_values()
    candidate[70] *= 1.2
    errors = OutlierTracker(first_floors(np.random.default_rng(0)), axis=axis)
    sides = (side[None] if axis else side for side in (reference, candidate))
    errors.update(*sides, Span(32, count))
    assert errors.doubtful == [doubtful]


def test_discarded_doubtful_samples_keep_the_worst_score():
    reference, candidate = make_late_values(3 * KEPT)
    errors = track_late_samples(reference, candidate + 1.0)
    for sample in errors.doubtful:
        errors.record(sample, by_rounding=0.0, by_first=0.0)
    assert errors.worst > 8.0


def test_zero_column_uses_the_floor_of_the_whole_output():
    scale = np.array([1.0, 0.0, 1.0])
    reference = np.full((4, 3), 2.0)
    assert track_late_samples(reference, reference + 1e-7, scale=scale).worst < 8.0
    assert track_late_samples(reference, reference + 1e-3, scale=scale).worst > 8.0


def test_nonfinite_late_sample_is_ignored():
    reference, candidate = make_late_values()
    candidate[5, 0] = np.nan
    assert track_late_samples(reference, candidate).worst < 8.0


@pytest.mark.parametrize("cuts", [(1,), (100,), (299,), (10, 20, 250)])
def test_merged_trackers_equal_one_pass(cuts):
    reference, candidate = make_late_values(300)
    candidate[200:280, 1] *= 1.01
    rng = np.random.default_rng(0)
    floors = first_floors(rng)
    one_pass = OutlierTracker(floors)
    one_pass.update(reference, candidate, Span(32, 300))
    parts = []
    for start, stop in itertools.pairwise((0, *cuts, 300)):
        parts.append(OutlierTracker(floors))
        parts[-1].update(
            reference[start:stop], candidate[start:stop], Span(32 + start, stop - start)
        )
    merged = functools.reduce(OutlierTracker.merge, parts)
    assert merged.worst == one_pass.worst
    assert merged.doubtful == one_pass.doubtful
    assert len(merged._scores) == KEPT
    assert merged._unstored == one_pass._unstored > 0.0


X = {"x": benches.vectors(count=20)}


def measure_floors(model, arrays=None, *, draws=3, **options):
    context = benches.create_context(model, arrays or X, **options)
    with torch.inference_mode():
        return rounding_floor(context, draws=draws)


def make_wide() -> nn.Module:
    """Return a mean of very many numbers; PyTorch adds pairwise, ONNX Runtime does not."""
    return Layers(
        lambda m, x: m.head(torch.relu(m.expand(x)).mean((2, 3))),
        expand=lambda: nn.Conv2d(3, 16, 1),
        head=lambda: nn.Linear(16, 7),
    )


SEVERAL = Function(lambda x: (x * 1.7, x.argmax(1), torch.exp(x)))


class Flips(nn.Module):
    """A model with large errors in some of its runs; the first two runs are the reference's."""

    def __init__(self, runs):
        super().__init__()
        self.runs = runs
        self.run_count = 0

    def forward(self, x):
        self.run_count += 1
        return x * (1e6 if self.run_count in self.runs else 1.1)


class OnlyPlainRounding(nn.Module):
    """A model that raises an error if its operators are rounded differently."""

    def forward(self, x):
        if (x * 1.1 != x * 1.1 * 1.0).any():
            raise ValueError("not today")
        return x


class DistanceBuckets(nn.Module):
    """A model with logarithmic distance buckets, as in language models.

    Distances 2 and 4 lie on the edge of a bucket, where rounding decides.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Embedding(8, 1)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        indices = torch.arange(x.shape[1])
        distances = (indices[None] - indices[:, None]).abs()
        far = 1 + (torch.log(distances.float()) / math.log(8) * 6).clamp(min=0).to(torch.long)
        weights = self.bias(torch.where(distances < 1, distances, far))[..., 0]
        return (torch.softmax(weights, -1) @ x[..., None])[..., 0] * self.gain


def test_each_float_output_has_a_rounding_floor():
    product, integers, powers = (floor and floor.result() for floor in measure_floors(SEVERAL))
    assert integers is None
    assert product.samples == powers.samples == 24 - 4
    assert powers.candidate_rms / powers.truth_rms > 2.0 * product.candidate_rms / product.truth_rms
    assert 0.2 * 2.0**-24 < product.candidate_rms / product.truth_rms < 2.0 * 2.0**-24


def test_rounding_floor_uses_only_samples_with_truth():
    (floor,) = measure_floors(make_wide(), {"x": benches.images(40)}, noise_samples=10, size=4)
    assert floor.result().samples == 12


@pytest.mark.parametrize(("model", "options"), [
    (SEVERAL, {"noise_samples": 0}),
    (OnlyPlainRounding(), {}),
], ids=["no float64 reference", "not computable"])  # fmt: skip
def test_unmeasurable_rounding_floor_is_empty(model, options):
    assert measure_floors(model, **options) == []


def test_rounding_floor_reuses_computed_answers():
    context, forwards = benches.create_context(nn.Linear(6, 5), X), []
    context.model.module.register_forward_hook(lambda *_: forwards.append("float32"))
    truth = context.truth.extra_outputs
    context.truth.extra_outputs = lambda batch: forwards.append("float64") or truth(batch)
    with torch.inference_mode():
        without_cache = rounding_floor(benches.create_context(context.model.module, X))
        for batch in context.samples.batches(8):
            context.answers.note(batch, context.reference.run(batch), truth(batch))
        context.answers.note_reference(context.example, context.reference.run(context.example))
        forwards.clear()
        floor = rounding_floor(context)
    assert forwards == ["float32"] * 9  # three runs of three batches
    assert floor[0].result() == without_cache[0].result()


def test_exact_runtime_needs_no_rounding_runs(tmp_path):
    model = nn.Linear(6, 5).eval()
    candidate = benches.export(model, tmp_path / "model.onnx", X)
    (runtime,) = benches.measured(model, candidate, X, probes=False).runtimes
    assert runtime.outputs[0].noise.ratio <= 1.25
    assert runtime.outputs[0].noise.rounding_rms is None


@pytest.mark.parametrize("factor", [1.0 + 2e-5, 0.9])
def test_fault_above_the_rounding_floor_is_found(factor, tmp_path):
    arrays = {"x": benches.images()}
    model = make_wide().eval()
    wrong = copy.deepcopy(model)
    wrong.expand.weight.data[3] *= factor
    candidate = benches.export(wrong, tmp_path / "model.onnx", arrays)
    (runtime,) = benches.measured(model, candidate, arrays, probes=False).runtimes
    assert runtime.outputs[0].noise.rounding_rms is not None
    assert runtime.outputs[0].noise.ratio > 3.0


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.0 + 1e-4, False), (1.01, False)])
def test_buckets_of_positions_do_not_widen_the_floor(factor, right, tmp_path):
    """Keep position buckets fixed: a bucket changed by rounding would widen the floor and hide
    errors.
    """
    model = DistanceBuckets().eval()
    wrong = copy.deepcopy(model)
    wrong.gain.data *= factor
    candidate = benches.export(wrong, tmp_path / "model.onnx", X)
    (runtime,) = benches.measured(model, candidate, X, probes=False).runtimes
    assert (runtime.outputs[0].noise.ratio <= 1.5) == right


@pytest.mark.parametrize(("runs", "widens"), [((3,), False), ((5,), False), ((3, 5), True)])
def test_rare_flip_does_not_widen_the_floor(runs, widens):
    (floor,) = measure_floors(Flips(runs), size=20)
    assert (floor.result().candidate_rms > 1.0) is widens


def test_more_runs_reduce_columns_with_a_small_floor():
    """Use more runs when one of eight samples has errors a hundred times larger, because it alone
    sets the floor of each of 1000 columns.
    """
    random = np.random.default_rng(0)
    truth = random.normal(size=(8, 1000))
    size = np.where(np.arange(8) == 7, 1e-5, 1e-7)[:, None]

    def run():
        statistics = NoiseStatistics(columns=True)
        errors = random.normal(size=truth.shape) * size
        statistics.update(truth, truth + 1e-9, truth + errors, samples=8)
        return statistics

    runtime = run().floors()[-1].tally.rms(CANDIDATE)
    off = {}
    for draws in (3, MORE_DRAWS):
        floor = NoiseStatistics.median([run() for _ in range(draws)])
        off[draws] = float((runtime / floor.floors()[-1].tally.rms(CANDIDATE)).max())
    assert off[3] > 15.0
    assert off[MORE_DRAWS] < 10.0
