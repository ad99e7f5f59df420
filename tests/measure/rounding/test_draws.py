from __future__ import annotations

import math

import pytest
import torch

from gate.reference.random_rounding import Draws

KINDS = ("normal", "uniform", "shares")


def taken(kind: str, seed: int, *shape: int) -> torch.Tensor:
    return getattr(Draws(seed), kind)(shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (2, 3, 5), (5, 1 << 18), (3, 1000, 700)])
def test_shape_and_dtype(kind, shape):
    numbers = taken(kind, 0, *shape)
    assert numbers.shape == shape
    assert numbers.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind):
    one, again, other = (taken(kind, seed, 1000) for seed in (3, 3, 4))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_each_draw_is_another(kind):
    draws = Draws(0)
    one, other = (getattr(draws, kind)((1000,)) for _ in range(2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize(("kind", "mean", "deviation", "low", "high"), [
    ("normal", 0.0, 1.0, -6.0, 6.0),
    ("uniform", 0.0, math.sqrt(1 / 3), -1.0, 1.0),
    ("shares", 0.5, math.sqrt(1 / 12), 0.0, 1.0),
])  # fmt: skip
def test_distribution(kind, mean, deviation, low, high):
    numbers = taken(kind, 1, 1 << 17).double()
    assert abs(numbers.mean() - mean) < 0.01
    assert abs(numbers.std() - deviation) < 0.01
    assert low <= numbers.min()
    assert numbers.max() <= high
    assert abs((numbers - mean).pow(3).mean()) < 0.05


def test_within_a_stretch_no_number_comes_twice_with_either_sign():
    numbers = taken("normal", 0, 1 << 18).abs()
    assert len(numbers.unique()) > 0.98 * len(numbers)  # float32 has no more of them


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_sums_over_more_than_the_store_are_as_large_as_of_independent_numbers(kind):
    """Numbers that come again with one sign only would add up: by a factor of two here."""
    count = 1 << 22
    deviation = 1.0 if kind == "normal" else math.sqrt(1 / 3)
    sums = torch.stack([taken(kind, seed, count).double().sum() for seed in range(24)])
    rms = sums.square().mean().sqrt() / (deviation * math.sqrt(count))
    assert 0.6 < rms < 1.5


def test_it_is_shared_by_whoever_came_first_and_whoever_takes_gradients():
    with torch.inference_mode():
        taken("normal", 0, 3)
    x = torch.ones(3, requires_grad=True)
    (x * taken("normal", 0, 3)).sum().backward()
    assert x.grad is not None
