"""An architecture of the benchmark, and weights that behave like trained ones."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Arrays = dict[str, NDArray[np.generic]]
Draw = Callable[[int, np.random.Generator], Arrays]
Half = Literal["tune", "confirm"]
ARCHITECTURES: dict[str, Architecture] = {}


@dataclass(frozen=True)
class Architecture:
    """A small net, and what it takes."""

    name: str
    make: Callable[[], nn.Module]
    draw: Draw
    """(number of samples, generator) to the arrays that forward takes, in its order."""
    exporters: tuple[str, ...] = ("legacy", "dynamo")
    """Those that write a file of it."""

    @property
    def half(self) -> Half:
        """By a checksum of the name, so that nobody chose it."""
        return "tune" if zlib.crc32(self.name.encode()) % 2 else "confirm"

    def build(self) -> nn.Module:
        """In eval mode, the same every time."""
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            model = self.make().eval().requires_grad_(requires_grad=False)
            _shake(model)
            _calibrate(model, self.samples(8, seed=5))
        return model

    def samples(self, count: int, *, seed: int = 1) -> Arrays:
        """Random ones."""
        return self.draw(count, np.random.default_rng(seed))


def architecture(
    name: str, draw: Draw, *, exporters: tuple[str, ...] = ("legacy", "dynamo")
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Registers a function that makes a net."""

    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ARCHITECTURES[name] = Architecture(name, make, draw, exporters)
        return make

    return register


def images(side: int, channels: int = 3) -> Draw:
    """Smooth fields with a little noise, shape (n, channels, side, side)."""

    def draw(count: int, rng: np.random.Generator) -> Arrays:
        coarse = rng.normal(size=(count, channels, side // 4, side // 4))
        smooth = coarse.repeat(4, axis=2).repeat(4, axis=3)
        seen = smooth + 0.3 * rng.normal(size=smooth.shape)
        return {"image": (seen / seen.std()).astype(np.float32)}

    return draw


def tokens(length: int, vocabulary: int, *, masked: bool = False) -> Draw:
    """Integers of (n, length); with a mask of which some are padding at the end."""

    def draw(count: int, rng: np.random.Generator) -> Arrays:
        drawn: Arrays = {"ids": rng.integers(0, vocabulary, size=(count, length))}
        if masked:
            lengths = rng.integers(length // 2, length + 1, size=(count, 1))
            drawn["mask"] = (np.arange(length)[None] < lengths).astype(np.int64)
        return drawn

    return draw


def vectors(*shape: int) -> Draw:
    """Normal numbers, shape (n, *shape)."""

    def draw(count: int, rng: np.random.Generator) -> Arrays:
        return {"x": rng.normal(size=(count, *shape)).astype(np.float32)}

    return draw


def _shake(model: nn.Module) -> None:
    """Parameters that start as constants (norms, biases, tables, layer scales of 1e-6) differ in
    every element, and small matrices carry a signal, as trained ones do."""
    for name, parameter in model.named_parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            centre = 1.0 if name.endswith(("weight", "gamma")) and parameter.dim() == 1 else 0.0
            nn.init.normal_(parameter, centre, 0.2)
        elif parameter.numel() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() > 1:
            fitting = 1.0 / math.sqrt(parameter[0].numel())
            parameter.mul_(max(1.0, fitting / float(parameter.std())))


def _calibrate(model: nn.Module, samples: Arrays) -> None:
    """Let BatchNorm see samples, one forward, statistics replaced."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        norm.momentum = None
        norm.reset_running_stats()
        norm.train()
    with torch.no_grad():
        model(*(torch.from_numpy(array) for array in samples.values()))
    model.train()  # forgets what was computed beforehand, as timm's LeViT does
    model.eval()
