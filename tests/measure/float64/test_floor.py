"""The floor of rounding: it widens for what kernels may do otherwise, and hides no fault."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from gate.measure.noise_floor import MORE_DRAWS, NoiseStatistics, rounding_floor
from gate.statistics.error_groups import CANDIDATE
from tests.probes import benches

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


def test_the_floor_is_reproducible():
    first, again = (floors(Several())[0].result() for _ in range(2))
    assert first == again


def test_only_the_samples_with_a_truth_count():
    (floor,) = floors(Wide(), {"x": benches.images(40)}, noise_samples=10, size=4)
    assert floor.result().samples == 12


@pytest.mark.parametrize(
    ("model", "options"),
    [(Several(), {"noise_samples": 0}), (Exactly(), {})],
    ids=["no float64 reference", "not computable"],
)
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

    runtime = run().floors()[-1].rms(CANDIDATE)
    off = {}
    for draws in (3, MORE_DRAWS):
        floor = NoiseStatistics.middle([run() for _ in range(draws)])
        off[draws] = float((runtime / floor.floors()[-1].rms(CANDIDATE)).max())
    assert off[3] > 15.0
    assert off[MORE_DRAWS] < 10.0
