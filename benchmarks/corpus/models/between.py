"""A classifier whose middle contains one operation that exporters get wrong."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.corpus import samples
from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.models.spatial import Pair


class Between(nn.Module):
    """Features of shape (batch, 16, 8, 8), `between`, their means, scores."""

    width = 16
    """Channels that `between` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Pair(3, 12, 2)
        self.two = Pair(12, 16, 2)
        self.fc = nn.Linear(self.width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.between(self.two(self.one(x))).mean((2, 3)))

    def between(self, y: torch.Tensor) -> torch.Tensor:
        """What the exporter gets wrong."""
        raise NotImplementedError


def on_images(make: type[nn.Module]) -> Architecture:
    """An architecture that takes normalised images of 32 pixels."""
    return Architecture(
        make.__name__.lower(),
        make,
        lambda n, seed: {"input": samples.normalised(n, 32, seed=seed)},
    )
