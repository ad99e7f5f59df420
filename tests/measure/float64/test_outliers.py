"""Outlier analysis: differences explained by rounding, and faults."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import gate
from gate.measure import outliers
from gate.measure.outliers import OutlierAnalysis
from gate.reference.validity import UNRESTRICTED
from tests.probes import benches


def table(count, columns=6, seed=0):
    return np.random.default_rng(seed).normal(size=(count, columns)).astype(np.float32)


class Tail(nn.Module):
    """`exp` of a normal variable: among enough samples some are a hundred times larger."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 2)

    def forward(self, x):
        return torch.exp(4.0 * self.fc(x))


class Late(nn.Module):
    """Another answer to one kind of samples only, of which none is among the first."""

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
    model = Tail().eval()
    (output,) = measure(model, model, tmp_path, {"x": table(count)}).outputs
    assert output.noise.ratio <= 1.5
    assert output.noise.diff <= 8.0


@pytest.mark.parametrize("factor", [1e-4, 0.5])
def test_fault_of_late_samples_is_found(factor, tmp_path):
    arrays = {"x": table(300)}
    arrays["x"][:32, 0] = np.minimum(arrays["x"][:32, 0], 2.0)
    arrays["x"][200, 0] = 4.0
    model = Tail().eval()
    (output,) = measure(model, Late(model, factor).eval(), tmp_path, arrays).outputs
    assert output.noise.ratio <= 1.5
    assert output.noise.diff > 50.0


def test_analysis_of_an_outlier():
    context = benches.context(Tail().eval(), {"x": table(20)}, size=8)
    with torch.inference_mode():
        look = OutlierAnalysis(context).variants(13)
    assert look.sample == 13
    assert (look.row, look.count) == (5, 8)
    assert look.truth[0].shape == (1, 2)
    floor = look.floor(0)
    relative = floor / np.abs(look.truth[0])
    assert (relative >= 2.0**-24).all()
    assert (relative < 1e-5).all()
    assert len(look.alternatives(0)) == 10


def test_no_outlier_analysis_without_truth():
    context = benches.context(Tail().eval(), {"x": table(20)}, noise_samples=0)
    assert OutlierAnalysis(context).variants(3) is None


class States(nn.Module):
    """What an LSTM returns: the samples are axis 1."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).unsqueeze(0)


class Cancelling(nn.Module):
    """Whose sum cancels to a ten-thousandth where the first feature is large."""

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
    (Tail(), Late(Tail(), 1e-4), True),
    (Cancelling(), Cancelling(), False),
], ids=["a fault", "rounding"])  # fmt: skip
def test_late_samples_on_axis_one_are_analyzed(model, of_file, is_off, tmp_path):
    arrays = {"x": table(300)}
    arrays["x"][:32, 0] = np.minimum(arrays["x"][:32, 0], 2.0)
    arrays["x"][200, 0] = 4.0
    (output,) = measure(States(model).eval(), States(of_file).eval(), tmp_path, arrays).outputs
    assert (output.noise.diff > 50.0) is is_off
    assert is_off or output.noise.diff <= 8.0


class Halves(nn.Module):
    """Rounds what lies within rounding of a half; `shift` moves it to the other side."""

    def __init__(self, shift=0.0):
        super().__init__()
        self.shift = shift

    def forward(self, x):
        return torch.round(x * 0.1 * 10.0 + 0.5 + self.shift).to(torch.int32), x * 1.7


def halves(count=100):
    """Whole numbers, which are near-ties after the sum, only in sample 7; else far from any."""
    x = np.round(table(count) * 10.0) + 0.25
    x[7, 0] = 3.0
    return {"x": x.astype(np.float32)}


@pytest.mark.further
def test_integers_changed_by_rounding_are_near_ties(tmp_path):
    model = Halves().eval()
    integers, _ = measure(model, Halves(3e-7).eval(), tmp_path, halves()).outputs
    plain, _ = measure(model, model, tmp_path, halves()).outputs
    assert plain.unequal == 0
    assert integers.max_abs_diff == 0.0
    assert integers.near_ties <= 1
    integers, _ = measure(Halves().eval(), Halves(0.9).eval(), tmp_path, halves()).outputs
    assert integers.near_ties <= 1
    assert integers.max_abs_diff >= 1.0
    assert integers.unequal > 100


def test_classes_decided_by_rounding_are_ties(tmp_path):
    """Two classes with the same weights, but for the last bit of one of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    model[2].weight.data[1] = model[2].weight.data[0]
    model[2].bias.data[1] = model[2].bias.data[0]
    second = copy.deepcopy(model)
    second[2].bias.data[1] = torch.nextafter(model[2].bias.data[1], torch.tensor(9.0))
    (output,) = measure(model, second, tmp_path, {"x": table(64)}).outputs
    assert output.classification.top1_disagreements == 0
    assert output.classification.top1_ties > 0
    far = copy.deepcopy(model)
    far[2].bias.data[2] += 0.3
    (output,) = measure(model, far, tmp_path, {"x": table(64)}).outputs
    assert output.classification.top1_disagreements > 0


