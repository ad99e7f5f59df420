"""The models of the matrix, with random weights from fixed seeds.

These are the pipeline's digits model, two models of torchvision, and nets whose kernels on CUDA
differ most from those on the CPU. Nothing is downloaded.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import nn

from benchmarks import torchvision_models
from benchmarks.corpus import samples
from benchmarks.corpus.architecture import ARCHITECTURES, Architecture, image_architecture
from gate.model.loading import torchvision_model

DIGITS_SIDE, DIGITS_CLASSES = 64, 10
"""The image size and the number of classes in params.yaml."""


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


MODELS: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        image_architecture(
            partial(torchvision_model, "resnet18", weights=None, num_classes=DIGITS_CLASSES),
            DIGITS_SIDE,
            name="digits",
        ),
        ARCHITECTURES["tokens"],
        ARCHITECTURES["recurrent"],
        image_architecture(Grouped, 48),
        Architecture(
            "volumes",
            Volumes,
            lambda n, seed: {
                "volume": samples.normalized(n, 32, seed=seed)[:, :1, None]
                * np.linspace(0.5, 1.5, 8, dtype=np.float32)[:, None, None]
            },
        ),
        *map(torchvision_models.architecture, ("resnet50", "vit_b_16")),
    )
}
