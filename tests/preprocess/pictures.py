"""Test images with sharp edges, computed by a formula."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gate import PreprocessSpec

SMALL = PreprocessSpec(
    resize={"shortest_side": 40},
    crop=(32, 36),
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)
"""A spec like ImageNet's for small images."""


def picture(height: int, width: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """Return an image with gradients, a rectangle, thin lines and noise; uint8 (height, width,
    3)."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    smooth = np.stack([90 + 80 * np.sin(x / 9), 120 + 60 * np.cos(y / 7), (x + 2 * y) % 256], -1)
    pixels = np.clip(smooth + generator.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
    pixels[height // 4 : height // 2, width // 3 : width // 2] = (255, 0, 30)
    pixels[::9, : width // 3] = 0
    pixels[:, width // 2 :: 5] = (250, 250, 10)
    return pixels
