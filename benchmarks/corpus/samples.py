"""Generate samples with the statistics of real inputs from a seed: smooth images with a little
noise, tokens with padding, drifting series.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

Arrays = dict[str, NDArray[np.generic]]

MEAN, STD = 0.45, 0.25
"""Approximate mean and deviation of natural images in 0..1, as used by preprocessing."""


def images(count: int, size: int, *, seed: int, channels: int = 3) -> NDArray[np.float32]:
    """Return images in 0..1, shape (count, channels, size, size).

    Each has three octaves of smooth fields, a random brightness and contrast, and a little noise.
    """
    rng = np.random.default_rng(seed)
    luminance = sum(_field(rng, (count, 1), size, cells) / cells for cells in (2, 4, 8))
    tint = sum(_field(rng, (count, channels), size, cells) / cells for cells in (2, 4))
    contrast = rng.uniform(0.2, 0.9, (count, 1, 1, 1))
    brightness = rng.uniform(0.25, 0.75, (count, 1, 1, 1))
    noise = rng.normal(0.0, 0.02, (count, channels, size, size))
    return np.clip(brightness + contrast * (luminance + tint) + noise, 0.0, 1.0).astype(np.float32)


def normalized(count: int, size: int, *, seed: int) -> NDArray[np.float32]:
    """Return the same images normalized to about zero mean and unit deviation."""
    return ((images(count, size, seed=seed) - MEAN) / STD).astype(np.float32)


def pixels(count: int, size: int, *, seed: int) -> NDArray[np.uint8]:
    """Return the same images as bytes of a camera: uint8, shape (count, size, size, 3)."""
    levels = np.rint(images(count, size, seed=seed) * 255.0).astype(np.uint8)
    return np.ascontiguousarray(levels.transpose(0, 2, 3, 1))


def tokens(count: int, length: int, *, vocabulary: int, seed: int) -> NDArray[np.int64]:
    """Return token indices, shape (count, length). Small indices are frequent; 0 pads most rows."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.zipf(1.3, (count, length)), vocabulary - 1)
    lengths = rng.integers(length // 2, length + 1, count)
    return np.where(np.arange(length) < lengths[:, None], ids, 0).astype(np.int64)


def series(count: int, length: int, features: int, *, seed: int) -> NDArray[np.float32]:
    """Return random walks of unit scale, shape (count, length, features)."""
    rng = np.random.default_rng(seed)
    steps = rng.normal(0.0, 1.0, (count, length, features))
    return (steps.cumsum(axis=1) / np.sqrt(np.arange(1, length + 1))[:, None]).astype(np.float32)


def steps(count: int, *, seed: int) -> NDArray[np.float32]:
    """Return diffusion steps, integers in 0..999 as floats, shape (count,)."""
    values = np.random.default_rng(seed).integers(0, 1000, count)
    return values.astype(np.float32)


def points(count: int, number: int, *, seed: int) -> NDArray[np.float32]:
    """Return point clouds in -1..1, shape (count, number, 2), around four centers."""
    rng = np.random.default_rng(seed)
    centers = rng.uniform(-0.6, 0.6, (count, 4, 2))
    point_centers = np.take_along_axis(centers, rng.integers(0, 4, (count, number, 1)), axis=1)
    return np.clip(point_centers + rng.normal(0, 0.2, (count, number, 2)), -0.99, 0.99).astype(
        np.float32
    )


def _field(
    rng: np.random.Generator, leading: tuple[int, int], size: int, cells: int
) -> NDArray[np.float64]:
    coarse = torch.from_numpy(rng.normal(0.0, 0.5, (*leading, cells + 1, cells + 1)))
    fine = functional.interpolate(coarse, size=(size, size), mode="bicubic", align_corners=True)
    return np.asarray(fine.numpy())
