"""Thresholds that a file moves within the gap between the samples."""

import numpy as np
import pytest
import torch
from torch import nn

from gate.probes.threshold_probes import threshold_probes
from tests.probes import benches
from tests.probes.test_prober import examine

RANDOM = np.random.default_rng(0)
VECTORS = {"x": RANDOM.normal(size=(12, 6)).astype(np.float32)}
WITH_IDS = {**VECTORS, "ids": RANDOM.integers(0, 9, 12)}
STEPS = {
    "greater": lambda score, shift: torch.where(score > 0.3 + shift, score, -score),
    "at most": lambda score, shift: score * (score <= -0.2 - shift),
    "floor": lambda score, shift: torch.floor(4 * score + shift),
    "round": lambda score, shift: torch.round(4 * score + shift),
    "sign": lambda score, shift: torch.sign(score - shift),
    "bins": lambda score, shift: (score[..., None] > torch.tensor([-0.5, shift, 0.5])).sum(-1),
}


class Scored(nn.Module):
    def __init__(self, step, shift: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.table = nn.Linear(6, 1), nn.Embedding(9, 6)
        self.step, self.shift = step, shift

    def forward(self, x, ids=None):
        scores = self.layer(x if ids is None else x + self.table(ids))
        return self.step(scores, self.shift).float()


@pytest.mark.rows(2)
@pytest.mark.parametrize("arrays", [VECTORS, WITH_IDS], ids=["floats", "with integers"])
@pytest.mark.parametrize("name", STEPS)
def test_moved_threshold_fails_and_the_same_threshold_passes(name, arrays, tmp_path):
    step = STEPS[name]
    _, probes, failed = examine(Scored(step), Scored(step), tmp_path, arrays, size=1)
    assert failed == set()
    assert any(probe.startswith("threshold_") for probe in probes)
    _, _, failed = examine(Scored(step), Scored(step, 1e-3), tmp_path, arrays, size=1)
    assert any(check.startswith("probe_threshold_") for check in failed), failed


def created(model, arrays=VECTORS, **options):
    context = benches.create_context(model, arrays, **options)
    return list(threshold_probes(context, benches.create_profile(model, arrays), []))


def test_probes_are_on_both_sides_and_near():
    model = Scored(STEPS["greater"])
    scores = [
        float(model.layer(torch.from_numpy(probe.batch["x"])).detach()) for probe in created(model)
    ]
    assert len(scores) == 2
    assert min(scores) <= 0.3 < max(scores)
    assert max(scores) - min(scores) < 2 * 2.5e-4


@pytest.mark.parametrize(
    "step",
    [
        lambda score, _: score,
        lambda score, _: score > 1e6,  # no sample reaches it
        lambda score, _: (
            score.expand(-1, 4) > score.detach() * torch.tensor([1.0001, 0.9999, 2, 3])
        ),
    ],
    ids=["no step", "never", "samples are near"],
)
def test_without_a_gap_no_probe_is_made(step):
    assert created(Scored(step)) == []
