"""Train a small network on scikit-learn's handwritten digits in seconds.

The scene puts a copy of this module beside its files, so that pages say `digits:network`, as a
user's own page would.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

SIDE, PIXELS = 16, 48
"""Of the model's input, and of a picture as it is stored."""
EVALUATED = 450


class Gelu(nn.Module):
    """A constant that is nearly the square root of two: ONNX Runtime's fusion takes it for that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1 + torch.erf(x / 1.414225))


class Block(nn.Module):
    """Adds what it computes to what it got."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.act = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.conv2(self.act(self.bn1(self.conv1(x)))))


class Digits(nn.Module):
    """Ten classes of 16x16 pictures."""

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
    """The model."""
    torch.manual_seed(0)
    return Digits()


def gelu_network() -> nn.Module:
    """The same with an activation that ONNX Runtime's optimiser computes in another way."""
    torch.manual_seed(0)
    model = Digits()
    model.layer2.act = Gelu()  # type: ignore[assignment]
    return model


def pictures() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All digits, RGB with sharp edges as a scanner gives them, and their labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = np.rint(digits.images * (255.0 / 16.0)).astype(np.uint8)
    large = grey.repeat(PIXELS // 8, axis=1).repeat(PIXELS // 8, axis=2)
    return np.stack([large] * 3, axis=-1), digits.target.astype(np.int64)


def save_pictures(folder: Path, kept: NDArray[np.uint8]) -> None:
    """PNG files by number."""
    folder.mkdir()
    for place, picture in enumerate(kept):
        Image.fromarray(picture).save(folder / f"{place:05d}.png")


def train(
    model: nn.Module, inputs: NDArray[np.float32], labels: NDArray[np.int64], *, epochs: int
) -> nn.Module:
    """Train in place, by a fixed seed; gives the model in eval mode."""
    torch.manual_seed(1)
    torch.set_num_threads(1)  # of so small a network, more wait for each other
    samples, targets = torch.from_numpy(inputs), torch.from_numpy(labels)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(samples)).split(32):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(samples[batch]), targets[batch]).backward()
            optimiser.step()
    return model.eval()
