"""The noise ratio and the floor of rounding: formula, laws, and what they must not hide."""

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
from tests.probes import benches

NAN, INF = math.nan, math.inf
EPSILON = 2.0**-24


def noise_of(truth, reference, candidate) -> NoiseParity:
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
    result = noise_of(truth, reference, candidate)
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
    assert noise_of(truth, reference, candidate).ratio < 1.2
    candidate[:, column] *= factor
    result = noise_of(truth, reference, candidate)
    assert result.ratio > 50
    assert result.group == f"column {column}"


def test_a_wrong_channel_is_named():
    truth, reference, candidate = (a.reshape(16, 4, 5) for a in logits())
    for array in (truth, reference, candidate):
        array[:, 0] *= 1e6
    candidate[:, 2] *= 1.001
    assert noise_of(truth, reference, candidate).group == "channel 2"


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
    result = noise_of(truth, reference, candidate)
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
    assert noise_of(truth, reference, wrong).ratio > 1000


@pytest.mark.parametrize("scale", [1e-14, 1e-3, 1.0, 1e12])
def test_the_scale_of_the_logits_does_not_matter(scale):
    assert noise_of(*logits(scale=scale)).ratio == pytest.approx(
        noise_of(*logits()).ratio, rel=1e-6
    )


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
    assert noise_of(truth, truth + reference / 8, truth - candidate / 8).closer == closer


@pytest.mark.parametrize("mask", [-1e9, -1e4, -float(np.finfo(np.float32).max)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.7, 0.95])
def test_huge_constants_hide_nothing(mask, share):
    """A masked output: the constants are exact on all sides, the rest is off by 1 per mille."""
    truth, reference, _ = logits()
    wrong = truth * 1.001
    masked = np.random.default_rng(1).random(truth.shape) < share
    for array in (truth, reference, wrong):
        array[masked] = mask
    result = noise_of(truth, reference, wrong)
    assert result.ratio > 150
    assert result.peak > 150
    assert noise_of(truth, reference, reference).ratio <= 1.0


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
    assert noise_of(truth, reference, wrong).ratio > 50


def test_zeros_that_differ_by_rounding_are_no_scale_of_their_own():
    """After a ReLU most elements are exactly zero, and rounding decides which."""
    truth, reference, candidate = (np.maximum(array, 0.0) for array in logits())
    truth[truth < 0.3] = 0.0
    assert noise_of(truth, reference, candidate).ratio < 3.0


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_candidate_that_is_not_finite_where_the_truth_is(value):
    truth, reference, candidate = logits()
    candidate[3, 3] = value
    result = noise_of(truth, reference, candidate)
    assert result.ratio == result.peak == INF


@pytest.mark.parametrize("side", ["truth", "reference"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_elements_without_a_finite_truth_are_left_out(side, value):
    """The check `finite` judges them."""
    truth, reference, candidate = logits()
    (truth if side == "truth" else reference)[3, 3] = value
    result = noise_of(truth, reference, candidate)
    assert result.elements == 319
    assert math.isfinite(result.ratio)


def test_without_elements_every_number_is_zero():
    for result in (
        NoiseStatistics().result(),
        noise_of(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3))),
        noise_of(np.full((2, 3), NAN), np.zeros((2, 3)), np.zeros((2, 3))),
    ):
        assert result.elements == 0
        assert (result.ratio, result.peak, result.candidate_rms) == (0.0, 0.0, 0.0)


def test_on_zeros_only_what_a_runtime_may_flush_to_zero_is_no_error():
    zeros = np.zeros((4, 3))
    assert noise_of(zeros, zeros, zeros).ratio == 0.0
    assert 0.0 < noise_of(zeros, zeros, zeros + 2.0**-126).ratio <= 1.0
    assert noise_of(zeros, zeros, zeros + 1e-30).ratio > 1e6


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
        NoiseStatistics(columns=True).merge(parts[0]).merge(parts[1]).result().model_dump(), whole
    )


@given(st.integers(0, 319), st.floats(1e-5, 1e6))
def test_one_wrong_element_never_lowers_the_peak(place, amount):
    truth, reference, candidate = logits()
    before = noise_of(truth, reference, candidate)
    candidate.flat[place] += math.copysign(amount, candidate.flat[place] - truth.flat[place])
    after = noise_of(truth, reference, candidate)
    assert after.peak >= before.peak
    assert after.ratio >= before.ratio


SCALE = np.array([1.0, 1e6, 1e-3])


def first(rng, *, scale=SCALE, spoilt=0.0):
    """`spoilt`: the error of one sample among them."""
    noise = NoiseStatistics(columns=True)
    truth = rng.normal(size=(32, 3)) * scale
    reference, candidate = (truth + rng.normal(size=truth.shape) * 1e-7 * scale for _ in range(2))
    reference[5] += spoilt * scale
    noise.update(truth, reference, candidate, samples=32)
    return noise.floors()


def late(reference, candidate, *, scale=SCALE, spoilt=0.0):
    errors = OutlierTracker(first(np.random.default_rng(0), scale=scale, spoilt=spoilt))
    errors.update(reference, candidate, Span(32, len(reference)))
    return errors


