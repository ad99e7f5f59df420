"""Models that reduce over thousands of elements, for which runtimes round differently."""

from __future__ import annotations

import math

import torch
from torch import nn


class Stylist(nn.Module):
    """A style transfer network with InstanceNorm over whole images."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1, padding_mode="reflect")
        self.norm1 = nn.InstanceNorm2d(width, affine=True)
        self.relu1 = nn.ReLU()
        self.inner = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.InstanceNorm2d(width, affine=True)
        self.relu2 = nn.ReLU()
        self.leave = nn.Conv2d(width, 3, 3, padding=1)
        self.tanh = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu1(self.norm1(self.enter(x)))
        y = y + self.relu2(self.norm2(self.inner(y)))
        return self.tanh(self.leave(y))


class Denoiser(nn.Module):
    """One step of diffusion, with GroupNorm over whole images and a sinusoidal step embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.time = nn.Linear(width, width)
        self.norm1 = nn.GroupNorm(4, width)
        self.act1 = nn.SiLU()
        self.inner = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, width)
        self.act2 = nn.SiLU()
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, image: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        indices = torch.arange(half, device=image.device).to(image.dtype)
        angles = step[:, None] * torch.exp(indices * (-math.log(1000.0) / half))
        step_features = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        y = self.enter(image) + step_features[:, :, None, None]
        y = y + self.inner(self.act1(self.norm1(y)))
        return self.leave(self.act2(self.norm2(y)))


class Texture(nn.Module):
    """A classifier without strides, with a global mean over the whole image."""

    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 5, padding=2)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(12, 20, 3, padding=1)
        self.relu2 = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(20, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu2(self.conv2(self.relu1(self.conv1(x))))
        return self.fc(self.pool(y).flatten(1))
