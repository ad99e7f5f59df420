"""A runtime is compared with the reference on one probe."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from gate.errors import OutputMismatch
from gate.probes import expected_outputs
from gate.probes.expected_outputs import ExpectedOutputs, SampleRuns
from gate.probes.probe import Probe
from tests.modules import Function
from tests.probes import benches

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


X = {"x": benches.vectors()}


def expected(model, arrays=None, **options):
    arrays = arrays or X
    size = len(next(iter(arrays.values())))
    probe = Probe("p", "value", size, lambda: arrays)
    return ExpectedOutputs(benches.create_context(model, arrays, **options), probe)


def compare(model, change, arrays=None, *, refused=False, **options):
    """Compare the reference's outputs, changed by `change`, with the reference."""
    return expected(model, arrays, **options).parity(
        lambda batch, reference: change([array.copy() for array in reference]), refused=refused
    )


def unchanged(outputs):
    return outputs


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x)


def add_offset(amount):
    return lambda outputs: [outputs[0] + np.float32(amount)]


def test_noise_ratio_of_the_reference_is_about_one():
    observed = compare(Linear(), unchanged)
    assert (observed.name, observed.kind, observed.batch_size) == ("p", "value", 12)
    assert 0.3 < observed.noise_ratio <= 1.0
    assert observed.relative_diff == 0.0
    assert observed.failure is None
    assert observed.inapplicable is None


@pytest.mark.parametrize("amount", [1e-3, 0.1, 10.0])
def test_wrong_outputs_have_a_large_noise_ratio(amount):
    observed = compare(Linear(), add_offset(amount))
    assert observed.noise_ratio > 1e4 * amount
    assert observed.relative_diff > amount / 10


def test_only_relative_diff_without_float64_reference():
    observed = compare(Linear(), add_offset(0.1), noise_samples=0)
    assert observed.noise_ratio is None
    assert observed.relative_diff > 0.01


class NoDouble(Linear):
    """A model that does not support float64, as if it used NumPy."""

    def forward(self, x):
        if x.dtype == torch.float64:
            raise TypeError("float32 only")
        return super().forward(x)


class NanInDouble(Linear):
    def forward(self, x):
        return super().forward(x) * (NAN if x.dtype == torch.float64 else 1.0)


@pytest.mark.parametrize("model", [NoDouble, NanInDouble])
def test_failing_float64_reference_is_skipped_for_the_probe(model):
    probe = expected(model())
    assert probe.parity(lambda batch, reference: reference).noise_ratio is None
    # does not make the float64 outputs of the samples unmeasured
    assert probe._context.truth.unmeasured is None


def test_probe_refused_by_the_model_is_inapplicable():
    class Refuses(nn.Module):
        def forward(self, x):
            raise ValueError("too bright\nsee above")

    observed = compare(Refuses(), unchanged)
    assert observed.inapplicable == "ValueError: too bright"
    assert observed.noise_ratio is observed.relative_diff is observed.failure is None


@pytest.mark.parametrize(("error", "words"), [
    (RuntimeError("no kernel\nat all"), "RuntimeError: no kernel"),
    (OutputMismatch("shape (3,), expected (4,)."), "shape (3,), expected (4,)."),
])  # fmt: skip
def test_exception_of_the_runtime_is_its_failure(error, words):
    def broken(batch, reference):
        raise error

    observed = expected(Linear()).parity(broken)
    assert observed.failure == words
    assert observed.inapplicable is observed.noise_ratio is None


def set_value(value, where=0):
    def change(outputs):
        outputs[0].ravel()[where] = value
        return outputs

    return change


class NonfiniteOutputs(nn.Module):
    """Return NaN, plus and minus infinity among finite values."""

    def forward(self, x):
        x = x * 1.3
        return torch.cat([x, x[:, :1] * NAN, x[:, :1] * INF, x[:, :1] * -INF], 1)


@pytest.mark.parametrize("float64_samples", [32, 0])
@pytest.mark.parametrize(("model", "change", "agrees"), [
    (NonfiniteOutputs, unchanged, True),
    (NonfiniteOutputs, set_value(NAN, 6), True),
    (NonfiniteOutputs, set_value(1.0, 6), False),
    (NonfiniteOutputs, set_value(INF, 6), False),
    (NonfiniteOutputs, set_value(-INF, 7), False),
    (NonfiniteOutputs, set_value(NAN, 7), False),
    (NonfiniteOutputs, set_value(3e38, 7), False),
    (NonfiniteOutputs, set_value(NAN, 0), False),
    (NonfiniteOutputs, set_value(INF, 0), False),
    (Linear, set_value(NAN, 5), False),
    (Linear, set_value(-INF, 5), False),
])  # fmt: skip
def test_nonfinite_value_on_one_side_is_infinitely_far(model, change, agrees, float64_samples):
    observed = compare(model(), change, noise_samples=float64_samples)
    assert math.isinf(observed.relative_diff) is not agrees
    if float64_samples:
        assert math.isinf(observed.noise_ratio) is not agrees
        assert not math.isnan(observed.noise_ratio)