def late_values(count=100, *, size=1.0):
    rng = np.random.default_rng(1)
    reference = rng.normal(size=(count, 3)) * SCALE * size
    return reference, reference + rng.normal(size=reference.shape) * 1e-7 * SCALE * size


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_larger_values_may_be_off_by_more(size):
    errors = late(*late_values(size=size))
    assert errors.worst < 100.0
    assert len(errors.doubtful) < 0.2 * 100


@pytest.mark.parametrize("column", range(3))
def test_a_sample_that_is_wrong_in_one_column_is_doubtful(column):
    reference, candidate = late_values()
    candidate[70, column] *= 1.001
    assert late(reference, candidate).doubtful == [102]


def test_a_second_look_settles_a_score():
    reference, candidate = late_values()
    candidate[70, 0] += 1.0
    errors = late(reference, candidate)
    errors.record(102, by_own=1.5, by_first=1.5)
    assert errors.worst < 8.0


def test_a_plain_difference_is_doubtful_however_wide_the_floor_of_the_first_is():
    reference, candidate = late_values()
    candidate[70] *= 1.2
    errors = late(reference, candidate, spoilt=10.0)
    assert errors.doubtful == [102]
    errors.record(102, by_own=1e5, by_first=0.1)
    assert errors.worst == 1e5


def test_samples_may_lie_on_another_axis():
    """As in the states of an LSTM, (layers, samples, width)."""
    reference, candidate = late_values()
    candidate[70] *= 1.2
    errors = OutlierTracker(first(np.random.default_rng(0)), axis=1)
    errors.update(reference[None], candidate[None], Span(32, len(reference)))
    assert errors.doubtful == [102]


def test_an_output_without_samples_has_a_score_for_each_batch():
    reference, candidate = late_values()
    candidate[70] *= 1.2
    errors = OutlierTracker(first(np.random.default_rng(0)), axis=None)
    errors.update(reference, candidate, Span(32, 50))
    assert errors.doubtful == [32]


def test_more_doubtful_samples_than_are_kept_are_not_forgotten():
    reference, candidate = late_values(3 * KEPT)
    errors = late(reference, candidate + 1.0)
    for sample in errors.doubtful:
        errors.record(sample, by_own=0.0, by_first=0.0)
    assert errors.worst > 8.0


def test_a_column_that_was_zero_among_the_first_has_the_floor_of_the_whole():
    scale = np.array([1.0, 0.0, 1.0])
    reference = np.full((4, 3), 2.0)
    assert late(reference, reference + 1e-7, scale=scale).worst < 8.0
    assert late(reference, reference + 1e-3, scale=scale).worst > 8.0


def test_what_is_not_finite_is_left_to_another_check():
    reference, candidate = late_values()
    candidate[5, 0] = np.nan
    assert late(reference, candidate).worst < 8.0


@pytest.mark.parametrize("cuts", [(1,), (100,), (299,), (10, 20, 250)])
def test_merged_it_is_as_in_one_stream(cuts):
    reference, candidate = late_values(300)
    candidate[200:280, 1] *= 1.01
    rng = np.random.default_rng(0)
    floors = first(rng)
    whole = OutlierTracker(floors)
    whole.update(reference, candidate, Span(32, 300))
    parts = []
    for start, stop in itertools.pairwise((0, *cuts, 300)):
        parts.append(OutlierTracker(floors))
        parts[-1].update(
            reference[start:stop], candidate[start:stop], Span(32 + start, stop - start)
        )
    merged = functools.reduce(OutlierTracker.merge, parts)
    assert merged.worst == whole.worst
    assert merged.doubtful == whole.doubtful
    assert len(merged._scores) == KEPT
    assert merged._other == whole._other > 0.0


X = {"x": benches.vectors(count=20)}


def floors(model, arrays=None, *, draws=3, **options):
    stand = benches.stand(model, arrays or X, **options)
    with torch.inference_mode():
        return rounding_floor(stand, draws=draws)


class Wide(nn.Module):
    """A mean of very many numbers, which PyTorch adds pairwise and ONNX Runtime does not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.expand = nn.Conv2d(3, 16, 1)
        self.head = nn.Linear(16, 7)

    def forward(self, x):
        return self.head(torch.relu(self.expand(x)).mean((2, 3)))


class Several(nn.Module):
    def forward(self, x):
        return x * 1.7, x.argmax(1), torch.exp(x)


class Flips(nn.Module):
    """Answers something else entirely in some of its runs; the first two are the reference's."""

    def __init__(self, runs):
        super().__init__()
        self.runs = runs
        self.done = 0

    def forward(self, x):
        self.done += 1
        return x * (1e6 if self.done in self.runs else 1.1)


class Exactly(nn.Module):
    """Refuses to be computed otherwise than PyTorch does."""

    def forward(self, x):
        if (x * 1.1 != x * 1.1 * 1.0).any():
            raise ValueError("not today")
        return x


