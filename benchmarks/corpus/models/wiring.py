"""Models with branches, two inputs, several outputs or preprocessing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.corpus.models.spatial import Pair


class Backbone(nn.Module):
    """Three convolution stages, two of them strided, with 32 output channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Pair(3, 12, 2)
        self.two = Pair(12, 24, 2)
        self.three = Pair(24, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(self.one(x)))


class Branching(nn.Module):
    """A classifier of images in 0..1 or in 0..255, which it detects from the data."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.fc = nn.Linear(32, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.max() > 2.0):
            x = x / 255.0
        return self.fc(self.backbone(x).mean((2, 3)))


class Conditional(Branching):
    """The same classifier with `torch.cond`, as rewritten for the dynamo exporter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cond(x.max() > 2.0, lambda y: y / 255.0, lambda y: y.clone(), (x,))
        return self.fc(self.backbone(x).mean((2, 3)))


class TwoInputs(nn.Module):
    """A classifier with two inputs: an image and a row of measurements."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.dense = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.Sigmoid()
        self.fc = nn.Linear(48, classes)

    def forward(self, image: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        features = self.backbone(image).mean((2, 3))
        number_features = self.act(self.norm(self.dense(numbers)))
        return self.fc(torch.cat([features, number_features], dim=1))


class Difference(nn.Module):
    """A classifier of the change between two images of equal shape."""

    def __init__(self, classes: int = 6) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.dense = nn.Linear(64, 32)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(32, classes)

    def forward(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        before_features = self.backbone(before).mean((2, 3))
        after_features = self.backbone(after).mean((2, 3))
        return self.fc(
            self.relu(
                self.dense(torch.cat([before_features, after_features - before_features], dim=1))
            )
        )


class Detections(NamedTuple):
    """The named outputs of a detector."""

    scores: torch.Tensor
    boxes: torch.Tensor
    embedding: torch.Tensor
    label: torch.Tensor


class Detector(nn.Module):
    """A detector that returns class scores, a box, a unit embedding and the top-1 class."""

    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.fc = nn.Linear(32, classes)
        self.box = nn.Linear(32, 4)
        self.scale = nn.Softplus()
        self.embed = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> Detections:
        features = self.backbone(x).mean((2, 3))
        scores = self.fc(features)
        unit = functional.normalize(self.embed(features), dim=1)
        return Detections(scores, self.scale(self.box(features)), unit, scores.argmax(1))


class Camera(nn.Module):
    """A classifier of camera bytes, shape (batch, height, width, 3) in RGB, with its preprocessing.

    The preprocessing scales, transposes, resizes and normalizes.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
        self.backbone = Backbone()
        self.fc = nn.Linear(32, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image.permute(0, 3, 1, 2).to(self.mean.dtype) / 255.0
        x = functional.interpolate(x, size=(32, 32), mode="bilinear", align_corners=False)
        x = (x - self.mean) / self.std
        return self.fc(self.backbone(x).mean((2, 3)))
