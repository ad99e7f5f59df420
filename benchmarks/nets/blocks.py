"""Parts of trunks that torch does not provide as one module."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def draw_activation(rng: np.random.Generator) -> nn.Module:
    """Draw one of the usual activations."""
    kinds = (nn.ReLU, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.ELU, nn.LeakyReLU, nn.Softplus,
             nn.Mish, nn.Hardswish, nn.ReLU6, nn.Sigmoid)  # fmt: skip
    return kinds[rng.integers(len(kinds))]()


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class GatedLinearUnit(nn.Module):
    """A gated linear unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(x) * torch.sigmoid(self.gate(x))


class Mixture(nn.Module):
    """Experts weighted by a softmax. With `hard`, only the largest weight is used."""

    def __init__(self, width: int, experts: int, *, hard: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.router, self.hard = nn.Linear(width, experts), hard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.router(x), -1)
        if self.hard:
            is_selected = functional.one_hot(weights.argmax(-1), len(self.experts))
            weights = weights * is_selected.to(weights.dtype)
        expert_outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return torch.relu((expert_outputs * weights.unsqueeze(-2)).sum(-1))


class SqueezeExcite(nn.Module):
    """Squeeze and excitation: channels scaled by a function of their means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 2, 1), nn.Conv2d(width // 2, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(weights)


class Attention(nn.Module):
    """Self-attention written with matrix products, as in many exported models."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        projected = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        mixed = torch.softmax(scores, -1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Recurrent(nn.Module):
    """An LSTM or GRU, which returns all steps and the last state (layers, batch, hidden)."""

    def __init__(self, width: int, layers: int, *, lstm: bool) -> None:
        super().__init__()
        kind = nn.LSTM if lstm else nn.GRU
        self.cell, self.lstm = kind(width, width, layers, batch_first=True), lstm

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps, state = self.cell(x)
        return steps, state[0] if self.lstm else state
