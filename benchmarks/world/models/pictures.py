"""Models that map small images to class maps, bytes or depth."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class EncoderDecoderMap(nn.Module):
    """An encoder and decoder of convolutions, (batch, 3, 32, 32) to (batch, width, 32, 32)."""

    width = 6

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, self.width, 1)

    def scores(self, picture: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.norm(self.down(picture)))
        hidden = hidden + functional.silu(self.middle(hidden))
        hidden = functional.interpolate(hidden, scale_factor=2.0, mode="bilinear")
        return self.head(hidden)


class ClassMap(EncoderDecoderMap):
    """Returns the class of every pixel, int64."""

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return self.scores(picture).argmax(1)


class MapAndScores(EncoderDecoderMap):
    """Returns the class scores of every pixel and the class map."""

    def forward(self, picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.scores(picture)
        return scores, scores.argmax(1)


class ByteImage(EncoderDecoderMap):
    """Returns an image rounded to uint8."""

    width = 3

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        levels = torch.sigmoid(self.scores(picture)) * 255.0
        return torch.round(levels).to(torch.uint8)


class Depth(EncoderDecoderMap):
    """Returns the depth in meters, the inverse of a positive score."""

    width = 1

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return 1.0 / (functional.softplus(self.scores(picture)[:, 0] - 1.0) + 1e-3)


class CenterNet(EncoderDecoderMap):
    """Returns heat maps of centers with a prior of 1 %, and offsets and sizes in pixels."""

    width = 7

    def forward(self, picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.scores(picture)
        heat = torch.sigmoid(scores[:, :3] - 4.6)
        boxes = torch.cat([torch.sigmoid(scores[:, 3:5]), scores[:, 5:].exp() * 8.0], dim=1)
        return heat, boxes
