"""Repeatability and batch invariance, on fake runtimes and on files."""

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


def of(model, fake, arrays=None, **options):
    """The records of a runtime that computes as `fake` does: from batch and reference."""
    with torch.inference_mode():
        stability = StabilityReference(benches.stand(model, arrays or X, **options))
        return stability.compare(fake)


def honest(batch, expected):
    return [array.copy() for array in expected]


def test_the_reference_itself_is_stable():
    (seen,) = of(Linear(), honest)
    assert seen.samples == 8
    assert seen.batch_sizes == (1, 4, 7, 8)
    assert seen.repeatability == seen.repeatability_ratio == 0.0
    assert seen.batch_invariance_ratio <= 1.0
    assert seen.unit > 0.0


def test_the_unit_is_at_least_half_a_step_of_float32():
    (seen,) = of(nn.Identity(), honest)
    assert seen.unit == 2.0**-24 * float(X["x"][:8].max())


@pytest.mark.parametrize(("options", "sizes", "samples"), [
    ({}, (1, 4, 7, 8), 8),
    ({"size": 3}, (1, 3, 4, 7, 8), 8),
    ({"stability_samples": 5}, (1, 4, 5), 5),
    ({"stability_samples": 100}, (1, 4, 7, 8, 12), 12),
    ({"probe_batch_sizes": (2,)}, (1, 2, 8), 8),
    ({"fixed": 3}, (3,), 9),
    ({"fixed": 12}, (12,), 12),
])  # fmt: skip
def test_the_batch_sizes(options, sizes, samples):
    (seen,) = of(Linear(), honest, **options)
    assert (seen.batch_sizes, seen.samples) == (sizes, samples)
    cost = StabilityReference.cost(benches.stand(Linear(), X, **options))
    assert 2 * samples <= cost <= samples * (2 + len(sizes))


def test_one_sample_has_no_other_batch():
    (seen,) = of(Linear(), honest, {"x": X["x"][:1]})
    assert seen.batch_invariance is seen.batch_invariance_ratio is None


def test_two_runs_that_differ():
    calls = []

    def drifting(batch, expected):
        calls.append(len(batch["x"]))
        return [expected[0] + (1.0 if len(calls) == len(total) else 0.0)]

    total = range(1 + 8 + 2 + 1 + 1)
    (seen,) = of(Linear(), drifting)
    assert calls == [8, *[1] * 8, 4, 4, 7, 8]
    assert seen.repeatability == pytest.approx(1.0)
    assert seen.repeatability_ratio >= seen.repeatability / seen.unit > 1e4
    assert seen.batch_invariance_ratio <= 1.0


def test_answers_of_before_serve_for_the_company_alone():
    """Whether a runtime repeats itself, it has to show."""
    anew, before = [], []

    def computed(batch, expected):
        anew.append(len(batch["x"]))
        return honest(batch, expected)

    def answered(batch, expected):
        before.append(len(batch["x"]))
        return [expected[0] + 0.5]

    with torch.inference_mode():
        stability = StabilityReference(benches.stand(Linear(), X))
        (seen,) = stability.compare(computed, run_smaller=answered)
    assert (anew, before) == ([8, 8], [*[1] * 8, 4, 4, 7])
    assert seen.batch_invariance == pytest.approx(0.5)
    assert seen.repeatability == 0.0


@pytest.mark.parametrize("proven", [True, False])
def test_rows_that_rounding_chooses_are_compared_with_no_other_batch(proven):
    """The runtime leaves out a row of the batch of seven."""

    def computed(batch, expected):
        rows = honest(batch, expected)[0]
        if len(batch["x"]) != 7:
            return [rows + 0.5]
        if len(expected[0]) == 7:
            raise OutputMismatch("it has 6 rows")
        return [rows]

    def replayed(batch):
        rows = np.zeros((len(batch["x"]) - 1, 3), np.float32)
        return ReplayedReference([rows], []) if proven else None

    with torch.inference_mode():
        stability = StabilityReference(benches.stand(Linear(), X))
        if not proven:
            with pytest.raises(EvidenceError, match="6 rows"):
                stability.compare(computed, replayed=replayed)
            return
        (seen,) = stability.compare(computed, replayed=replayed)
    assert seen.batch_invariance == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("size", [1, 4, 7])
def test_a_batch_that_changes_its_samples(size):
    def batchy(batch, expected):
        return [expected[0] + (0.5 if len(batch["x"]) == size else 0.0)]

    (seen,) = of(Linear(), batchy)
    assert seen.batch_invariance == pytest.approx(0.5)
    assert seen.batch_invariance_ratio > 1e4
    assert seen.repeatability == 0.0


