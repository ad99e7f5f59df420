"""The outlier analysis separates differences explained by rounding from faults."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import gate
from gate.measure import outliers
from gate.measure.outliers import rounding_variants
from gate.reference.validity import UNRESTRICTED
from tests.modules import Layers
from tests.probes import benches


def make_table(count, columns=6, seed=0):
    return np.random.default_rng(seed).normal(size=(count, columns)).astype(np.float32)


def make_heavy_tail() -> nn.Module:
    """Return a model whose outputs have a heavy tail: some samples are a hundred times larger."""
    return Layers(lambda m, x: torch.exp(4.0 * m.fc(x)), fc=lambda: nn.Linear(6, 2))


class LateError(nn.Module):
    """A model with an error only for samples with a large first feature, of which none is among the
    first.
    """

    def __init__(self, model, factor):
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x):
        late = (x[:, :1] > 3.0).to(x.dtype)
        return self.model(x) * (1.0 + late * self.factor)


def measure(reference, exported, tmp_path, arrays):
    candidate = benches.export(exported, tmp_path / "model.onnx", arrays)
    measurement = benches.measured(
        reference, candidate, arrays, probes=False, stability_samples=0, search_inputs=0
    )
    return measurement.runtimes[0]


@pytest.mark.further
@pytest.mark.parametrize("count", [50, 2000])
def test_heavy_tail_passes_with_any_number_of_samples(count, tmp_path):
    model = make_heavy_tail().eval()
    (output,) = measure(model, model, tmp_path, {"x": make_table(count)}).outputs
    assert output.noise.ratio <= 1.5
    assert output.noise.diff <= 8.0


@pytest.mark.parametrize("factor", [1e-4, 0.5])
def test_fault_of_late_samples_is_found(factor, tmp_path):
    arrays = {"x": make_table(300)}
    arrays["x"][:32, 0] = np.minimum(arrays["x"][:32, 0], 2.0)
    arrays["x"][200, 0] = 4.0
    model = make_heavy_tail().eval()
    (output,) = measure(model, LateError(model, factor).eval(), tmp_path, arrays).outputs
    assert output.noise.ratio <= 1.5
    assert output.noise.diff > 50.0


def test_analysis_of_an_outlier():
    context = benches.create_context(make_heavy_tail().eval(), {"x": make_table(20)}, size=8)
    with torch.inference_mode():
        variants = rounding_variants(context, 13)
    assert variants.sample == 13
    assert (variants.row, variants.count) == (5, 8)
    assert variants.truth[0].shape == (1, 2)
    floor = variants.floor(0)
    relative = floor / np.abs(variants.truth[0])
    assert (relative >= 2.0**-24).all()
    assert (relative < 1e-5).all()
    assert len(variants.alternatives(0)) == 10


def test_no_outlier_analysis_without_truth():
    context = benches.create_context(
        make_heavy_tail().eval(), {"x": make_table(20)}, noise_samples=0
    )
    assert rounding_variants(context, 3) is None


class States(nn.Module):
    """A model that returns its samples on axis 1, as the states of an LSTM."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).unsqueeze(0)


class Cancelling(nn.Module):
    """A model whose sum cancels to a ten-thousandth where the first feature is large."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 512)
        self.head = nn.Linear(512, 2)

    def forward(self, x):
        hidden = self.fc(x)
        large = hidden * (1.0 + 1e4 * (x[:, :1] > 3.0))
        pair = torch.cat([large, -large, hidden], 1)
        return pair @ self.head.weight.repeat(1, 3).T


@pytest.mark.further
@pytest.mark.parametrize(("model", "of_file", "is_off"), [
    (make_heavy_tail(), LateError(make_heavy_tail(), 1e-4), True),
    (Cancelling(), Cancelling(), False),
], ids=["a fault", "rounding"])  # fmt: skip
def test_late_samples_on_axis_one_are_analyzed(model, of_file, is_off, tmp_path):
    arrays = {"x": make_table(300)}
    arrays["x"][:32, 0] = np.minimum(arrays["x"][:32, 0], 2.0)
    arrays["x"][200, 0] = 4.0
    (output,) = measure(States(model).eval(), States(of_file).eval(), tmp_path, arrays).outputs
    assert (output.noise.diff > 50.0) is is_off
    assert is_off or output.noise.diff <= 8.0


class Halves(nn.Module):
    """A model that rounds values near a half; `shift` moves them to the other side."""

    def __init__(self, shift=0.0):
        super().__init__()
        self.shift = shift

    def forward(self, x):
        return torch.round(x * 0.1 * 10.0 + 0.5 + self.shift).to(torch.int32), x * 1.7


def make_halves(count=100):
    """Return samples of which only sample 7 has values close to a tie."""
    x = np.round(make_table(count) * 10.0) + 0.25
    x[7, 0] = 3.0
    return {"x": x.astype(np.float32)}


@pytest.mark.further
def test_integers_changed_by_rounding_are_near_ties(tmp_path):
    model = Halves().eval()
    integers, _ = measure(model, Halves(3e-7).eval(), tmp_path, make_halves()).outputs
    unchanged, _ = measure(model, model, tmp_path, make_halves()).outputs
    assert unchanged.unequal == 0
    assert integers.max_abs_diff == 0.0
    assert integers.near_ties <= 1
    integers, _ = measure(Halves().eval(), Halves(0.9).eval(), tmp_path, make_halves()).outputs
    assert integers.near_ties <= 1
    assert integers.max_abs_diff >= 1.0
    assert integers.unequal > 100


def test_classes_decided_by_rounding_are_ties(tmp_path):
    """Count a changed class as a tie if two classes differ only in the last bit of a bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    model[2].weight.data[1] = model[2].weight.data[0]
    model[2].bias.data[1] = model[2].bias.data[0]
    last_bit_changed = copy.deepcopy(model)
    last_bit_changed[2].bias.data[1] = torch.nextafter(model[2].bias.data[1], torch.tensor(9.0))
    (output,) = measure(model, last_bit_changed, tmp_path, {"x": make_table(64)}).outputs
    assert output.classification.top1_disagreements == 0
    assert output.classification.top1_ties > 0
    bias_changed = copy.deepcopy(model)
    bias_changed[2].bias.data[2] += 0.3
    (output,) = measure(model, bias_changed, tmp_path, {"x": make_table(64)}).outputs
    assert output.classification.top1_disagreements > 0


