"""Models that output or resize images: a U-Net, a pyramid, a generator."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Pair(nn.Module):
    """A convolution with BatchNorm and ReLU."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.norm(self.conv(x)))


class Segmenter(nn.Module):
    """A U-Net for any height and width, which returns class scores for each pixel."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.first = Pair(3, 12)
        self.down = nn.MaxPool2d(2)
        self.second = Pair(12, 24)
        self.third = Pair(24, 24)
        self.joined = Pair(36, 16)
        self.fc = nn.Conv2d(16, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.first(x)
        coarse = self.third(self.second(self.down(fine)))
        size = (fine.shape[2], fine.shape[3])
        wide = functional.interpolate(coarse, size=size, mode="bilinear", align_corners=False)
        return self.fc(self.joined(torch.cat([fine, wide], dim=1)))


class Pyramid(nn.Module):
    """A classifier that resizes features in every mode."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = Pair(3, 12, 2)
        self.body = Pair(12, 16, 2)
        self.nearest = nn.Upsample(scale_factor=2, mode="nearest")
        self.linear = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.corners = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.cubic = nn.Upsample(scale_factor=2, mode="bicubic", align_corners=False)
        self.side = Pair(12, 16)
        self.merge = Pair(80, 24, 2)
        self.pool = nn.AdaptiveMaxPool2d(1)
        self.fc = nn.Linear(24, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.stem(x)
        coarse = self.body(fine)
        levels = [
            self.side(fine),
            self.nearest(coarse),
            self.linear(coarse),
            self.corners(coarse),
            self.cubic(coarse),
        ]
        return self.fc(self.pool(self.merge(torch.cat(levels, dim=1))).flatten(1))


class Generator(nn.Module):
    """An image-to-image model with reflected borders, several norms and a transposed
    convolution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 5, padding=2, padding_mode="reflect")
        self.instance = nn.InstanceNorm2d(16, affine=True)
        self.relu1 = nn.ReLU()
        self.shrink = nn.Conv2d(16, 24, 3, 2, 1)
        self.group = nn.GroupNorm(4, 24)
        self.prelu = nn.PReLU(24)
        self.atrous = nn.Conv2d(24, 24, 3, padding=2, dilation=2, groups=2)
        self.elu = nn.ELU()
        self.grow = nn.ConvTranspose2d(24, 16, 3, 2, 1, output_padding=1)
        self.relu2 = nn.ReLU()
        self.expand = nn.Conv2d(16, 12, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        self.tanh = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu1(self.instance(self.enter(x)))
        y = self.prelu(self.group(self.shrink(y)))
        y = y + self.elu(self.atrous(y))
        y = self.relu2(self.grow(y))
        return self.tanh(self.shuffle(self.expand(y)))