class Distant(nn.Module):
    """Six places that look at each other by the logarithm of their distances, as a language model
    does: 2 and 4 lie on the edge of a bucket, where rounding decides which one it is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Embedding(8, 1)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        places = torch.arange(x.shape[1])
        distances = (places[None] - places[:, None]).abs()
        far = 1 + (torch.log(distances.float()) / math.log(8) * 6).clamp(min=0).to(torch.long)
        weights = self.bias(torch.where(distances < 1, distances, far))[..., 0]
        return (torch.softmax(weights, -1) @ x[..., None])[..., 0] * self.gain


def test_one_floor_for_each_output_of_floats():
    product, places, powers = (floor and floor.result() for floor in floors(Several()))
    assert places is None
    assert product.samples == powers.samples == 24 - 4
    assert powers.candidate_rms / powers.truth_rms > 2.0 * product.candidate_rms / product.truth_rms
    assert 0.2 * 2.0**-24 < product.candidate_rms / product.truth_rms < 2.0 * 2.0**-24


def test_only_the_samples_with_a_truth_count():
    (floor,) = floors(Wide(), {"x": benches.images(40)}, noise_samples=10, size=4)
    assert floor.result().samples == 12


@pytest.mark.parametrize(("model", "options"), [
    (Several(), {"noise_samples": 0}),
    (Exactly(), {}),
], ids=["no float64 reference", "not computable"])  # fmt: skip
def test_what_can_not_be_measured_widens_nothing(model, options):
    assert floors(model, **options) == []


def test_what_the_pass_over_the_samples_computed_is_not_computed_again():
    stand, forwards = benches.stand(nn.Linear(6, 5), X), []
    stand.model.module.register_forward_hook(lambda *_: forwards.append("float32"))
    truth = stand.truth.aside
    stand.truth.aside = lambda batch: forwards.append("float64") or truth(batch)
    with torch.inference_mode():
        alone = rounding_floor(benches.stand(stand.model.module, X))
        for batch in stand.samples.batches(8):
            stand.answers.note(batch, stand.reference.run(batch), truth(batch))
        stand.answers.note_reference(stand.example, stand.reference.run(stand.example))
        forwards.clear()
        floor = rounding_floor(stand)
    assert forwards == ["float32"] * 9  # three runs of three batches
    assert floor[0].result() == alone[0].result()


def test_a_mean_of_many_numbers_is_no_fault(tmp_path):
    arrays = {"x": np.random.default_rng(0).random((12, 3, 224, 224), dtype=np.float32)}
    model = Wide().eval()
    candidate = benches.export(model, tmp_path / "model.onnx", arrays)
    (runtime,) = benches.measured(model, candidate, arrays, probes=False).runtimes
    noise = runtime.outputs[0].noise
    assert noise.candidate_rms > 1.25 * noise.reference_rms
    assert noise.rounding_rms > noise.candidate_rms
    assert noise.ratio < 1.0


def test_a_runtime_as_exact_as_pytorch_costs_no_further_runs(tmp_path):
    model = nn.Linear(6, 5).eval()
    candidate = benches.export(model, tmp_path / "model.onnx", X)
    (runtime,) = benches.measured(model, candidate, X, probes=False).runtimes
    assert runtime.outputs[0].noise.ratio <= 1.25
    assert runtime.outputs[0].noise.rounding_rms is None


@pytest.mark.parametrize("factor", [1.0 + 2e-5, 0.9])
def test_a_fault_is_seen_above_the_floor(factor, tmp_path):
    arrays = {"x": benches.images()}
    model = Wide().eval()
    wrong = copy.deepcopy(model)
    wrong.expand.weight.data[3] *= factor
    candidate = benches.export(wrong, tmp_path / "model.onnx", arrays)
    (runtime,) = benches.measured(model, candidate, arrays, probes=False).runtimes
    assert runtime.outputs[0].noise.rounding_rms is not None
    assert runtime.outputs[0].noise.ratio > 3.0


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.0 + 1e-4, False), (1.01, False)])
def test_what_is_decided_on_places_alone_hides_no_fault(factor, right, tmp_path):
    """A bucket that rounding may move would excuse whatever is smaller than that."""
    model = Distant().eval()
    wrong = copy.deepcopy(model)
    wrong.gain.data *= factor
    candidate = benches.export(wrong, tmp_path / "model.onnx", X)
    (runtime,) = benches.measured(model, candidate, X, probes=False).runtimes
    assert (runtime.outputs[0].noise.ratio <= 1.5) == right


@pytest.mark.parametrize(("runs", "widens"), [((3,), False), ((5,), False), ((3, 5), True)])
def test_a_rare_flip_widens_no_floor(runs, widens):
    (floor,) = floors(Flips(runs), size=20)
    assert (floor.result().candidate_rms > 1.0) is widens


def test_more_runs_leave_few_columns_with_a_small_floor_by_chance():
    """Of eight samples one has errors a hundred times larger: they alone are the floor of each of a
    thousand columns."""
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
        floor = NoiseStatistics.middle([run() for _ in range(draws)])
        off[draws] = float((runtime / floor.floors()[-1].tally.rms(CANDIDATE)).max())
    assert off[3] > 15.0
    assert off[MORE_DRAWS] < 10.0
