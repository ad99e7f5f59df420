"""Files that are wrong only for inputs outside the samples' range, and correct counterparts."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.modules import Layers
from tests.probes import benches
from tests.probes.test_prober import examine

RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(3, 21, (12, 5))
MASK = np.ones_like(TOKENS)
VECTORS = RANDOM.normal(size=(12, 6)).astype(np.float32)
BYTES = RANDOM.integers(40, 90, (12, 3, 4, 4)).astype(np.uint8)
DYNAMIC_LENGTH = {"tokens": {0: "batch", 1: "length"}, "output": {0: "batch"}}


class Masked(nn.Module):
    def __init__(self, *, ignored: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 3)
        self.ignored = ignored

    def forward(self, tokens, mask):
        weights = mask.to(torch.float32).unsqueeze(-1)
        if self.ignored:
            weights = weights * 0.0 + 1.0
        observed = self.table(tokens) * weights
        return self.head(observed.sum(1) / weights.sum(1))


def make_head(end) -> nn.Module:
    """Return two layers around a function whose faulty range the samples do not reach."""
    return Layers(
        lambda m, x: m.last(end(m.first(x))),
        first=lambda: nn.Linear(6, 16),
        last=lambda: nn.Linear(16, 3),
    )


class EmbeddedTokens(nn.Module):
    """An embedding whose rows may differ for token ids that the samples do not contain."""

    def __init__(self, *, stale: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(200, 8), nn.Linear(8, 3)
        if stale:
            self.table.weight.data[150:] += 0.5

    def forward(self, tokens):
        return self.head(self.table(tokens).mean(1))


class Positions(nn.Module):
    def __init__(self, *, most: int = 64, stale: int = 64) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(30, 8), nn.Embedding(64, 8)
        self.places.weight.data[stale:] += 0.5
        self.places.weight.data = self.places.weight.data[:most].clone()
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        indices = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head((self.table(tokens) + self.places(indices)).mean(1))


class BatchDependent(nn.Module):
    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.layer, self.most = nn.Linear(6, 3), most

    def forward(self, x):
        y = self.layer(x)
        if self.most is not None:
            count = torch.ones_like(x[:, 0]).sum()
            y = torch.where(count > self.most, y * 0.5, y)
        return y


class Pixels(nn.Module):
    """Map each byte through a lookup table."""

    def __init__(self, *, stale: bool = False) -> None:
        super().__init__()
        self.register_buffer("curve", torch.linspace(0, 1, 256) ** 2.2)
        if stale:
            self.curve[200:] = 1.0
        self.head = nn.Linear(48, 3)

    def forward(self, x):
        return self.head(self.curve[x.long()].flatten(1))


class NanReplaced(nn.Module):
    def __init__(self, *, mends: bool = True) -> None:
        super().__init__()
        self.layer, self.mends = nn.Linear(6, 3), mends

    def forward(self, x):
        return self.layer(torch.nan_to_num(x) if self.mends else x)


def make_nan_swallowed() -> nn.Module:
    """Operators through which NaN propagates in PyTorch, but perhaps not in a runtime."""
    return Layers(
        lambda m, x: m.head(m.layers(x).flatten(1)),
        layers=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU6()),
        head=lambda: nn.Linear(36, 3),
    )


def build_model(build, **options):
    torch.manual_seed(0)
    return build(**options).eval()


FAULTS = {
    "mask ignored": (Masked, {}, {"ignored": True}, {"tokens": TOKENS, "mask": MASK}, {"masked"}),
    "relu for relu6": (
        make_head, {"end": nn.ReLU6()}, {"end": nn.ReLU()}, {"x": VECTORS}, {"magnitudes"},
    ),
    "rows beyond the samples": (EmbeddedTokens, {}, {"stale": True}, {"tokens": TOKENS}, {"values"}),
    "shorter positions": (Positions, {}, {"most": 20}, {"tokens": TOKENS}, {"size_64"}),
    "other positions": (Positions, {}, {"stale": 60}, {"tokens": TOKENS}, {"size_64"}),
    "more than 32": (BatchDependent, {}, {"most": 32}, {"x": VECTORS}, {"batch_"}),
    "bytes beyond": (Pixels, {}, {"stale": True}, {"x": BYTES}, {"values"}),
    "nan not mended": (NanReplaced, {}, {"mends": False}, {"x": VECTORS}, {"nan", "inf", "minus_inf"}),
}  # fmt: skip


def _axes(name: str):
    return DYNAMIC_LENGTH if "positions" in name else None


@pytest.mark.rows(4)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_outside_the_samples_fails(tmp_path, name):
    build, right, wrong, arrays, caught = FAULTS[name]
    model, file_model = build_model(build, **right), build_model(build, **wrong)
    file_model.load_state_dict({
        key: value for key, value in model.state_dict().items()
        if not key.startswith(("table", "places", "curve"))
    }, strict=False)  # fmt: skip
    _, _, failed = examine(model, file_model, tmp_path, arrays, axes=_axes(name))
    assert failed, "nothing was seen"
    assert all(check.startswith(("probe_", "graph_")) for check in failed), failed
    for item in caught:
        assert any(check.startswith(f"probe_{item}") for check in failed), failed


CORRECT = {
    **{name: (build, right, arrays) for name, (build, right, _, arrays, _) in FAULTS.items()},
    "swallowed": (make_nan_swallowed, {}, {"x": benches.images()}),
    "bool mask": (Masked, {}, {"tokens": TOKENS, "mask": np.ones_like(TOKENS, np.bool_)}),
}


@pytest.mark.rows(4)
@pytest.mark.parametrize("name", CORRECT)
def test_correct_file_passes_outside_the_samples(tmp_path, name):
    build, right, arrays = CORRECT[name]
    model = build_model(build, **right)
    _, probes, failed = examine(model, copy.deepcopy(model), tmp_path, arrays, axes=_axes(name))
    assert failed == set()
    assert not any(probe.failure for probe in probes.values())
