"""Repeatability and batch invariance of fake runtimes and files."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from gate import Verdict, decide
from gate.errors import EvidenceError, OutputMismatch
from gate.measure.stability import StabilityReference
from gate.reference.choices import ReplayedReference
from tests.measure import tiny
from tests.probes import benches

NAN, INF = math.nan, math.inf
X = {"x": benches.vectors()}


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x)


def stability_of(model, fake, arrays=None, **options):
    """The records of a runtime that computes as `fake` does: from batch and reference."""
    with torch.inference_mode():
        stability = StabilityReference(benches.context(model, arrays or X, **options))
        return stability.compare(fake)


def copy_outputs(batch, expected):
    return [array.copy() for array in expected]


def test_reference_is_stable():
    (observed,) = stability_of(Linear(), copy_outputs)
    assert observed.samples == 8
    assert observed.batch_sizes == (1, 4, 7, 8)
    assert observed.repeatability == observed.repeatability_ratio == 0.0
    assert observed.batch_invariance_ratio <= 1.0
    assert observed.unit > 0.0


def test_unit_is_at_least_half_an_ulp():
    (observed,) = stability_of(nn.Identity(), copy_outputs)
    assert observed.unit == 2.0**-24 * float(X["x"][:8].max())


@pytest.mark.parametrize(("options", "sizes", "samples"), [
    ({}, (1, 4, 7, 8), 8),
    ({"size": 3}, (1, 3, 4, 7, 8), 8),
    ({"stability_samples": 5}, (1, 4, 5), 5),
    ({"stability_samples": 100}, (1, 4, 7, 8, 12), 12),
    ({"probe_batch_sizes": (2,)}, (1, 2, 8), 8),
    ({"fixed": 3}, (3,), 9),
    ({"fixed": 12}, (12,), 12),
])  # fmt: skip
def test_batch_sizes_and_cost(options, sizes, samples):
    (observed,) = stability_of(Linear(), copy_outputs, **options)
    assert (observed.batch_sizes, observed.samples) == (sizes, samples)
    cost = StabilityReference.cost(benches.context(Linear(), X, **options))
    assert 2 * samples <= cost <= samples * (2 + len(sizes))


def test_one_sample_has_no_batch_invariance():
    (observed,) = stability_of(Linear(), copy_outputs, {"x": X["x"][:1]})
    assert observed.batch_invariance is observed.batch_invariance_ratio is None


def test_differing_runs_have_a_repeatability():
    calls = []

    def drifting(batch, expected):
        calls.append(len(batch["x"]))
        return [expected[0] + (1.0 if len(calls) == len(total) else 0.0)]

    total = range(1 + 8 + 2 + 1 + 1)
    (observed,) = stability_of(Linear(), drifting)
    assert calls == [8, *[1] * 8, 4, 4, 7, 8]
    assert observed.repeatability == pytest.approx(1.0)
    assert observed.repeatability_ratio >= observed.repeatability / observed.unit > 1e4
    assert observed.batch_invariance_ratio <= 1.0


def test_cached_answers_are_used_only_for_batch_invariance():
    """Whether a runtime repeats itself, it has to show."""
    anew, before = [], []

    def computed(batch, expected):
        anew.append(len(batch["x"]))
        return copy_outputs(batch, expected)

    def answered(batch, expected):
        before.append(len(batch["x"]))
        return [expected[0] + 0.5]

    with torch.inference_mode():
        stability = StabilityReference(benches.context(Linear(), X))
        (observed,) = stability.compare(computed, run_smaller=answered)
    assert (anew, before) == ([8, 8], [*[1] * 8, 4, 4, 7])
    assert observed.batch_invariance == pytest.approx(0.5)
    assert observed.repeatability == 0.0


@pytest.mark.parametrize("proven", [True, False])
def test_rows_chosen_by_rounding_are_not_compared_between_batches(proven):
    """The runtime leaves out a row of the batch of seven."""

    def computed(batch, expected):
        rows = copy_outputs(batch, expected)[0]
        if len(batch["x"]) != 7:
            return [rows + 0.5]
        if len(expected[0]) == 7:
            raise OutputMismatch("it has 6 rows")
        return [rows]

    def replayed(batch):
        rows = np.zeros((len(batch["x"]) - 1, 3), np.float32)
        return ReplayedReference([rows], []) if proven else None

    with torch.inference_mode():
        stability = StabilityReference(benches.context(Linear(), X))
        if not proven:
            with pytest.raises(EvidenceError, match="6 rows"):
                stability.compare(computed, replayed=replayed)
            return
        (observed,) = stability.compare(computed, replayed=replayed)
    assert observed.batch_invariance == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("size", [1, 4, 7])
def test_batch_that_changes_samples_is_found(size):
    def batchy(batch, expected):
        return [expected[0] + (0.5 if len(batch["x"]) == size else 0.0)]

    (observed,) = stability_of(Linear(), batchy)
    assert observed.batch_invariance == pytest.approx(0.5)
    assert observed.batch_invariance_ratio > 1e4
    assert observed.repeatability == 0.0


def test_change_of_a_large_integer_by_one_is_infinite():
    class Hash(nn.Module):
        def forward(self, x):
            return torch.full((len(x), 2), 2**60)

    def batchy(batch, expected):
        return [expected[0] + (len(batch["x"]) == 4)]

    (observed,) = stability_of(Hash(), batchy)
    assert observed.batch_invariance == 1.0
    assert observed.batch_invariance_ratio == INF


@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError("out of memory")])
def test_batch_that_cannot_run_is_an_error(error):
    def broken(batch, expected):
        if len(batch["x"]) == 7:
            raise error
        return copy_outputs(batch, expected)

    with pytest.raises(EvidenceError, match=r"batch of 7 .*dynamic_batch: true"):
        stability_of(Linear(), broken)


class Shapes(nn.Module):
    """Outputs that hold the batch in other places, or nowhere."""

    def forward(self, x):
        return (
            x.repeat_interleave(2, 0),  # two rows a sample
            x.T[:, None],  # axis 2
            x @ x.T,  # two axes
            torch.arange(6.0).reshape(2, 3),  # none
            (x > 0.5).nonzero(),  # as many rows as the data say
        )


def test_samples_on_any_axis_are_compared():
    *held, ragged = stability_of(Shapes(), copy_outputs)
    assert [observed.batch_sizes for observed in held] == [(1, 4, 7, 8)] * 4
    assert all(observed.batch_invariance_ratio <= 1.0 for observed in held)
    assert ragged.batch_sizes == (8,)


@pytest.mark.parametrize("index", range(4))
def test_changed_sample_on_any_axis_is_found(index):
    def moved(batch, expected):
        outputs = copy_outputs(batch, expected)
        if len(batch["x"]) == 7:
            outputs[index][(-1,) * outputs[index].ndim] += 1.0
        return outputs

    records = stability_of(Shapes(), moved)
    assert [observed.batch_invariance > 0.9 for observed in records] == [
        k == index for k in range(5)
    ]


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(0)


def test_output_of_the_whole_batch_uses_the_change_of_the_model():
    (observed,) = stability_of(Mean(), copy_outputs)
    assert observed.batch_invariance > 0.1
    assert observed.batch_invariance_ratio == 1.0


class Argmax(nn.Module):
    def forward(self, x):
        return x.argmax(1), x > 0.5


def test_change_of_integers_is_infinite():
    def flipping(batch, expected):
        labels, flags = copy_outputs(batch, expected)
        if len(batch["x"]) == 1:
            labels, flags = labels + 1, ~flags
        return [labels, flags]

    assert [observed.unit for observed in stability_of(Argmax(), copy_outputs)] == [0.0, 0.0]
    assert [
        observed.batch_invariance_ratio for observed in stability_of(Argmax(), copy_outputs)
    ] == [
        0.0,
        0.0,
    ]
    assert [observed.batch_invariance_ratio for observed in stability_of(Argmax(), flipping)] == [
        INF,
        INF,
    ]
    assert [observed.repeatability_ratio for observed in stability_of(Argmax(), flipping)] == [
        0.0,
        0.0,
    ]


class Nothing(nn.Module):
    def forward(self, x):
        return x[:, :0]


def test_empty_output_does_not_change():
    (observed,) = stability_of(Nothing(), copy_outputs)
    assert (observed.repeatability_ratio, observed.batch_invariance_ratio) == (0.0, 0.0)


class Log(nn.Module):
    def forward(self, x):
        return (x - 0.5).log()


def test_nan_of_the_model_is_no_difference():
    (observed,) = stability_of(Log(), copy_outputs)
    assert observed.repeatability_ratio == 0.0
    assert observed.batch_invariance_ratio <= 1.0


def test_repeated_nan_is_no_change():
    (observed,) = stability_of(Linear(), lambda batch, expected: [expected[0] * NAN])
    assert (observed.repeatability_ratio, observed.batch_invariance_ratio) == (0.0, 0.0)


def test_nan_in_some_runs_is_an_infinite_change():
    runs = iter([1.0, 1.0, 1.0, NAN] + 20 * [1.0])
    (observed,) = stability_of(Linear(), lambda batch, expected: [expected[0] * next(runs)])
    assert INF in (observed.repeatability_ratio, observed.batch_invariance_ratio)


class NanForSomeBatches(nn.Module):
    """NaN in some batch sizes: the model itself has no stable answer."""

    def forward(self, x):
        return x if len(x) != 4 else x * NAN


def test_unstable_model_has_no_ratio():
    (observed,) = stability_of(NanForSomeBatches(), copy_outputs)
    assert observed.unit == INF
    assert observed.batch_invariance_ratio is None


class OnlyFour(nn.Module):
    def forward(self, x):
        if len(x) > 4 or len(x) == 1:
            raise ValueError("not this one")
        return x


def test_batch_sizes_refused_by_the_model_are_skipped():
    (observed,) = stability_of(OnlyFour(), copy_outputs, size=4, probe_batch_sizes=(1, 2))
    assert observed.batch_sizes == (2, 4)


def measure_and_decide(model, candidate, arrays=None, **instruments):
    arrays = arrays or {"input": tiny.images(12)}
    quiet = {"probes": False, "noise_samples": 8} | instruments
    observed = benches.measured(model, candidate, arrays, **quiet)
    decision = decide(benches.policy(**quiet), tiny.stored(observed), decided_at="now")
    return observed.runtimes[0], {check.name: check.verdict for check in decision.problems}


def test_batch_norm_in_training_mode_fails_batch_invariance(tmp_path):
    model = tiny.net()
    training = copy.deepcopy(model)
    training.norm.train()
    x = {"input": tiny.images(12)}
    bad = benches.export(training, tmp_path / "m.onnx", x, training=True)
    _, problems = measure_and_decide(model, bad)
    assert problems["batch_invariance_ratio"] is Verdict.FAIL
    assert "repeatability_ratio" not in problems


class Dropping(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x.flatten(1), 0.5, training=True)


def test_active_dropout_fails_repeatability(tmp_path):
    x = {"input": tiny.images(12)}
    bad = benches.export(Dropping(), tmp_path / "m.onnx", x, training=True)
    _, problems = measure_and_decide(nn.Flatten(), bad)
    assert problems["repeatability_ratio"] is Verdict.FAIL


class AtMostSix(nn.Module):
    def forward(self, x):
        x = x.flatten(1)
        return torch.cat([x[:4], x[4:5], x[5:6]])


def test_file_that_cannot_run_another_batch_size_fails(tmp_path):
    x = {"x": tiny.images(12)}
    bad = benches.export(AtMostSix(), tmp_path / "m.onnx", x)
    runtime, problems = measure_and_decide(nn.Flatten(), bad, x)
    assert "a batch of 8 samples can't be run" in runtime.failure
    assert "(6, 192)" in runtime.failure
    assert runtime.outputs == ()
    assert problems


class Complement(nn.Module):
    """1 - p: what is left of a number just below 1 moves in steps of 2^-24, however small it is."""

    def forward(self, x):
        return 1.0 - x * 1.0


class Softmax(nn.Module):
    """Classes whose probability is about 1e-6 beside one of almost 1."""

    def forward(self, x):
        return torch.softmax(x * 1.0, -1)


def changed_in_single_batches(change):
    """A runtime whose samples have other answers in a batch of one."""

    def computed(batch, expected):
        if len(batch["x"]) == 1:
            return [change(expected[0]).astype(np.float32)]
        return copy_outputs(batch, expected)

    return computed


@pytest.mark.parametrize("seed", [0, 5])
def test_column_that_changes_in_steps_uses_the_step_as_unit(seed):
    """Which of the rounding runs move the one saturated sample is chance."""
    x = np.ones((8, 2), np.float32)
    x[seed] = 1.0 - 2.0**-12 * np.float32([1.0, 3.0])
    model, arrays = Complement(), {"x": x}
    (observed,) = stability_of(
        model, changed_in_single_batches(lambda y: y + 2.0**-23 * (y > 0.0)), arrays
    )
    assert observed.batch_invariance == 2.0**-23
    assert observed.batch_invariance_ratio <= 16.0
    (observed,) = stability_of(model, changed_in_single_batches(lambda y: 1.5 * y), arrays)
    assert observed.batch_invariance_ratio > 16.0


def test_small_probability_does_not_use_the_step_as_unit():
    x = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32) * 0.1
    x[:, 0] += 14.0
    small = changed_in_single_batches(lambda y: np.where(y < 1e-5, y / 2.0, y))
    (observed,) = stability_of(Softmax(), small, {"x": x})
    assert observed.batch_invariance < 2.0**-20
    assert observed.batch_invariance_ratio > 64.0


def test_ratio_near_the_bound_is_measured_with_more_draws():
    """Just above the bound by three runs, and below it by fifteen; or the other way round."""
    x = np.ones((8, 1), np.float32)
    x[3] = 0.37
    draws = []

    class Squared(nn.Module):
        def forward(self, x):
            return x.log() * 1.7

    context = benches.context(Squared(), {"x": x})
    run = context.rounded_run
    object.__setattr__(
        context, "rounded_run", lambda *a, **k: draws.append(k["draw"]) or run(*a, **k)
    )
    for times, runs in ((2.0, 0), (60.0, 15), (1e6, 3)):
        draws.clear()
        with torch.inference_mode():
            custom = StabilityReference(context).compare(copy_outputs)[0].unit
            draws.clear()
            moved = changed_in_single_batches(lambda y, far=times * custom: y + far * (y != 0.0))
            (observed,) = StabilityReference(context).compare(moved)
        assert len(set(draws)) == runs
        assert (observed.rounding_draws or 0) == runs
