"""Image classifiers: residual, depthwise, and one without normalization."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A residual block of two 3x3 convolutions with BatchNorm."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu2 = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(y + self.shortcut(x))


class ResNet(nn.Module):
    """A small residual network with three stages."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.stage1 = Block(16, 16)
        self.stage2 = Block(16, 32, 2)
        self.stage3 = Block(32, 64, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.norm(self.stem(x))))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.fc(torch.flatten(self.pool(x), 1))


class SqueezeExcite(nn.Module):
    """A squeeze-and-excitation layer, which scales channels by a function of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce = nn.Conv2d(channels, channels // 4, 1)
        self.relu = nn.ReLU()
        self.expand = nn.Conv2d(channels // 4, channels, 1)
        self.gate = nn.Hardsigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(self.expand(self.relu(self.reduce(self.pool(x)))))


class Inverted(nn.Module):
    """An inverted residual block: expand, depthwise, squeeze-excite, project."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        wide = 3 * inside
        self.expand = nn.Conv2d(inside, wide, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(wide, eps=1e-3)
        self.act1 = nn.ReLU6()
        self.depthwise = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.norm2 = nn.BatchNorm2d(wide, eps=1e-3)
        self.act2 = nn.Hardswish()
        self.excite = SqueezeExcite(wide)
        self.project = nn.Conv2d(wide, outside, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outside, eps=1e-3)
        self.same = stride == 1 and inside == outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act1(self.norm1(self.expand(x)))
        y = self.excite(self.act2(self.norm2(self.depthwise(y))))
        y = self.norm3(self.project(y))
        return x + y if self.same else y


class MobileNet(nn.Module):
    """A network of depthwise separable convolutions, like those for phones."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(16, eps=1e-3)
        self.act = nn.Hardswish()
        self.block1 = Inverted(16, 16, 1)
        self.block2 = Inverted(16, 24, 2)
        self.block3 = Inverted(24, 24, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(24, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block3(self.block2(self.block1(self.act(self.norm(self.stem(x))))))
        return self.fc(self.dropout(self.pool(x).flatten(1)))


class Pooling(nn.Module):
    """A network with all kinds of pooling, a dilated convolution and a dense head.

    It has no normalization. It takes images of 30 pixels, for which ceil_mode changes the size.
    """

    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.relu1 = nn.ReLU()
        self.average = nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)
        self.conv2 = nn.Conv2d(16, 24, 3, padding=2, dilation=2)
        self.relu2 = nn.LeakyReLU(0.1)
        self.maximum = nn.MaxPool2d(2, 2, ceil_mode=True)
        self.conv3 = nn.Conv2d(24, 24, 3, padding=1, padding_mode="reflect")
        self.relu3 = nn.ReLU()
        self.halve = nn.AvgPool2d(2)
        self.dense = nn.Linear(24 * 16, 32)
        self.act = nn.SiLU()
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(32, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.average(self.relu1(self.conv1(x)))
        x = self.maximum(self.relu2(self.conv2(x)))
        x = self.halve(self.relu3(self.conv3(x)))
        return self.fc(self.dropout(self.act(self.dense(x.flatten(1)))))
