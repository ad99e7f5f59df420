"""Recurrent layers, and points that are summed into grid cells by index."""

from __future__ import annotations

import torch
from torch import nn


class Recurrent(nn.Module):
    """A bidirectional GRU followed by an LSTM, for any length."""

    def __init__(self, classes: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 16, batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(32, 24, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.fc = nn.Linear(24, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lstm(self.gru(x)[0])[0]
        return self.fc(self.norm(y[:, -1]))


class Points(nn.Module):
    """A network that sums features of points into grid cells with duplicate indices."""

    def __init__(self, classes: int = 6, cells: int = 6, width: int = 12) -> None:
        super().__init__()
        self.cells, self.width = cells, width
        self.feature = nn.Linear(2, width)
        self.act = nn.Tanh()
        self.conv = nn.Conv2d(width, 16, 3, padding=1)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(16, classes)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        cell = ((points + 1.0) * (0.5 * self.cells)).to(torch.int64).clamp(0, self.cells - 1)
        index = (cell[..., 0] * self.cells + cell[..., 1]).unsqueeze(-1)
        features = self.act(self.feature(points))
        grid = features.new_zeros(points.shape[0], self.cells * self.cells, self.width)
        grid = grid.scatter_add(1, index.expand(-1, -1, self.width), features)
        grid = grid.transpose(1, 2).unflatten(2, (self.cells, self.cells))
        return self.fc(self.relu(self.conv(grid)).amax((2, 3)))
