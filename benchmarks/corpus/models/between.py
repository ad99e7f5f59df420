"""A classifier with one operation in the middle that exporters get wrong."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.corpus.models.spatial import Pair


class MiddleOperation(nn.Module):
    """Two strided convolutions to (batch, 16, 8, 8), the method `middle`, a mean, and scores."""

    width = 16
    """Number of channels that `middle` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Pair(3, 12, 2)
        self.two = Pair(12, 16, 2)
        self.fc = nn.Linear(self.width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.middle(self.two(self.one(x))).mean((2, 3)))

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        """Apply the operation that the exporter gets wrong."""
        raise NotImplementedError
