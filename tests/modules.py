"""Modules of a few lines for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Function(nn.Module):
    """A module that computes a function of its input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Layers(nn.Module):
    """Layers by name, each made by a function after `seed` is set, and a function of this module
    and its input.
    """

    def __init__(
        self, compute: Callable[..., Any], *, seed: int = 0, **layers: Callable[[], Any]
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.compute = compute
        for name, make in layers.items():
            setattr(self, name, make())

    def forward(self, x):
        return self.compute(self, x)
