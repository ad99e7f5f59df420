"""A whole pipeline that runs in seconds: a small network on 16x16 digits."""

from torch import nn


def network() -> nn.Module:
    """Logits of ten classes from (batch, 3, 16, 16); with BatchNorm, as real networks have."""
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