ONLY_NAN = Function(lambda x: x * NAN)


def test_probe_without_finite_numbers_is_inapplicable():
    assert compare(ONLY_NAN, unchanged).inapplicable == "no_finite_number"
    assert compare(ONLY_NAN, set_value(1.0)).noise_ratio == INF
    assert compare(Function(lambda x: x[:, :0]), unchanged).inapplicable == "no_finite_number"


SEVERAL_OUTPUTS = Function(lambda x: (x * 1.1, x.argmax(1), x > 0.5))


def change_output(index):
    def change(outputs):
        first = outputs[index][..., :1]
        outputs[index][..., :1] = ~first if first.dtype == bool else first + 1
        return outputs

    return change


def test_worst_output_is_recorded():
    assert compare(SEVERAL_OUTPUTS, unchanged).noise_ratio <= 1.0
    assert compare(SEVERAL_OUTPUTS, change_output(0)).noise_ratio > 1e5
    for index in (1, 2):
        observed = compare(SEVERAL_OUTPUTS, change_output(index))
        assert (observed.noise_ratio, observed.relative_diff) == (INF, INF)
        assert compare(SEVERAL_OUTPUTS, change_output(index), noise_samples=0).relative_diff == INF


CONSTANT = {"x": np.full((4, 6), 0.7, np.float32)}


class Centred(nn.Module):
    """Return exactly zero for a constant in PyTorch, but perhaps not in other runtimes."""

    def forward(self, x):
        return x - x.mean(1, keepdim=True)


SCORES = Function(lambda x: (x * 1.3).argmax(1))
"""A model that returns argmax of equal scores, for which any index is correct."""


def test_equal_scores_are_no_difference():
    observed = compare(SCORES, change_output(0), CONSTANT)
    assert (observed.noise_ratio, observed.relative_diff) == (0.0, 0.0)
    assert compare(SCORES, change_output(0)).noise_ratio == INF


@pytest.mark.parametrize("float64_samples", [32, 0])
def test_rounding_in_an_ill_conditioned_probe_passes(float64_samples):
    ulp = add_offset(6e-8)
    observed = compare(Centred(), ulp, CONSTANT, noise_samples=float64_samples)
    assert (observed.noise_ratio or 0.0) < 8.0
    assert (observed.inapplicable is not None) is (float64_samples == 0)
    fault = compare(Centred(), add_offset(0.01), CONSTANT, noise_samples=float64_samples)
    assert fault.inapplicable is None
    assert (fault.noise_ratio or fault.relative_diff) > 1e3


BRANCH_AT_ZERO = Function(lambda x: x + 1.5 if x.abs().sum() == 0 else x * 1.5)
"""Branch with its threshold at zero."""


def test_branch_at_zero_is_found():
    zeros = {"x": np.zeros((4, 6), np.float32)}
    baked = compare(BRANCH_AT_ZERO, lambda outputs: [outputs[0] * 0], zeros)
    assert baked.noise_ratio > 1e6


class Ragged(nn.Module):
    def forward(self, x):
        return x[(x * 1.3).sum(1) > 1.3 * x[:1].sum()]


def test_shape_changed_by_rounding_is_inapplicable():
    def mismatch(batch, reference):
        raise OutputMismatch("other shape")

    same_rows = {"x": np.repeat(benches.vectors(1), 6, axis=0)}
    assert expected(Ragged(), same_rows).parity(mismatch).inapplicable == "rounding_changes_shapes"
    assert expected(Linear()).parity(mismatch).failure == "other shape"


DENORMAL_SOFTMAX = Function(lambda x: (x * 400.0).softmax(1))
"""A model that returns probabilities of which most are denormal."""


def flush_denormals(outputs):
    return [np.where(np.abs(outputs[0]) < 2.0**-126, np.float32(0.0), outputs[0])]


def test_flushed_denormals_pass():
    x = {"x": np.array([[0.0, 0.01, 0.02, 0.03, 0.04, 0.24]], np.float32)}
    assert 0 < expected(DENORMAL_SOFTMAX, x)._reference[0].min() < 2.0**-126
    assert compare(DENORMAL_SOFTMAX, flush_denormals, x).noise_ratio < 4.0


