"""Sums of 100 000 terms: ONNX Runtime's order of summation is accepted, a fault beside it is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.parity.probes import benches

N = 102_400
ROWS, COLUMNS = 16, 3


class Computed(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, x):
        return self.compute(x)


class Images(nn.Module):
    """A convolution of images, most of which is background, and the mean of it."""

    def __init__(self, pool):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.pool = pool

    def forward(self, x):
        return self.pool(torch.relu(self.conv(x)))


def rows(kind, count=ROWS):
    """Shape (count, N): every row another constant, or nearly, or random numbers."""
    random = np.random.default_rng(0)
    if kind in ("random", "normal"):
        draw = random.random if kind == "random" else random.standard_normal
        return draw((count, N)).astype(np.float32)
    constant = np.repeat(random.random((count, 1)) + 0.1, N, 1)
    if kind == "nearly":
        constant += 1e-6 * random.standard_normal(constant.shape)
    return constant.astype(np.float32)


def background():
    images = np.full((4, 1, 320, 320), 0.71, np.float32)
    images[:, :, 40:90, 60:140] = np.random.default_rng(0).random((4, 1, 50, 80))
    return images


def noise(model, wrong, x, tmp_path, *, opset=17):
    """The record of a file that is exported from `wrong`."""
    file = benches.export(wrong.eval(), tmp_path / "model.onnx", {"x": x}, opset=opset)
    options = {"probes": False, "stability_samples": 0, "noise_samples": len(x)}
    measured = benches.measured(model.eval(), file, {"x": x}, **options)
    return measured.runtimes[0].outputs[0].noise


def last(name):
    return lambda x: getattr(x, name)(-1, keepdim=True)


CORRECT = {
    "mean": last("mean"),
    "var": last("var"),
    "std": last("std"),
    "norm": lambda x: x.norm(dim=-1, keepdim=True),
    "mean of axis 1": lambda x: x.unsqueeze(-1).repeat(1, 1, 3).mean(1),
    "global pool": lambda x: functional.adaptive_avg_pool2d(x.view(-1, 1, 320, 320), 1).flatten(1),
    "layer norm": lambda x: functional.layer_norm(x, (N,))[:, ::1000],
    "weighted sum": lambda x: x @ torch.full((N, 1), 1.0 / N),
}


@pytest.mark.rows(3)
@pytest.mark.parametrize("kind", ["constant", "nearly"])
@pytest.mark.parametrize("name", CORRECT)
def test_terms_that_are_rounded_alike_are_no_fault(name, kind, tmp_path):
    model = Computed(CORRECT[name])
    judged = noise(model, model, rows(kind, 6), tmp_path, opset=13)
    assert judged.ratio <= 1.5
    assert judged.peak <= 6.0


POOLS = {
    "global pool": lambda x: functional.adaptive_avg_pool2d(x, 1).flatten(1),
    "mean": lambda x: x.mean((2, 3)),
    "std": lambda x: x.std((2, 3)),
    "channels last": lambda x: x.permute(0, 2, 3, 1).mean((1, 2)),
    "group norm": lambda x: functional.group_norm(x, 2)[:, :, ::16, ::16],
}


@pytest.mark.parametrize("name", POOLS)
def test_images_with_a_background_are_averaged(name, tmp_path):
    model = Images(POOLS[name])
    judged = noise(model, model, background(), tmp_path)
    assert judged.ratio <= 1.5
    assert judged.peak <= 6.0


def several(x):
    """The row in three orders, as channels."""
    return torch.stack([x, x.flip(-1), x.roll(777, -1)], 1)


FAULTS = {
    "n - 1 in a mean": (
        "random",
        lambda x: several(x).mean(-1),
        lambda x: several(x).sum(-1) / (N - 1),
    ),
    "n in a deviation": (
        "random",
        lambda x: several(x).std(-1),
        lambda x: several(x).std(-1, correction=0),
    ),
    "epsilon": (
        "random",
        lambda x: functional.layer_norm(x, (N,), eps=1e-5)[:, ::100],
        lambda x: functional.layer_norm(x, (N,), eps=2e-5)[:, ::100],
    ),
    "epsilon of normal numbers": (
        "normal",
        lambda x: functional.layer_norm(x, (N,), eps=1e-5)[:, ::100],
        lambda x: functional.layer_norm(x, (N,), eps=2e-5)[:, ::100],
    ),
    "another axis": (
        "random",
        lambda x: x.view(-1, 320, 320).mean(1),
        lambda x: x.view(-1, 320, 320).mean(2),
    ),
    "a scale of softmax": (
        "random",
        lambda x: functional.softmax(x, -1)[:, ::100],
        lambda x: functional.softmax(x * (1.0 + 1e-4), -1)[:, ::100],
    ),
}


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_long_sum_is_refused(name, tmp_path):
    kind, right, wrong = FAULTS[name]
    x = rows(kind)
    assert noise(Computed(right), Computed(right), x, tmp_path).ratio <= 1.5
    assert noise(Computed(right), Computed(wrong), x, tmp_path).ratio > 1.5
