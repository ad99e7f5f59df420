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

MARK = "GATE_TEST_DIES"
"""Environment: a file that a worker removes before it dies; `always`: each one dies."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x)))


class Rare(Net):
    """Small probabilities, of which ONNX Runtime is off by more than PyTorch: the floor is that of
    random rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(super().forward(x) - 8.0)


class Counting(Net):
    """Multiplies by the number of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Mortal(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _is_worker() and len(x) == 8 and _is_its_turn():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def _is_worker() -> bool:
    """A process of a crew, or an actor of Ray."""
    return multiprocessing.parent_process() is not None or "default_worker" in sys.argv[0]


def _is_its_turn() -> bool:
    mark = os.environ[MARK]
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
