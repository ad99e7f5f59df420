"""Parts of trunks that torch does not provide as one module."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def activation(rng: np.random.Generator) -> nn.Module:
    """One of those that people use."""
    kinds = (nn.ReLU, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.ELU, nn.LeakyReLU, nn.Softplus,
             nn.Mish, nn.Hardswish, nn.ReLU6, nn.Sigmoid)  # fmt: skip
    return kinds[rng.integers(len(kinds))]()


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Gate(nn.Module):
    """A gated linear unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(x) * torch.sigmoid(self.gate(x))


class Mixture(nn.Module):
    """Experts weighed by a softmax; `hard`: only the winner, by its weight."""

    def __init__(self, width: int, experts: int, *, hard: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.router, self.hard = nn.Linear(width, experts), hard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.router(x), -1)
        if self.hard:
            chosen = functional.one_hot(weights.argmax(-1), len(self.experts))
            weights = weights * chosen.to(weights.dtype)
        made = torch.stack([expert(x) for expert in self.experts], -1)
        return torch.relu((made * weights.unsqueeze(-2)).sum(-1))


class Squeeze(nn.Module):
    """Squeeze and excitation: channels weighed by their means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 2, 1), nn.Conv2d(width // 2, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(weights)


class Attention(nn.Module):
    """Self-attention by hand, as models have it that are exported."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        mixed = torch.softmax(scores, -1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Recurrent(nn.Module):
    """LSTM or GRU; returns the steps and the state (layers, batch, hidden)."""

    def __init__(self, width: int, layers: int, *, lstm: bool) -> None:
        super().__init__()
        kind = nn.LSTM if lstm else nn.GRU
        self.cell, self.lstm = kind(width, width, layers, batch_first=True), lstm

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made, state = self.cell(x)
        return made, state[0] if self.lstm else state
