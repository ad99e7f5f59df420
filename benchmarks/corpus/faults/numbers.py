"""Files that are correct unless a value is zero, large or negative."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.corpus import samples
from benchmarks.corpus.architecture import Architecture, image_architecture
from benchmarks.corpus.entry import in_model, register_exporter_fault
from benchmarks.corpus.exporters import (
    DIRECT_13,
    DIRECT_17,
    DIRECT_20,
    DYNAMO_18,
    TRACED_13,
    TRACED_17,
)
from benchmarks.corpus.models.between import MiddleOperation
from benchmarks.corpus.models.spatial import Pair


class Standardised(nn.Module):
    """A classifier that standardizes each image by its mean and deviation first."""

    def __init__(self) -> None:
        super().__init__()
        self.least = 1e-3
        self.one, self.two = Pair(3, 12, 2), Pair(12, 16, 2)
        self.fc = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean((1, 2, 3), keepdim=True)
        deviation = self.deviation(x, centered).clamp(min=self.least)
        return self.fc(self.two(self.one(centered / deviation)).mean((2, 3)))

    def deviation(self, _: torch.Tensor, centered: torch.Tensor) -> torch.Tensor:
        """Return the deviation of each image, shape (batch, 1, 1, 1)."""
        return centered.square().mean((1, 2, 3), keepdim=True).sqrt()


class Logarithmic(nn.Module):
    """A classifier that takes the logarithm of intensities, clamped above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.floor = 1e-4
        self.one, self.two = Pair(3, 12, 2), Pair(12, 16, 2)
        self.fc = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.log(torch.clamp(x, min=self.floor))
        return self.fc(self.two(self.one(x)).mean((2, 3)))


class Boxes(nn.Module):
    """A model that returns box widths as exponentials, clamped against overflow as in detectors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Pair(3, 12, 2), Pair(12, 16, 2)
        self.limit = 4.0
        self.fc = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logarithms = self.fc(self.two(self.one(x)).mean((2, 3)))
        return torch.exp(torch.clamp(logarithms, max=self.limit))


class Sharp(nn.Module):
    """A classifier that returns probabilities at a low temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Pair(3, 12, 2), Pair(12, 16, 2)
        self.fc = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.softmax(8.0 * self.fc(self.two(self.one(x)).mean((2, 3))))

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the softmax over axis 1."""
        return functional.softmax(scores, dim=1)


class LogSigmoid(MiddleOperation):
    """A model with log-sigmoid, exported as Log(Sigmoid(x)), which is -inf below -104."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.logsigmoid(20.0 * super().forward(x))

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        return y


class SteepSoftplus(MiddleOperation):
    """A classifier with softplus, which is linear above a threshold that the exporter ignores."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        return functional.softplus(y, beta=3.0, threshold=5.0)


def intensity_architecture(make: type[nn.Module]) -> Architecture:
    """Return an architecture for images in 0.05..0.95, which are never zero or flat."""
    return Architecture(
        make.__name__.lower(),
        make,
        lambda n, seed: {"input": 0.05 + 0.9 * samples.images(n, 32, seed=seed)},
    )


@in_model(
    "nan for some inputs",
    (intensity_architecture(Standardised), DIRECT_17),
    (intensity_architecture(Standardised), DYNAMO_18),
)
def divided_by_zero(model: nn.Module, _: Architecture) -> None:
    """Remove the lower bound of the deviation, which gives NaN for every flat image."""
    model.least = 0.0


class _ByMoments(Standardised):
    def deviation(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        axes = (1, 2, 3)
        square = x.square().mean(axes, keepdim=True)
        return (square - x.mean(axes, keepdim=True).square()).sqrt()


@in_model("nan for some inputs", (intensity_architecture(Standardised), TRACED_13))
def variance_by_moments(model: nn.Module, _: Architecture) -> None:
    """Compute the variance as E[x^2] - E[x]^2, which rounding can make negative."""
    model.__class__ = _ByMoments


@in_model("inf on one side", (intensity_architecture(Logarithmic), DIRECT_17))
def logarithm_of_zero(model: nn.Module, _: Architecture) -> None:
    """Remove the lower bound of the logarithm, which gives -inf for every black pixel."""
    model.floor = 0.0


@in_model("overflow", (image_architecture(Boxes), DIRECT_20))
def clamp_left_out(model: nn.Module, _: Architecture) -> None:
    """Remove the upper bound of the exponential, which can overflow."""
    model.limit = float("inf")


class _Naive(Sharp):
    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        powers = torch.exp(scores)
        return powers / powers.sum(1, keepdim=True)


@in_model("overflow", (image_architecture(Sharp), DIRECT_13))
def softmax_without_maximum(model: nn.Module, _: Architecture) -> None:
    """Compute softmax without subtracting the maximum, which overflows for scores above 88."""
    model.__class__ = _Naive


register_exporter_fault(
    "inf on one side",
    (image_architecture(LogSigmoid), TRACED_17),
    (image_architecture(LogSigmoid), DYNAMO_18),
)
register_exporter_fault("ignored argument", (image_architecture(SteepSoftplus), DIRECT_17))
