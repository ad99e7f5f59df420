"""Nets for which CUDA differs from the CPU: other kernels, or sums in another order."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.corpus.models.attention import SelfAttention


class TwoTexts(nn.Module):
    """A text encoder that maps tokens and a mask to scores, with 4 layers of width 128."""

    def __init__(self, classes: int = 12, vocabulary: int = 500, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(128, width)
        self.blocks = nn.ModuleList(_MaskedBlock(width, 8) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        indices = torch.arange(tokens.shape[1], device=tokens.device)
        unpadded = mask.to(torch.float32).unsqueeze(-1)
        x = self.embedding(tokens) + self.positions(indices)
        for block in self.blocks:
            x = block(x, mask == 0)
        x = self.norm(x) * unpadded
        return self.fc(x.sum(1) / unpadded.sum(1).clamp(min=1.0))


class _MaskedBlock(nn.Module):
    """A pre-norm block of masked attention and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), padding)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


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


class Recurrent(nn.Module):
    """A bidirectional GRU and a two-layer LSTM.

    cuDNN implements their loops with another order of sums, and has a separate switch for TF32.
    """

    def __init__(self, classes: int = 8, features: int = 12) -> None:
        super().__init__()
        self.gru = nn.GRU(features, 48, batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(96, 64, num_layers=2, batch_first=True)
        self.fc = nn.Linear(64, classes)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.fc(self.lstm(self.gru(series)[0])[0].mean(1))


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