def test_a_batch_that_changes_large_integers_by_one():
    class Hash(nn.Module):
        def forward(self, x):
            return torch.full((len(x), 2), 2**60)

    def batchy(batch, expected):
        return [expected[0] + (len(batch["x"]) == 4)]

    (seen,) = of(Hash(), batchy)
    assert seen.batch_invariance == 1.0
    assert seen.batch_invariance_ratio == INF


@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError("out of memory")])
def test_a_batch_that_can_not_be_computed_is_an_error_in_words(error):
    def broken(batch, expected):
        if len(batch["x"]) == 7:
            raise error
        return honest(batch, expected)

    with pytest.raises(EvidenceError, match=r"batch of 7 .*dynamic_batch: true"):
        of(Linear(), broken)


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


def test_samples_are_found_wherever_they_are_in_the_outputs():
    *held, ragged = of(Shapes(), honest)
    assert [seen.batch_sizes for seen in held] == [(1, 4, 7, 8)] * 4
    assert all(seen.batch_invariance_ratio <= 1.0 for seen in held)
    assert ragged.batch_sizes == (8,)


@pytest.mark.parametrize("index", range(4))
def test_a_moved_sample_is_seen_wherever_it_is(index):
    def moved(batch, expected):
        outputs = honest(batch, expected)
        if len(batch["x"]) == 7:
            outputs[index][(-1,) * outputs[index].ndim] += 1.0
        return outputs

    records = of(Shapes(), moved)
    assert [seen.batch_invariance > 0.9 for seen in records] == [k == index for k in range(5)]


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(0)


def test_an_output_that_belongs_to_the_batch_is_measured_by_the_model_s_own_change():
    (seen,) = of(Mean(), honest)
    assert seen.batch_invariance > 0.1
    assert seen.batch_invariance_ratio == 1.0


class Argmax(nn.Module):
    def forward(self, x):
        return x.argmax(1), x > 0.5


def test_any_change_of_integers_is_infinite():
    def flipping(batch, expected):
        labels, flags = honest(batch, expected)
        if len(batch["x"]) == 1:
            labels, flags = labels + 1, ~flags
        return [labels, flags]

    assert [seen.unit for seen in of(Argmax(), honest)] == [0.0, 0.0]
    assert [seen.batch_invariance_ratio for seen in of(Argmax(), honest)] == [0.0, 0.0]
    assert [seen.batch_invariance_ratio for seen in of(Argmax(), flipping)] == [INF, INF]
    assert [seen.repeatability_ratio for seen in of(Argmax(), flipping)] == [0.0, 0.0]


class Nothing(nn.Module):
    def forward(self, x):
        return x[:, :0]


def test_an_output_without_an_element_does_not_change():
    (seen,) = of(Nothing(), honest)
    assert (seen.repeatability_ratio, seen.batch_invariance_ratio) == (0.0, 0.0)


class Log(nn.Module):
    def forward(self, x):
        return (x - 0.5).log()


def test_nan_that_the_model_has_too_is_no_difference():
    (seen,) = of(Log(), honest)
    assert seen.repeatability_ratio == 0.0
    assert seen.batch_invariance_ratio <= 1.0


def test_nan_that_the_runtime_repeats_is_left_to_the_other_checks():
    (seen,) = of(Linear(), lambda batch, expected: [expected[0] * NAN])
    assert (seen.repeatability_ratio, seen.batch_invariance_ratio) == (0.0, 0.0)


def test_nan_in_some_runs_only_is_an_infinite_change():
    runs = iter([1.0, 1.0, 1.0, NAN] + 20 * [1.0])
    (seen,) = of(Linear(), lambda batch, expected: [expected[0] * next(runs)])
    assert INF in (seen.repeatability_ratio, seen.batch_invariance_ratio)


class Moody(nn.Module):
    """NaN in some batch sizes: the model itself has no stable answer."""

    def forward(self, x):
        return x if len(x) != 4 else x * NAN


def test_a_model_without_a_stable_answer_has_no_unit():
    (seen,) = of(Moody(), honest)
    assert seen.unit == INF
    assert seen.batch_invariance_ratio is None


class OnlyFour(nn.Module):
    def forward(self, x):
        if len(x) > 4 or len(x) == 1:
            raise ValueError("not this one")
        return x