def test_additional_runs_only_for_large_differences(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "gate.probes.expected_outputs.perturb_rounding",
        lambda *seen, draws: calls.append(seen) or [],
    )
    probe = expected(Linear())
    probe.parity(lambda batch, reference: reference)
    assert calls == []
    probe.parity(lambda batch, reference: [reference[0] + 1])
    probe.parity(lambda batch, reference: [reference[0] + 1])
    assert len(calls) == 1


SINH = Function(torch.sinh)
"""A model that returns values that grow exponentially outside the samples' range."""


@pytest.mark.parametrize("float64_samples", [32, 0])
def test_much_larger_output_is_compared(float64_samples):
    arrays = {"x": np.full((2, 4), 15.3, np.float32)}
    assert compare(SINH, unchanged, arrays, noise_samples=float64_samples).inapplicable is None
    far = compare(SINH, lambda o: [o[0] * np.float32(1.5)], arrays, noise_samples=float64_samples)
    assert far.inapplicable is None
    assert far.relative_diff == pytest.approx(0.5, rel=1e-3)
    assert float64_samples == 0 or far.noise_ratio > 1e4


def test_difference_explained_by_random_rounding_passes():
    arrays = {"x": np.full((2, 4), 60.3, np.float32)}
    near = compare(SINH, lambda o: [o[0] * np.float32(1 + 4e-6)], arrays)
    assert near.noise_ratio < 8.0  # an ulp of 60 is 4e-6


def compare_rows(model, change, rows, **options):
    """Compare with a separate scale per row, as measurements do."""
    arrays = {"x": rows}
    probe = Probe(
        "p",
        "value",
        len(rows),
        lambda: arrays,
        scaled_by_sample=options.pop("scaled_by_sample", True),
    )
    observed = ExpectedOutputs(benches.create_context(model, arrays, **options), probe)
    return observed.parity(lambda batch, reference: change([array.copy() for array in reference]))


def scale_row(row, factor):
    def change(outputs):
        outputs[0][row] *= np.float32(factor)
        return outputs

    return change


@pytest.mark.parametrize("float64_samples", [32, 0])
def test_small_row_next_to_large_rows_has_its_own_scale(float64_samples):
    rows = benches.vectors(8) * np.float32([[1], [1e6], [1], [1], [1], [1], [1], [1]])
    fault = scale_row(0, 0.9)
    assert (
        compare_rows(Linear(), unchanged, rows, noise_samples=float64_samples).relative_diff == 0.0
    )
    together = compare_rows(
        Linear(), fault, rows, scaled_by_sample=False, noise_samples=float64_samples
    )
    row_parity = compare_rows(Linear(), fault, rows, noise_samples=float64_samples)
    assert together.relative_diff < 1e-6
    assert row_parity.relative_diff > 0.01
    if float64_samples:
        assert row_parity.noise_ratio > 1e4


def test_row_of_zeros_has_no_scale():
    rows = np.zeros((4, 6), np.float32)
    rows[1:] = benches.vectors(3)
    observed = compare_rows(nn.Identity(), unchanged, rows)
    assert (observed.noise_ratio, observed.relative_diff) == (0.0, 0.0)


def compare_finite(model, change):
    probe = Probe("nan", "value", 2, lambda: {"x": np.full((2, 4), NAN, np.float32)}, finite=True)
    observed = ExpectedOutputs(
        benches.create_context(model, {"x": np.ones((2, 4), np.float32)}), probe
    )
    return observed.parity(lambda batch, reference: change([array.copy() for array in reference]))


@pytest.mark.parametrize(
    ("model", "applies"),
    [
        (Function(lambda x: torch.nan_to_num(x, nan=0.3) * 1.5), True),
        (nn.Identity(), False),
        (Function(lambda x: x.isnan()), False),
    ],
)
def test_nonfinite_probe_applies_only_with_finite_output(model, applies):
    observed = compare_finite(model, unchanged)
    assert (observed.inapplicable is None) is applies
    assert observed.relative_diff == (0.0 if applies else None)
    if applies:
        assert (
            compare_finite(model, lambda outputs: [outputs[0] * np.float32(NAN)]).noise_ratio == INF
        )


STEPS = Function(lambda x: torch.floor(x * 5.7).to(torch.int32))
"""A model that returns the integer part of a product."""


