from __future__ import annotations

import math

import pytest
import torch

from gate.reference.random_rounding import Draws

KINDS = ("normal", "uniform", "shares")


def draw_numbers(kind: str, seed: int, *shape: int) -> torch.Tensor:
    return getattr(Draws(seed), kind)(shape)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_depend_only_on_the_seed(kind):
    first, repeated, other_seed = (draw_numbers(kind, seed, 1000) for seed in (3, 3, 4))
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other_seed)


@pytest.mark.parametrize(("kind", "mean", "deviation", "low", "high"), [
    ("normal", 0.0, 1.0, -6.0, 6.0),
    ("uniform", 0.0, math.sqrt(1 / 3), -1.0, 1.0),
    ("shares", 0.5, math.sqrt(1 / 12), 0.0, 1.0),
])  # fmt: skip
def test_distribution(kind, mean, deviation, low, high):
    numbers = draw_numbers(kind, 1, 1 << 17).double()
    assert abs(numbers.mean() - mean) < 0.01
    assert abs(numbers.std() - deviation) < 0.01
    assert low <= numbers.min()
    assert numbers.max() <= high
    assert abs((numbers - mean).pow(3).mean()) < 0.05


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_long_sums_scatter_like_independent_numbers(kind):
    """Draw independent numbers; repeated numbers with equal signs would double these sums."""
    count = 1 << 22
    deviation = 1.0 if kind == "normal" else math.sqrt(1 / 3)
    sums = torch.stack([draw_numbers(kind, seed, count).double().sum() for seed in range(24)])
    rms = sums.square().mean().sqrt() / (deviation * math.sqrt(count))
    assert 0.6 < rms < 1.5