def test_sizes_that_the_model_itself_refuses_are_no_sizes_of_the_file():
    (seen,) = of(OnlyFour(), honest, size=4, probe_batch_sizes=(1, 2))
    assert seen.batch_sizes == (2, 4)


def judged(model, candidate, arrays=None, **instruments):
    arrays = arrays or {"input": tiny.images(12)}
    quiet = {"probes": False, "noise_samples": 8} | instruments
    seen = benches.measured(model, candidate, arrays, **quiet)
    decision = decide(benches.policy(**quiet), tiny.stored(seen), decided_at="now")
    return seen.runtimes[0], {check.name: check.verdict for check in decision.problems}


def test_a_correct_file_is_stable(tmp_path):
    model = tiny.net()
    runtime, problems = judged(model, tiny.export(model, tmp_path / "m.onnx"))
    assert problems == {}
    assert runtime.outputs[0].stability.batch_sizes == (1, 4, 7, 8)


def test_batchnorm_in_training_mode_depends_on_the_batch(tmp_path):
    model = tiny.net()
    training = copy.deepcopy(model)
    training.norm.train()
    x = {"input": tiny.images(12)}
    bad = benches.export(training, tmp_path / "m.onnx", x, training=True)
    _, problems = judged(model, bad)
    assert problems["batch_invariance_ratio"] is Verdict.FAIL
    assert "repeatability_ratio" not in problems


class Dropping(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x.flatten(1), 0.5, training=True)


def test_active_dropout_is_not_repeatable(tmp_path):
    x = {"input": tiny.images(12)}
    bad = benches.export(Dropping(), tmp_path / "m.onnx", x, training=True)
    _, problems = judged(nn.Flatten(), bad)
    assert problems["repeatability_ratio"] is Verdict.FAIL


class AtMostSix(nn.Module):
    def forward(self, x):
        x = x.flatten(1)
        return torch.cat([x[:4], x[4:5], x[5:6]])


def test_a_file_that_can_not_compute_another_batch_size_has_failed(tmp_path):
    x = {"x": tiny.images(12)}
    bad = benches.export(AtMostSix(), tmp_path / "m.onnx", x)
    runtime, problems = judged(nn.Flatten(), bad, x)
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


def alone(change):
    """A runtime whose samples have other answers in a batch of one."""

    def computed(batch, expected):
        if len(batch["x"]) == 1:
            return [change(expected[0]).astype(np.float32)]
        return honest(batch, expected)

    return computed


@pytest.mark.parametrize("seed", [0, 5])
def test_a_column_that_moves_in_steps_has_one_as_its_unit(seed):
    """Which of the rounding runs move the one saturated sample is chance."""
    x = np.ones((8, 2), np.float32)
    x[seed] = 1.0 - 2.0**-12 * np.float32([1.0, 3.0])
    model, arrays = Complement(), {"x": x}
    (seen,) = of(model, alone(lambda y: y + 2.0**-23 * (y > 0.0)), arrays)
    assert seen.batch_invariance == 2.0**-23
    assert seen.batch_invariance_ratio <= 16.0
    (seen,) = of(model, alone(lambda y: 1.5 * y), arrays)
    assert seen.batch_invariance_ratio > 16.0


def test_a_small_probability_has_no_such_unit():
    x = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32) * 0.1
    x[:, 0] += 14.0
    small = alone(lambda y: np.where(y < 1e-5, y / 2.0, y))
    (seen,) = of(Softmax(), small, {"x": x})
    assert seen.batch_invariance < 2.0**-20
    assert seen.batch_invariance_ratio > 64.0


def test_an_unclear_ratio_is_measured_with_more_draws():
    """Just above the bound by three runs, and below it by fifteen; or the other way round."""
    x = np.ones((8, 1), np.float32)
    x[3] = 0.37
    draws = []

    class Squared(nn.Module):
        def forward(self, x):
            return x.log() * 1.7

    stand = benches.stand(Squared(), {"x": x})
    run = stand.rounded_run
    object.__setattr__(
        stand, "rounded_run", lambda *a, **k: draws.append(k["draw"]) or run(*a, **k)
    )
    for times, runs in ((2.0, 0), (60.0, 15), (1e6, 3)):
        draws.clear()
        with torch.inference_mode():
            own = StabilityReference(stand).compare(honest)[0].unit
            draws.clear()
            moved = alone(lambda y, far=times * own: y + far * (y != 0.0))
            (seen,) = StabilityReference(stand).compare(moved)
        assert len(set(draws)) == runs
        assert (seen.rounding_draws or 0) == runs
