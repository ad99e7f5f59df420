"""Repeatability and batch invariance are measured, with fake runtimes and real files."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from gate import Verdict, check, decide
from gate.errors import EvidenceError, OutputMismatch
from gate.measure.stability import StabilityReference
from gate.reference.choices import ReplayedReference
from tests.measure import tiny
from tests.modules import Function, Layers
from tests.probes import benches

NAN, INF = math.nan, math.inf
X = {"x": benches.vectors()}


def make_linear() -> nn.Module:
    return Layers(lambda m, x: m.layer(x), layer=lambda: nn.Linear(6, 3))


def measure_stability(model, fake, arrays=None, **options):
    """Return the stability records of a runtime; `fake` computes its outputs from batch and
    reference.
    """
    with torch.inference_mode():
        stability = StabilityReference(benches.create_context(model, arrays or X, **options))
        return stability.compare(fake)


def copy_outputs(batch, expected):
    return [array.copy() for array in expected]


def test_reference_is_stable():
    (observed,) = measure_stability(make_linear(), copy_outputs)
    assert observed.samples == 8
    assert observed.batch_sizes == (1, 4, 7, 8)
    assert observed.repeatability == observed.repeatability_ratio == 0.0
    assert observed.batch_invariance_ratio <= 1.0
    assert observed.unit > 0.0


def test_model_without_a_value_for_one_sample_is_blamed(tmp_path):
    def forward(x):
        count = (x[:, :1] > 0.5).float().sum()
        return x * count / count

    model = Function(forward).eval()
    benches.export(model, tmp_path / "model.onnx", X)
    result = check(tmp_path / "model.onnx", model, X["x"])
    headline = result.summary.headline
    assert (headline.verdict, headline.cause) == (Verdict.ERROR, "model")
    assert {c.code for c in result.failures} == {"undefined"}


def test_unit_is_at_least_half_an_ulp():
    (observed,) = measure_stability(nn.Identity(), copy_outputs)
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
    (observed,) = measure_stability(make_linear(), copy_outputs, **options)
    assert (observed.batch_sizes, observed.samples) == (sizes, samples)
    cost = StabilityReference.cost(benches.create_context(make_linear(), X, **options))
    assert 2 * samples <= cost <= samples * (2 + len(sizes))


def test_one_sample_has_no_batch_invariance():
    (observed,) = measure_stability(make_linear(), copy_outputs, {"x": X["x"][:1]})
    assert observed.batch_invariance is observed.batch_invariance_ratio is None


def test_differing_runs_have_a_repeatability():
    calls = []

    def drift_in_last_run(batch, expected):
        calls.append(len(batch["x"]))
        return [expected[0] + (1.0 if len(calls) == len(total) else 0.0)]

    total = range(1 + 8 + 2 + 1 + 1)
    (observed,) = measure_stability(make_linear(), drift_in_last_run)
    assert calls == [8, *[1] * 8, 4, 4, 7, 8]
    assert observed.repeatability == pytest.approx(1.0)
    assert observed.repeatability_ratio >= observed.repeatability / observed.unit > 1e4
    assert observed.batch_invariance_ratio <= 1.0


def test_cached_answers_are_used_only_for_batch_invariance():
    """Measure repeatability with new runs, and use cached outputs only for batch invariance."""
    computed_sizes, cached_sizes = [], []

    def compute(batch, expected):
        computed_sizes.append(len(batch["x"]))
        return copy_outputs(batch, expected)

    def answer_from_cache(batch, expected):
        cached_sizes.append(len(batch["x"]))
        return [expected[0] + 0.5]

    with torch.inference_mode():
        stability = StabilityReference(benches.create_context(make_linear(), X))
        (observed,) = stability.compare(compute, run_smaller=answer_from_cache)
    assert (computed_sizes, cached_sizes) == ([8, 8], [*[1] * 8, 4, 4, 7])
    assert observed.batch_invariance == pytest.approx(0.5)
    assert observed.repeatability == 0.0


@pytest.mark.parametrize("proven", [True, False])
def test_rows_chosen_by_rounding_are_not_compared_between_batches(proven):
    """Use the replayed reference if rounding drops a row from the batch of seven."""

    def compute(batch, expected):
        rows = copy_outputs(batch, expected)[0]
        if len(batch["x"]) != 7:
            return [rows + 0.5]
        if len(expected[0]) == 7:
            raise OutputMismatch("it has 6 rows")
        return [rows]

    def replay(batch):
        rows = np.zeros((len(batch["x"]) - 1, 3), np.float32)
        return ReplayedReference([rows], []) if proven else None

    with torch.inference_mode():
        stability = StabilityReference(benches.create_context(make_linear(), X))
        if not proven:
            with pytest.raises(EvidenceError, match="6 rows"):
                stability.compare(compute, replayed=replay)
            return
        (observed,) = stability.compare(compute, replayed=replay)
    assert observed.batch_invariance == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("size", [1, 4, 7])
def test_batch_that_changes_samples_is_found(size):
    def change_one_size(batch, expected):
        return [expected[0] + (0.5 if len(batch["x"]) == size else 0.0)]

    (observed,) = measure_stability(make_linear(), change_one_size)
    assert observed.batch_invariance == pytest.approx(0.5)
    assert observed.batch_invariance_ratio > 1e4
    assert observed.repeatability == 0.0


def test_change_of_a_large_integer_by_one_is_infinite():

    def change_one_size(batch, expected):
        return [expected[0] + (len(batch["x"]) == 4)]

    (observed,) = measure_stability(
        Function(lambda x: torch.full((len(x), 2), 2**60)), change_one_size
    )
    assert observed.batch_invariance == 1.0
    assert observed.batch_invariance_ratio == INF


@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError("out of memory")])
def test_batch_that_cannot_run_is_an_error(error):
    def fail_at_seven(batch, expected):
        if len(batch["x"]) == 7:
            raise error
        return copy_outputs(batch, expected)

    with pytest.raises(EvidenceError, match=r"batch of 7 .*dynamic_batch: true"):
        measure_stability(make_linear(), fail_at_seven)


SHAPES = Function(
    lambda x: (
        x.repeat_interleave(2, 0),
        x.T[:, None],
        x @ x.T,
        torch.arange(6.0).reshape(2, 3),
        (x > 0.5).nonzero(),
    )
)
"""A model whose outputs have the batch on other axes, or have no batch axis."""


def test_samples_on_any_axis_are_compared():
    *with_batch_axis, ragged = measure_stability(SHAPES, copy_outputs)
    assert [observed.batch_sizes for observed in with_batch_axis] == [(1, 4, 7, 8)] * 4
    assert all(observed.batch_invariance_ratio <= 1.0 for observed in with_batch_axis)
    assert ragged.batch_sizes == (8,)


@pytest.mark.parametrize("index", range(4))
def test_changed_sample_on_any_axis_is_found(index):
    def change_last_element(batch, expected):
        outputs = copy_outputs(batch, expected)
        if len(batch["x"]) == 7:
            outputs[index][(-1,) * outputs[index].ndim] += 1.0
        return outputs

    records = measure_stability(SHAPES, change_last_element)
    assert [observed.batch_invariance > 0.9 for observed in records] == [
        k == index for k in range(5)
    ]


ARGMAX = Function(lambda x: (x.argmax(1), x > 0.5))


def test_change_of_integers_is_infinite():
    def flip(batch, expected):
        labels, flags = copy_outputs(batch, expected)
        if len(batch["x"]) == 1:
            labels, flags = labels + 1, ~flags
        return [labels, flags]

    for fake, ratio in ((copy_outputs, 0.0), (flip, INF)):
        records = measure_stability(ARGMAX, fake)
        assert [record.batch_invariance_ratio for record in records] == [ratio, ratio]
        assert [(record.unit, record.repeatability_ratio) for record in records] == [(0.0, 0.0)] * 2


@pytest.mark.parametrize(("function", "fake", "most"), [
    (lambda x: x[:, :0], copy_outputs, 0.0),
    (lambda x: (x - 0.5).log(), copy_outputs, 1.0),
    (lambda x: x * 1.0, lambda batch, expected: [expected[0] * NAN], 0.0),
    (lambda x: x.mean(0), copy_outputs, 1.0),
], ids=["empty output", "NaN of the model", "NaN in each run", "mean of the batch"])  # fmt: skip
def test_unchanged_outputs_are_stable(function, fake, most):
    """Use the change of the model as the unit for an output of the whole batch."""
    (observed,) = measure_stability(Function(function), fake)
    assert observed.repeatability_ratio == 0.0
    assert observed.batch_invariance_ratio <= most


def test_nan_in_some_runs_is_an_infinite_change():
    runs = iter([1.0, 1.0, 1.0, NAN] + 20 * [1.0])
    (observed,) = measure_stability(
        make_linear(), lambda batch, expected: [expected[0] * next(runs)]
    )
    assert INF in (observed.repeatability_ratio, observed.batch_invariance_ratio)


NAN_FOR_SOME_BATCHES = Function(lambda x: x if len(x) != 4 else x * NAN)
"""A model that returns NaN for one batch size, so that its own output is not stable."""


def test_unstable_model_has_no_ratio():
    (observed,) = measure_stability(NAN_FOR_SOME_BATCHES, copy_outputs)
    assert observed.unit == INF
    assert observed.batch_invariance_ratio is None


class OnlyFour(nn.Module):
    def forward(self, x):
        if len(x) > 4 or len(x) == 1:
            raise ValueError("not this one")
        return x


def test_batch_sizes_refused_by_the_model_are_skipped():
    (observed,) = measure_stability(OnlyFour(), copy_outputs, size=4, probe_batch_sizes=(1, 2))
    assert observed.batch_sizes == (2, 4)


def measure_and_decide(model, candidate, arrays=None, **instruments):
    arrays = arrays or {"input": tiny.images(12)}
    instruments_without_probes = {"probes": False, "noise_samples": 8} | instruments
    observed = benches.measured(model, candidate, arrays, **instruments_without_probes)
    decision = decide(
        benches.policy(**instruments_without_probes), tiny.stored(observed), decided_at="now"
    )
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


COMPLEMENT = Function(lambda x: 1.0 - x * 1.0)
"""A complement 1 - p. Near p = 1 it changes in steps of 2^-24, however small it is."""


SOFTMAX = Function(lambda x: torch.softmax(x * 1.0, -1))
"""A softmax in which some classes have a probability of about 1e-6, and one almost 1."""


def change_single_batches(change):
    """Return a fake runtime that changes the outputs of batches of one."""

    def compute(batch, expected):
        if len(batch["x"]) == 1:
            return [change(expected[0]).astype(np.float32)]
        return copy_outputs(batch, expected)

    return compute


@pytest.mark.parametrize("seed", [0, 5])
def test_column_that_changes_in_steps_uses_the_step_as_unit(seed):
    """Use the step as unit, also when no rounding run moves the one saturated sample."""
    x = np.ones((8, 2), np.float32)
    x[seed] = 1.0 - 2.0**-12 * np.float32([1.0, 3.0])
    model, arrays = COMPLEMENT, {"x": x}
    (observed,) = measure_stability(
        model, change_single_batches(lambda y: y + 2.0**-23 * (y > 0.0)), arrays
    )
    assert observed.batch_invariance == 2.0**-23
    assert observed.batch_invariance_ratio <= 16.0
    (observed,) = measure_stability(model, change_single_batches(lambda y: 1.5 * y), arrays)
    assert observed.batch_invariance_ratio > 16.0


def test_small_probability_does_not_use_the_step_as_unit():
    x = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32) * 0.1
    x[:, 0] += 14.0
    halve_small = change_single_batches(lambda y: np.where(y < 1e-5, y / 2.0, y))
    (observed,) = measure_stability(SOFTMAX, halve_small, {"x": x})
    assert observed.batch_invariance < 2.0**-20
    assert observed.batch_invariance_ratio > 64.0


def test_ratio_near_the_bound_is_measured_with_more_draws():
    """Draw more rounding runs when the ratio with three runs is near the bound."""
    x = np.ones((8, 1), np.float32)
    x[3] = 0.37
    draws = []

    context = benches.create_context(Function(lambda x: x.log() * 1.7), {"x": x})
    run = context.rounded_run
    object.__setattr__(
        context, "rounded_run", lambda *a, **k: draws.append(k["draw"]) or run(*a, **k)
    )
    for times, runs in ((2.0, 0), (60.0, 15), (1e6, 3)):
        draws.clear()
        with torch.inference_mode():
            unit = StabilityReference(context).compare(copy_outputs)[0].unit
            draws.clear()
            change = change_single_batches(lambda y, far=times * unit: y + far * (y != 0.0))
            (observed,) = StabilityReference(context).compare(change)
        assert len(set(draws)) == runs
        assert (observed.rounding_draws or 0) == runs