@pytest.mark.parametrize(("units", "excused"), [(0, True), (4, False)])
def test_rarely_rounded_integer_needs_more_runs(units, excused):
    """The input is `units` ulps above an integer; none of three perturbed runs lowers it."""
    rows = np.full((12, 6), 0.5, np.float32)
    rows[9, 2] = np.float32(6.0 / 5.7) * np.float32(1.0 + units * 2.0**-23)
    observed = compare(
        STEPS, lambda outputs: [np.where(outputs[0] == 6, 5, outputs[0])], {"x": rows}
    )
    assert (observed.noise_ratio == 0.0) == excused
    assert excused or observed.noise_ratio == INF


@pytest.mark.parametrize(("ratio", "few_elements", "refused", "bound", "runs"), [
    (1.0, 36, False, 32.0, [1]),
    (4.0, 36, False, 32.0, [1, 3]),
    (50.0, 36, False, 32.0, [1, 3, 6, 12, 24, 32]),
    (50.0, 36, True, 32.0, [1, 3]),
    (50.0, 36, False, 2.0**18, [1, 3]),  # precision: reduced
    (50.0, 35, False, 32.0, [1, 3]),
    (1e5, 36, False, 32.0, [1, 3]),
])  # fmt: skip
def test_undecided_floor_uses_more_runs(ratio, few_elements, refused, bound, runs, monkeypatch):
    """One run suffices if it explains the difference. No more runs are made if the result is clear,
    if they would not fit in memory, or if the samples already fail; the record then says so."""
    requested, real = [], expected_outputs.perturb_rounding

    def jittered(context, batch, *, draws):
        requested.append(draws.stop)
        return real(context, batch, draws=draws)

    monkeypatch.setattr(expected_outputs, "perturb_rounding", jittered)
    monkeypatch.setattr(expected_outputs, "_MAX_ELEMENTS", few_elements)
    unit = compare(Linear(), add_offset(1e-5)).noise_ratio
    requested.clear()
    off = add_offset(1e-5 * ratio / unit)
    observed = compare(Linear(), off, refused=refused, probe_noise_ratio=bound)
    assert requested == runs
    assert observed.rounding_draws == runs[-1]
    assert observed.unexamined is refused
    assert observed.noise_ratio > 0.3 * ratio


class BatchDependent(Linear):
    def forward(self, x):
        return self.layer(x - x.mean(0))


@pytest.mark.parametrize(
    ("model", "runs"), [(Linear(), [8, 8]), (BatchDependent(), [20, 20, 3, 3])]
)
def test_batches_of_the_same_samples_share_runs(model, runs, monkeypatch):
    """Share the runs unless the model depends on the other samples of the batch."""
    created, real = [], expected_outputs.perturb_rounding

    def perturbed(context, batch, *, draws):
        created.append(len(batch["x"]))
        return real(context, batch, draws=draws)

    monkeypatch.setattr(expected_outputs, "perturb_rounding", perturbed)
    context = benches.create_context(model, X)
    shared = SampleRuns(context, {"x": X["x"][:8]})
    for locations in ([*range(8), *range(8), 0, 1, 2, 3], [5, 2, 7]):
        batch = {"x": X["x"][locations]}
        probe = Probe("p", "batch", len(locations), lambda batch=batch: batch)
        of_probe = ExpectedOutputs(context, probe, shared=shared)
        (r,) = of_probe._reference
        observed = of_probe.parity(lambda *_, r=r: [r + np.float32(1e-1)])
        assert observed.noise_ratio > 1000.0
        runs_of_probe = of_probe._runs
        assert len(runs_of_probe) == 3
        assert all(np.allclose(run[0], r, atol=1e-5) for run in runs_of_probe)
    assert created == runs


class RoundedIndices(nn.Module):
    """Return indices that depend on rounding, and the score of one of them."""

    def forward(self, x):
        steps = torch.floor(x * 5.7)
        return steps[:, :2], steps[:, 2:3] / 100.0


@pytest.mark.parametrize(("units", "excused"), [(0, True), (4, False)])
def test_output_depending_on_rounded_choice_needs_more_runs(units, excused):
    """Three runs choose other indices, but none of them changes the score of the tenth sample."""
    rows = np.full((12, 6), 0.5, np.float32)
    rows[:, :2] = np.float32(6.0 / 5.7)
    rows[9, 2] = np.float32(6.0 / 5.7) * np.float32(1.0 + units * 2.0**-23)
    (used, score) = (6.0, np.float32(6.0) / np.float32(100.0))

    def a_step_less(outputs):
        return [
            np.where(outputs[0] == used, np.float32(5.0), outputs[0]),
            np.where(outputs[1] == score, np.float32(0.05), outputs[1]),
        ]

    observed = compare(RoundedIndices(), a_step_less, {"x": rows})
    assert (observed.noise_ratio < 32.0) == excused
