"""Recurrent nets and nets with shared modules and frozen norms, as users write them."""

from __future__ import annotations

import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from benchmarks.localisation.architecture import architecture, images, vectors


class Tagger(nn.Module):
    """LSTM in both directions, two layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards = nn.Linear(6, 12)
        self.lstm = nn.LSTM(12, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        y, _ = self.lstm(torch.relu(self.inwards(x)))
        return self.head(y)


class Forecaster(nn.Module):
    """GRU, of which the last state counts; a shared layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 16, batch_first=True)
        self.mix = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        _, last = self.gru(x)
        y = last[-1]
        for _ in range(2):
            y = y + torch.tanh(self.mix(self.norm(y)))
        return self.head(y) * 0.5


class Branches(nn.Module):
    """Two branches that are joined, with norms that are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = FrozenBatchNorm2d(8)
        self.left = nn.Conv2d(8, 8, 3, padding=1)
        self.right = nn.Conv2d(8, 8, 1)
        self.gain = nn.Parameter(torch.ones(8, 1, 1))
        self.head = nn.Linear(16, 5)

    def join(self, left, right):
        return torch.cat([left, right], 1)

    def forward(self, x):
        y = torch.relu(self.norm(self.stem(x)))
        y = self.join(self.left(y) * self.gain, torch.sigmoid(self.right(y)))
        return self.head(y.mean((2, 3)))


@architecture("own-lstm", vectors(10, 6))
def tagger() -> nn.Module:
    return Tagger()


@architecture("own-gru", vectors(10, 6))
def forecaster() -> nn.Module:
    return Forecaster()


@architecture("own-branches", images(16))
def branches() -> nn.Module:
    model = Branches()
    for name in ("weight", "bias", "running_mean"):
        nn.init.normal_(getattr(model.norm, name), 0.5, 0.2)
    nn.init.uniform_(model.norm.running_var, 0.5, 2.0)
    return model
