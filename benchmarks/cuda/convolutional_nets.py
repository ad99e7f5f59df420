"""Convolutional nets for which CUDA has other kernels than the CPU, or sums in another order."""

from __future__ import annotations

import torch
from torch import nn


class Grouped(nn.Module):
    """Depthwise, grouped and dilated convolutions with BatchNorm, and a gate per channel.

    cuDNN has a different kernel for each, and ONNX Runtime fuses BatchNorm into them.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = _convolution_block(3, 32, 3, stride=2, padding=1)
        self.depthwise = _convolution_block(32, 32, 5, padding=2, groups=32)
        self.widen = _convolution_block(32, 96, 1)
        self.grouped = _convolution_block(96, 96, 3, padding=1, groups=8)
        self.dilated = _convolution_block(96, 96, 3, padding=4, dilation=4, groups=96)
        self.gate = nn.Conv2d(96, 96, 1)
        self.fc = nn.Linear(96, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.widen(self.depthwise(self.stem(x)))
        x = x + self.dilated(self.grouped(x))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.fc(x.mean((2, 3)))


class Volumes(nn.Module):
    """3D convolutions followed by a transposed 2D convolution, GroupNorm and InstanceNorm.

    These have sums over long windows, and the transposed convolution uses a gradient kernel.
    """

    def __init__(self, classes: int = 6) -> None:
        super().__init__()
        self.down = nn.Conv3d(1, 16, 3, stride=2, padding=1)
        self.grouped = nn.GroupNorm(4, 16)
        self.deep = nn.Conv3d(16, 32, (3, 5, 5), padding=(1, 2, 2))
        self.up = nn.ConvTranspose2d(32 * 4, 24, 4, stride=2, padding=1)
        self.single = nn.InstanceNorm2d(24, affine=True)
        self.fc = nn.Linear(24, classes)

    def forward(self, volume: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.grouped(self.down(volume)))
        x = torch.nn.functional.silu(self.deep(x))
        x = torch.relu(self.single(self.up(x.flatten(1, 2))))
        return self.fc(x.square().mean((2, 3)))


def _convolution_block(channels: int, out: int, kernel: int, **options: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, bias=False, **options), nn.BatchNorm2d(out), nn.SiLU()
    )
