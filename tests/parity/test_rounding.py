"""Random rounding moves results as far as an honest float32 implementation may be off, no more."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gate.parity.rounding import RandomRounding

UNIT = 2.0**-24


@pytest.fixture(autouse=True, params=[True, False], ids=["inference", "gradients"])
def inference(request):
    """Composite operators are seen whole without gradients, else in parts."""
    with torch.inference_mode(request.param):
        yield


def moved(compute, x, *, seed=0, scale=1.0):
    """Relative change of each element, in units of 2^-24."""
    still = compute(x)
    with RandomRounding(seed, scale=scale):
        tossed = compute(x)
    return ((tossed.double() / still.double() - 1.0) / UNIT).abs()


def draw(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) + 0.3


@pytest.mark.parametrize(
    ("compute", "units"),
    [
        (lambda x: x * 1.7, 1.0),
        (lambda x: x @ x.mT, 1.0),
        (lambda x: nn.functional.conv2d(x, x[:3].flip(-1)), 1.0),
        (torch.exp, 4.0),
        (torch.erf, 4.0),
        (nn.functional.gelu, 4.0),
        (lambda x: torch.softmax(x, -1), 4.0),
        (lambda x: x.mean((-1, -2)), math.sqrt(48 * 64 / 3)),
        (lambda x: x.sum(-1), math.sqrt(64 / 3)),
        (lambda x: nn.functional.adaptive_avg_pool2d(x, 1), math.sqrt(48 * 64 / 3)),
        (lambda x: nn.functional.avg_pool2d(x, 16), math.sqrt(256 / 3)),
        (lambda x: torch.var(x, -1), math.sqrt(64 / 3)),
    ],
    ids=["product", "matmul", "conv", "exp", "erf", "gelu", "softmax",
         "mean", "sum", "global pool", "pool", "var"],
)  # fmt: skip
def test_how_far_each_kind_of_operator_may_be_off(compute, units):
    off = moved(compute, draw(8, 3, 48, 64))
    # 2 more: the product by the toss is rounded itself, by up to a whole ulp below a power of two.
    assert 0.7 * units < off.max() <= units + 2.0


def test_a_scale_moves_farther():
    x = draw(100, 100)
    assert moved(lambda x: x * 1.7, x, scale=8.0).max() > 7.0


def test_a_seed_gives_the_same_and_leaves_the_caller_s_randomness():
    before = torch.get_rng_state()
    results = []
    for seed in (1, 1, 2):
        with RandomRounding(seed):
            results.append(draw(50) * 1.3)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.cat([x.clone(), x.contiguous()]),
        lambda x: nn.functional.pad(x[:, 1:, ::2], (1, 2, 1, 0), mode="reflect"),
        lambda x: nn.functional.max_pool2d(torch.relu(-x).abs(), 2),
        lambda x: x.transpose(1, 2).reshape(8, -1).float(),
        lambda x: torch.where(x > 0.5, x, -x).clamp(0.1, 0.9),
        lambda x: x[[2, 1], :, 3].roll(1, 0).flip(1),
        lambda x: nn.functional.interpolate(x, scale_factor=2, mode="nearest"),
        lambda x: torch.stack([x.amax(1), x.max(1).values, x.sort(1).values[:, 0]]),
    ],
)
def test_what_moves_or_chooses_numbers_is_exact(compute):
    x = draw(8, 3, 6, 6)
    with RandomRounding(0):
        tossed = compute(x)
    assert torch.equal(tossed, compute(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.bool])
def test_other_dtypes_stay(dtype):
    x = (draw(40) * 8).to(dtype)
    with RandomRounding(0):
        assert torch.equal(x.repeat(2), torch.cat([x, x]))


def test_results_of_several_parts_and_of_none():
    x = draw(6, 4)
    with RandomRounding(0):
        values, places = (x * 1.0).sort(dim=1)
        empty = torch.mean(x[:0], 1)
    assert torch.equal(places, x.sort(dim=1).indices)
    assert not torch.equal(values, x.sort(dim=1).values)
    assert empty.shape == (0,)