class Pairs(nn.Module):
    """Every sample with every other of its batch: as many columns as the batch has samples."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return (x * self.factor).argmax(1)[:, None] - x.argmax(1)[None], x @ (x * self.factor).T


def test_output_over_pairs_of_samples_is_measured(tmp_path):
    arrays = {"x": table(40)}
    turned = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0, 1.0])
    runtime = measure(Pairs().eval(), Pairs(turned).eval(), tmp_path, arrays)
    assert runtime.failure is None
    assert runtime.outputs[0].near_ties == 0
    assert runtime.outputs[0].max_abs_diff > 0.0
    assert runtime.outputs[1].noise.ratio > 1e3


class Levels(nn.Module):
    """Ten thousand levels, of which many lie on an edge in each sample and in each probe."""

    def __init__(self, gain=10200.0):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.gain = gain

    def forward(self, x):
        levels = torch.sigmoid(4.0 * self.two(torch.relu(self.one(x)))) * self.gain
        return (levels - torch.fmod(levels, 1.0) + 0.5).to(torch.int32)


@pytest.mark.further
@pytest.mark.parametrize(("gain", "verdict"), [(10200.0, "PASS"), (10200.2, "FAIL")])
def test_ties_in_probes_are_found(gain, verdict, tmp_path):
    """The reference's own choices are no measure of what a runtime decides."""
    rows = np.random.default_rng(2).normal(size=(24, 3, 160, 160))[:, :, :32, :32]
    arrays = {"x": rows.astype(np.float32)}
    file = benches.export(Levels(gain).eval(), tmp_path / "model.onnx", arrays).path
    result = gate.check(file, Levels().eval(), arrays)
    assert result.evidence.validity.own_choices
    assert result.decision.verdict.value == verdict


class Rounded(nn.Module):
    """To whole numbers, of which exact halves go to the even one or up."""

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

    class Whole(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x).to(torch.int64)

    (output,) = measure(Whole(reference), Whole(exported), tmp_path, {"x": rows}).outputs
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
    class Doubtful:
        def __init__(self):
            self.left = list(suspicions)
            self.few_draws = False
            self.comparison = SimpleNamespace(floor=self)

        def suspicion(self):
            return self.left[0]

        def widen(self, floors):
            self.left = self.left[1:] or self.left

        def is_clearly_refused(self, policy):
            return clear

    measure, runtime = [], Doubtful()
    monkeypatch.setattr(outliers, "rounding_floor", lambda context, *, draws: measure.append(draws))
    validity = SimpleNamespace(validity=UNRESTRICTED)
    context = SimpleNamespace(truth=validity, applied_policy=None)
    floor = outliers.RoundingFloor(context, [runtime])
    floor.widen()
    floor.widen()
    assert measure == runs
    assert runtime.few_draws is clear