class Pairs(nn.Module):
    """A model that compares all pairs of samples in a batch, so that the number of columns is the
    batch size.
    """

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return (x * self.factor).argmax(1)[:, None] - x.argmax(1)[None], x @ (x * self.factor).T


def test_output_over_pairs_of_samples_is_measured(tmp_path):
    arrays = {"x": make_table(40)}
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0, 1.0])
    runtime = measure(Pairs().eval(), Pairs(signs).eval(), tmp_path, arrays)
    assert runtime.failure is None
    assert runtime.outputs[0].near_ties == 0
    assert runtime.outputs[0].max_abs_diff > 0.0
    assert runtime.outputs[1].noise.ratio > 1e3


class Levels(nn.Module):
    """A model with 10 200 integer levels; in each sample and probe many values lie near an edge."""

    def __init__(self, gain=10200.0):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.gain = gain

    def forward(self, x):
        levels = torch.sigmoid(4.0 * self.conv2(torch.relu(self.conv1(x)))) * self.gain
        return (levels - torch.fmod(levels, 1.0) + 0.5).to(torch.int32)


@pytest.mark.further
@pytest.mark.parametrize(("gain", "verdict"), [(10200.0, "PASS"), (10200.2, "FAIL")])
def test_ties_in_probes_are_found(gain, verdict, tmp_path):
    """Accept other integers only where rounding may decide, although the float64 reference differs
    too.
    """
    rows = np.random.default_rng(2).normal(size=(24, 3, 160, 160))[:, :, :32, :32]
    arrays = {"x": rows.astype(np.float32)}
    file = benches.export(Levels(gain).eval(), tmp_path / "model.onnx", arrays).path
    result = gate.check(file, Levels().eval(), arrays)
    assert result.evidence.validity.own_choices
    assert result.decision.verdict.value == verdict


class Rounded(nn.Module):
    """A model that rounds exact halves to even or up."""

    def __init__(self, *, even):
        super().__init__()
        self.even = even

    def forward(self, x):
        scaled = x * 0.25
        return torch.round(scaled) if self.even else torch.floor(scaled + 0.5)


def test_exact_half_is_not_a_tie(tmp_path):
    rows = (np.random.default_rng(5).integers(-400, 400, (60, 40)) * 4).astype(np.float32)
    rows[7::20, 3] += 2.0
    reference, exported = Rounded(even=True).eval(), Rounded(even=False).eval()

    class Integers(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x).to(torch.int64)

    (output,) = measure(Integers(reference), Integers(exported), tmp_path, {"x": rows}).outputs
    assert (output.near_ties, output.max_abs_diff) == (0, 1.0)


@pytest.mark.parametrize(("suspicions", "clear", "runs"), [
    ([0.9], False, []),
    ([1.1, 0.5], False, [3]),
    ([1.1, 1.1], False, [3, 15]),
    ([5.0, 5.0], True, [3]),
    ([50.0, 40.0], False, [3]),
    ([50.0, 5.0], False, [3, 15]),
    ([math.inf, math.inf], False, [3]),
])  # fmt: skip
def test_floor_is_measured_with_more_runs_when_undecided(suspicions, clear, runs, monkeypatch):
    class FakeRuntime:
        def __init__(self):
            self.remaining = list(suspicions)
            self.few_draws = False
            self.comparison = SimpleNamespace(floor=self)

        def suspicion(self):
            return self.remaining[0]

        def widen(self, floors):
            self.remaining = self.remaining[1:] or self.remaining

        def is_clearly_refused(self, policy):
            return clear

    draws_used, runtime = [], FakeRuntime()
    monkeypatch.setattr(
        outliers, "rounding_floor", lambda context, *, draws: draws_used.append(draws)
    )
    validity = SimpleNamespace(validity=UNRESTRICTED)
    context = SimpleNamespace(truth=validity, applied_policy=None)
    floor = outliers.RoundingFloor(context, [runtime])
    floor.widen()
    floor.widen()
    assert draws_used == runs
    assert runtime.few_draws is clear
