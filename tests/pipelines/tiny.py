"""A small network on 16x16 digits, with which the whole pipeline runs in seconds."""

import torch
from torch import nn


def network() -> nn.Module:
    """Return logits of ten classes for (batch, 3, 16, 16). It has BatchNorm, as real networks
    have."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


class EncoderAndHead(nn.Module):
    """The same network as two modules with code between them."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(network())
        self.encoder = nn.Sequential(*layers[:6])
        self.classifier = nn.Sequential(*layers[7:])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.encoder(images * 2.0).flatten(1))


def encoder_and_head() -> nn.Module:
    """Return the model of two parts."""
    return EncoderAndHead()
