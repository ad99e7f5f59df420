"""Models for workers, which import them by name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

DEATH_VARIABLE = "GATE_TEST_DIES"
"""Environment variable with a file that a worker removes before it dies; `always`: all workers
die."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x)))


class Rare(Net):
    """Small probabilities for which ONNX Runtime's error exceeds PyTorch's: random rounding sets
    the noise floor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(super().forward(x) - 8.0)


class Counting(Net):
    """Multiply by the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Mortal(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _is_worker() and len(x) == 8 and _must_die():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def _is_worker() -> bool:
    """Return whether this is a worker process or a Ray actor."""
    return multiprocessing.parent_process() is not None or "default_worker" in sys.argv[0]


def _must_die() -> bool:
    mark = os.environ[DEATH_VARIABLE]
    if mark == "always":
        return True
    try:
        Path(mark).unlink()
    except FileNotFoundError:
        return False
    return True


def build() -> nn.Module:
    return Net().eval()


def rare() -> nn.Module:
    return Rare().eval()


def counting() -> nn.Module:
    return Counting().eval()


def mortal() -> nn.Module:
    return Mortal().eval()


def another_each_time() -> nn.Module:
    model = Net().eval()
    with torch.no_grad():
        model.two.bias += int.from_bytes(os.urandom(2), "big") / 65536 + 1e-3
    return model


def rest() -> None:
    time.sleep(300)
