from __future__ import annotations

import math

import pytest
import torch

from gate.reference.random_rounding import Draws

KINDS = ("normal", "uniform", "shares")


def draw_numbers(kind: str, seed: int, *shape: int) -> torch.Tensor:
    return getattr(Draws(seed), kind)(shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (2, 3, 5), (5, 1 << 18), (3, 1000, 700)])
def test_shape_and_dtype(kind, shape):
    numbers = draw_numbers(kind, 0, *shape)
    assert numbers.shape == shape
    assert numbers.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_draws_depend_only_on_the_seed(kind):
    first, repeated, other_seed = (draw_numbers(kind, seed, 1000) for seed in (3, 3, 4))
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other_seed)


@pytest.mark.parametrize("kind", KINDS)
def test_consecutive_draws_differ(kind):
    draws = Draws(0)
    first, second = (getattr(draws, kind)((1000,)) for _ in range(2))
    assert not torch.equal(first, second)


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


def test_numbers_do_not_repeat():
    numbers = draw_numbers("normal", 0, 1 << 18).abs()
    assert len(numbers.unique()) > 0.98 * len(numbers)  # float32 has only so many distinct values


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_long_sums_scatter_like_independent_numbers(kind):
    """Draw independent numbers; repeated numbers with equal signs would double these sums."""
    count = 1 << 22
    deviation = 1.0 if kind == "normal" else math.sqrt(1 / 3)
    sums = torch.stack([draw_numbers(kind, seed, count).double().sum() for seed in range(24)])
    rms = sums.square().mean().sqrt() / (deviation * math.sqrt(count))
    assert 0.6 < rms < 1.5


def test_draws_of_inference_mode_work_with_gradients():
    with torch.inference_mode():
        draw_numbers("normal", 0, 3)
    x = torch.ones(3, requires_grad=True)
    (x * draw_numbers("normal", 0, 3)).sum().backward()
    assert x.grad is not None
