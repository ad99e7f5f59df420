"""Files that are correct unless a number is zero, large or negative."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.corpus import samples
from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.entry import as_exported, in_model
from benchmarks.corpus.exporters import (
    DIRECT_13,
    DIRECT_17,
    DIRECT_20,
    DYNAMO_18,
    TRACED_13,
    TRACED_17,
)
from benchmarks.corpus.models.between import Between, on_images
from benchmarks.corpus.models.spatial import Pair


class Standardised(nn.Module):
    """Each image is standardised by its own mean and deviation first."""

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
        """Of each image, shape (batch, 1, 1, 1)."""
        return centered.square().mean((1, 2, 3), keepdim=True).sqrt()


class Logarithmic(nn.Module):
    """Works on the logarithm of intensities, kept from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.floor = 1e-4
        self.one, self.two = Pair(3, 12, 2), Pair(12, 16, 2)
        self.fc = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.log(torch.clamp(x, min=self.floor))
        return self.fc(self.two(self.one(x)).mean((2, 3)))


class Boxes(nn.Module):
    """Widths as exponentials, kept from overflow as in every detector."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Pair(3, 12, 2), Pair(12, 16, 2)
        self.limit = 4.0
        self.fc = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logarithms = self.fc(self.two(self.one(x)).mean((2, 3)))
        return torch.exp(torch.clamp(logarithms, max=self.limit))


class Sharp(nn.Module):
    """Probabilities at a low temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Pair(3, 12, 2), Pair(12, 16, 2)
        self.fc = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.softmax(8.0 * self.fc(self.two(self.one(x)).mean((2, 3))))

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """Over axis 1."""
        return functional.softmax(scores, dim=1)


class LogSigmoid(Between):
    """Log-sigmoid is written as Log(Sigmoid(x)): minus infinity from -104 downwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.logsigmoid(20.0 * super().forward(x))

    def between(self, y: torch.Tensor) -> torch.Tensor:
        return y


class SteepSoftplus(Between):
    """Softplus is linear from its threshold on; the exporter forgets the threshold."""

    def between(self, y: torch.Tensor) -> torch.Tensor:
        return functional.softplus(y, beta=3.0, threshold=5.0)


def on_intensities(make: type[nn.Module]) -> Architecture:
    """Images in 0.05..0.95: no sample is ever zero or flat."""
    return Architecture(
        make.__name__.lower(),
        make,
        lambda n, seed: {"input": 0.05 + 0.9 * samples.images(n, 32, seed=seed)},
    )


@in_model(
    "nan for some inputs",
    (on_intensities(Standardised), DIRECT_17),
    (on_intensities(Standardised), DYNAMO_18),
)
def divided_by_zero(model: nn.Module, _: Architecture) -> None:
    """The deviation is not kept from zero: NaN for every flat image."""
    model.least = 0.0


class _ByMoments(Standardised):
    def deviation(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        axes = (1, 2, 3)
        square = x.square().mean(axes, keepdim=True)
        return (square - x.mean(axes, keepdim=True).square()).sqrt()


@in_model("nan for some inputs", (on_intensities(Standardised), TRACED_13))
def variance_by_moments(model: nn.Module, _: Architecture) -> None:
    """The variance is the mean of squares less the square of the mean: negative by rounding."""
    model.__class__ = _ByMoments


@in_model("inf on one side", (on_intensities(Logarithmic), DIRECT_17))
def logarithm_of_zero(model: nn.Module, _: Architecture) -> None:
    """The logarithm is not kept from zero: infinite for every black pixel."""
    model.floor = 0.0


@in_model("overflow", (on_images(Boxes), DIRECT_20))
def clamp_left_out(model: nn.Module, _: Architecture) -> None:
    """The exponential is not kept from overflow."""
    model.limit = float("inf")


class _Naive(Sharp):
    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        powers = torch.exp(scores)
        return powers / powers.sum(1, keepdim=True)


@in_model("overflow", (on_images(Sharp), DIRECT_13))
def softmax_without_maximum(model: nn.Module, _: Architecture) -> None:
    """Softmax by exponentials that overflow from 88 on; below they are right."""
    model.__class__ = _Naive


as_exported(
    "inf on one side", (on_images(LogSigmoid), TRACED_17), (on_images(LogSigmoid), DYNAMO_18)
)
as_exported("ignored argument", (on_images(SteepSoftplus), DIRECT_17))
