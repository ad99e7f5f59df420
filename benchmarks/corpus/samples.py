"""Generate samples with the statistics of real inputs from a seed: smooth images with a little
noise, tokens with padding, drifting series."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

Arrays = dict[str, NDArray[np.generic]]

MEAN, STD = 0.45, 0.25
"""Roughly the mean and deviation of natural images in 0..1, as preprocessing takes them off."""


def images(count: int, size: int, *, seed: int, channels: int = 3) -> NDArray[np.float32]:
    """Images in 0..1, shape (count, channels, size, size): three octaves of smooth fields, with a
    brightness and a contrast of their own, and a little noise."""
    rng = np.random.default_rng(seed)
    shared = sum(_field(rng, (count, 1), size, cells) / cells for cells in (2, 4, 8))
    tint = sum(_field(rng, (count, channels), size, cells) / cells for cells in (2, 4))
    contrast = rng.uniform(0.2, 0.9, (count, 1, 1, 1))
    brightness = rng.uniform(0.25, 0.75, (count, 1, 1, 1))
    noise = rng.normal(0.0, 0.02, (count, channels, size, size))
    return np.clip(brightness + contrast * (shared + tint) + noise, 0.0, 1.0).astype(np.float32)


def normalised(count: int, size: int, *, seed: int) -> NDArray[np.float32]:
    """The same images as a preprocessing would hand them on: about zero mean, unit deviation."""
    return ((images(count, size, seed=seed) - MEAN) / STD).astype(np.float32)


def pixels(count: int, size: int, *, seed: int) -> NDArray[np.uint8]:
    """The same images as a camera gives them: uint8, shape (count, size, size, 3)."""
    bytes_ = np.rint(images(count, size, seed=seed) * 255.0).astype(np.uint8)
    return np.ascontiguousarray(bytes_.transpose(0, 2, 3, 1))


def tokens(count: int, length: int, *, vocabulary: int, seed: int) -> NDArray[np.int64]:
    """Token indices, shape (count, length), frequent ones small; 0 pads the end of most rows."""
    rng = np.random.default_rng(seed)
    drawn = np.minimum(rng.zipf(1.3, (count, length)), vocabulary - 1)
    lengths = rng.integers(length // 2, length + 1, count)
    return np.where(np.arange(length) < lengths[:, None], drawn, 0).astype(np.int64)


def series(count: int, length: int, features: int, *, seed: int) -> NDArray[np.float32]:
    """Random walks of unit scale, shape (count, length, features)."""
    rng = np.random.default_rng(seed)
    steps = rng.normal(0.0, 1.0, (count, length, features))
    return (steps.cumsum(axis=1) / np.sqrt(np.arange(1, length + 1))[:, None]).astype(np.float32)


def steps(count: int, *, seed: int) -> NDArray[np.float32]:
    """Steps of a diffusion, whole numbers in 0..999 as floats, shape (count,)."""
    drawn = np.random.default_rng(seed).integers(0, 1000, count)
    return drawn.astype(np.float32)


def points(count: int, number: int, *, seed: int) -> NDArray[np.float32]:
    """Clouds of points in -1..1, shape (count, number, 2), around a few centers."""
    rng = np.random.default_rng(seed)
    centers = rng.uniform(-0.6, 0.6, (count, 4, 2))
    chosen = np.take_along_axis(centers, rng.integers(0, 4, (count, number, 1)), axis=1)
    return np.clip(chosen + rng.normal(0, 0.2, (count, number, 2)), -0.99, 0.99).astype(np.float32)


def _field(
    rng: np.random.Generator, leading: tuple[int, int], size: int, cells: int
) -> NDArray[np.float64]:
    coarse = torch.from_numpy(rng.normal(0.0, 0.5, (*leading, cells + 1, cells + 1)))
    fine = functional.interpolate(coarse, size=(size, size), mode="bicubic", align_corners=True)
    return np.asarray(fine.numpy())
