"""Random trunks from inputs to features, including the map or sequence before pooling."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.nets.blocks import (
    Attention,
    GatedLinearUnit,
    Mixture,
    Recurrent,
    Residual,
    SqueezeExcite,
    draw_activation,
)
from benchmarks.nets.inputs import Inputs


class Features(NamedTuple):
    """The features that heads can read."""

    vector: torch.Tensor
    """Shape (batch, width)."""
    spread: torch.Tensor
    """Shape (batch, channels, height, width) or (batch, length, channels), or the vector again."""
    state: torch.Tensor
    """Last state of an LSTM or GRU, shape (layers, batch, hidden), or the vector again."""


class Trunk(nn.Module):
    """A module that embeds the inputs, applies blocks and pools, and standardizes if calibrated."""

    def __init__(self, inputs: Inputs, stem: nn.Module, blocks: nn.Sequential, pool: str) -> None:
        super().__init__()
        self.kind, self.extra, self.pool = inputs.kind, inputs.extra, pool
        self.stem, self.blocks = stem, blocks
        self.standard: nn.Module = nn.Identity()

    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None) -> Features:
        spread, state = self._apply_stem(first, second), None
        if self.extra == "mask" and second is not None:
            # Also before the blocks: states depend only on them, and an unused input would be
            # removed.
            spread = spread * second.to(spread.dtype).unsqueeze(-1)
        for block in self.blocks:
            if isinstance(block, Recurrent):
                spread, state = block(spread)
            else:
                spread = block(spread)
        if self.extra == "mask" and second is not None:
            spread = spread * second.to(spread.dtype).unsqueeze(-1)
        vector = self.standard(self._pool(spread, second))
        return Features(vector, spread, vector if state is None else state)

    def _apply_stem(self, first: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
        if self.kind == "bytes":
            first = first.permute(0, 3, 1, 2).to(self.stem[0].weight.dtype) / 255.0
        if self.extra == "category":
            return self.stem(first, second)
        return self.stem(first)

    def _pool(self, spread: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
        if spread.ndim == 2:
            return spread
        axes = (2, 3) if spread.ndim == 4 else (1,)
        if self.pool == "mean" and self.extra == "mask" and second is not None:
            lengths = second.to(spread.dtype).sum(1, keepdim=True)
            return spread.sum(1) / lengths.clamp(min=1.0)
        if self.pool == "mean":
            return spread.mean(axes)
        if self.pool == "max":
            return spread.amax(axes)
        if self.pool == "last":
            return spread[:, -1] if spread.ndim == 3 else spread[:, :, -1, -1]
        return spread.flatten(1)


def draw(rng: np.random.Generator, inputs: Inputs) -> Trunk:
    """Draw a trunk for these inputs, with weights from torch's global generator."""
    makers: dict[str, Callable[..., Trunk]] = {
        "table": _draw_dense,
        "image": _draw_convolutional,
        "bytes": _draw_convolutional,
    }
    return makers.get(inputs.kind, _draw_sequential)(rng, inputs)


class _Tabular(nn.Module):
    """A stem that standardizes columns and appends an embedded category."""

    def __init__(self, columns: int, categories: int, out: int, *, norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(columns) if norm else nn.Identity()
        self.embedding = nn.Embedding(categories, 4) if categories else None
        self.linear = nn.Linear(columns + (4 if categories else 0), out)

    def forward(self, table: torch.Tensor, category: torch.Tensor | None = None) -> torch.Tensor:
        table = self.norm(table)
        if self.embedding is not None:
            table = torch.cat([table, self.embedding(category)], 1)
        return self.linear(table)


class _TokenEmbedding(nn.Module):
    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.tokens(ids) + self.positions(positions)


def _draw_dense(rng: np.random.Generator, inputs: Inputs) -> Trunk:
    width = int(rng.integers(4, 48))
    categories = 60 if inputs.extra else 0
    stem = _Tabular(inputs.width, categories, width, norm=bool(rng.random() < 0.9))
    blocks: list[nn.Module] = []
    for _ in range(rng.integers(0, 5)):
        kind = rng.choice(["plain", "norm", "layer", "residual", "gate", "mixture"])
        inner: list[nn.Module] = [nn.Linear(width, width), draw_activation(rng)]
        if kind == "norm":
            inner.insert(1, nn.BatchNorm1d(width))
        if kind == "layer":
            inner.insert(0, nn.LayerNorm(width))
        if kind == "residual":
            inner = [Residual(nn.Sequential(*inner, nn.Linear(width, width)))]
        if kind == "gate":
            inner = [GatedLinearUnit(width)]
        if kind == "mixture":
            inner = [Mixture(width, int(rng.integers(2, 5)), hard=bool(rng.random() < 0.5))]
        blocks += inner
    return Trunk(inputs, stem, nn.Sequential(*blocks), "none")


def _draw_convolutional(rng: np.random.Generator, inputs: Inputs) -> Trunk:
    width = 4 * int(rng.integers(1, 5))
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, stride=int(rng.integers(1, 3))))
    blocks: list[nn.Module] = []
    for _ in range(rng.integers(1, 5)):
        conv = nn.Conv2d(width, width, 3, padding=1, bias=bool(rng.random() < 0.5))
        depthwise = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1)
        )
        choices: list[list[nn.Module]] = [
            [conv, draw_activation(rng)],
            [conv, nn.BatchNorm2d(width), draw_activation(rng)],
            [depthwise, nn.BatchNorm2d(width), nn.Hardswish()],
            [Residual(nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())), nn.ReLU()],
            [nn.GroupNorm(4, width), draw_activation(rng), conv],
            [nn.InstanceNorm2d(width, affine=True), conv, draw_activation(rng)],
            [SqueezeExcite(width)],
            [nn.MaxPool2d(3, 1, 1)],
            [nn.AvgPool2d(3, 1, 1)],
            [nn.Upsample(scale_factor=2, mode="nearest"), nn.AvgPool2d(2), conv],
            [nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), nn.MaxPool2d(2)],
            [nn.ConvTranspose2d(width, width, 2, stride=2), nn.MaxPool2d(2), draw_activation(rng)],
        ]
        blocks += choices[rng.integers(len(choices))]
    return Trunk(inputs, stem, nn.Sequential(*blocks), str(rng.choice(["mean", "max", "flat"])))


def _draw_sequential(rng: np.random.Generator, inputs: Inputs) -> Trunk:
    width = 4 * int(rng.integers(2, 7))
    length = next(iter(inputs.arrays.values())).shape[1]
    stem: nn.Module = nn.Linear(inputs.width, width)
    if inputs.kind == "tokens":
        stem = _TokenEmbedding(inputs.width, length, width)
    blocks: list[nn.Module] = []
    for _ in range(rng.integers(1, 4)):
        feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        choices: list[list[nn.Module]] = [
            [Residual(Attention(width, int(rng.choice([1, 2, 4]))))],
            [Residual(Attention(width, 2)), nn.LayerNorm(width), Residual(feed)],
            [nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)],
            [Recurrent(width, int(rng.integers(1, 3)), lstm=True)],
            [Recurrent(width, 1, lstm=False)],
            [nn.LayerNorm(width), nn.Linear(width, width), draw_activation(rng)],
            [Residual(feed)],
        ]
        blocks += choices[rng.integers(len(choices))]
    return Trunk(inputs, stem, nn.Sequential(*blocks), str(rng.choice(["mean", "max", "last"])))
