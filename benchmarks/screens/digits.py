"""Train a small network on scikit-learn's handwritten digits in seconds.

The scene copies this module next to its files, so that the reports show `digits:network`, as for a
user's module.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

SIDE, PIXELS = 16, 48
"""Side length of the model's input, and of the stored images."""
EVALUATED = 450


class InexactGelu(nn.Module):
    """GELU with a constant close to the square root of two, which ONNX Runtime's fusion rounds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1 + torch.erf(x / 1.414225))


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.act = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.conv2(self.act(self.bn1(self.conv1(x)))))


class Digits(nn.Module):
    """A classifier of 16 x 16 images into ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.layer1 = Block(12)
        self.down = nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.layer2 = Block(24)
        self.layer3 = Block(24)
        self.fc = nn.Linear(24 * 16, 10)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.layer3(self.layer2(self.down(self.layer1(self.stem(input)))))
        return self.fc(nn.functional.max_pool2d(x, 2).flatten(1))


def network() -> nn.Module:
    """Build the model."""
    torch.manual_seed(0)
    return Digits()


def gelu_network() -> nn.Module:
    """Build the model with an activation that ONNX Runtime's optimizer computes differently."""
    torch.manual_seed(0)
    model = Digits()
    model.layer2.act = InexactGelu()  # type: ignore[assignment]
    return model


def pictures() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return all digits as RGB images with sharp edges, like scans, and their labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    gray = np.rint(digits.images * (255.0 / 16.0)).astype(np.uint8)
    large = gray.repeat(PIXELS // 8, axis=1).repeat(PIXELS // 8, axis=2)
    return np.stack([large] * 3, axis=-1), digits.target.astype(np.int64)


def save_pictures(folder: Path, images: NDArray[np.uint8]) -> None:
    """Write images as numbered PNG files."""
    folder.mkdir()
    for index, picture in enumerate(images):
        Image.fromarray(picture).save(folder / f"{index:05d}.png")


def train(
    model: nn.Module, inputs: NDArray[np.float32], labels: NDArray[np.int64], *, epochs: int
) -> nn.Module:
    """Train the model in place with a fixed seed, and return it in eval mode."""
    torch.manual_seed(1)
    # With more threads, so small a network mostly waits for synchronization.
    torch.set_num_threads(1)
    samples, targets = torch.from_numpy(inputs), torch.from_numpy(labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(samples)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(samples[batch]), targets[batch]).backward()
            optimizer.step()
    return model.eval()
