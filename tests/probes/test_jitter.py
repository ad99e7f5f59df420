from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gate.probes.branches import perturb_rounding
from tests.probes import benches

X = {"x": benches.vectors()}


def draws(model, arrays=None):
    arrays = arrays or X
    stand = benches.stand(model, arrays)
    with torch.inference_mode():
        return stand.reference.run(arrays), perturb_rounding(stand, arrays, draws=range(3))


class Times(nn.Module):
    def __init__(self, factor=3.3):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def test_each_run_moves_by_about_the_last_bit():
    (reference,), runs = draws(Times())
    assert len(runs) == 3
    for (moved,) in runs:
        off = np.abs(moved / reference - 1.0)
        assert 0.0 < off.max() < 4 * 2.0**-23


def test_a_seed_gives_the_same_runs_and_leaves_the_caller_s_randomness():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second = draws(Times())[1], draws(Times())[1]
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0][0], first[1][0])
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


@pytest.mark.parametrize(
    "x", [np.zeros((2, 3)), np.arange(6.0).reshape(2, 3), np.full((2, 3), 2.0**20 - 1)]
)
def test_zeros_and_integers_are_exact(x):
    arrays = {"x": x.astype(np.float32)}
    (reference,), runs = draws(Times(1.0), arrays)
    assert all(np.array_equal(moved, reference) for (moved,) in runs)


@pytest.mark.parametrize("seed", [-1, 2**70])
def test_any_seed_of_a_policy_will_do(seed):
    stand = benches.stand(Times(), X)
    determinism = stand.policy.determinism.model_copy(update={"seed": seed})
    policy = stand.policy.model_copy(update={"determinism": determinism})
    with torch.inference_mode():
        assert len(perturb_rounding(replace(stand, policy=policy), X, draws=range(3))) == 3


class Indices(nn.Module):
    def forward(self, x):
        grid = torch.arange(x.shape[1]).float() * 2.0 / 2.0
        return x[:, grid.long()], (x.shape[1] - 1 - grid).long()


def test_indices_that_are_computed_in_floats_stay():
    (_, indices), runs = draws(Indices())
    assert all(np.array_equal(moved[1], indices) for moved in runs)


class Constant(nn.Module):
    """(x - mean) / deviation of a constant: exactly zero, or anything, by the last bit."""

    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[1:])


def test_what_is_ill_conditioned_moves_far():
    constant = {"x": np.full((4, 6), 0.7, np.float32)}
    (reference,), runs = draws(Constant(), constant)
    assert max(np.abs(moved - reference).max() for (moved,) in runs) > 1e-6
    (reference,), runs = draws(Constant())
    assert max(np.abs(moved - reference).max() for (moved,) in runs) < 1e-5


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = x * 1.7
        y[:, 0].relu_()
        y[:, 1:] = 0.25
        return y, y.view(-1)


def test_views_and_what_is_done_in_place_keep_their_meaning():
    (reference, flat), runs = draws(InPlace())
    for moved, view in runs:
        assert np.allclose(moved, reference, rtol=1e-5)
        assert np.allclose(view, flat, rtol=1e-5)
        assert (moved[:, 1:] == 0.25).all()


class Refuses(nn.Module):
    def forward(self, x):
        if (x * 1.1 != x * 1.1 * 1.0).any():
            raise ValueError("not today")
        return x


def test_a_model_that_can_not_be_computed_so_has_no_runs():
    assert draws(Refuses())[1] == []
