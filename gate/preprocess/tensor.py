"""The last steps of the spec in NumPy, in float32: from resized pixels to the model's input."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gate.preprocess.geometry import Geometry
from gate.preprocess.spec import PreprocessSpec

Pixels = NDArray[np.uint8]
"""A picture, RGB, shape (height, width, 3)."""
Tensor = NDArray[np.generic]
"""The model's input for one picture, without the batch axis."""


def cropped(pixels: Pixels, box: Geometry) -> Pixels:
    """The crop of a resized picture."""
    return pixels[box.top : box.bottom, box.left : box.right]


def to_tensor(pixels: Pixels, spec: PreprocessSpec) -> Tensor:
    """Order of channels, value range, mean and std, layout and dtype of resized, cropped pixels."""
    ordered = pixels[..., ::-1] if spec.channels == "bgr" else pixels
    values: Tensor = ordered if spec.dtype == "uint8" else _normalised(ordered, spec)
    if spec.layout == "nchw":
        values = values.transpose(2, 0, 1)
    return np.ascontiguousarray(values, dtype=spec.dtype)


def channels_last(tensor: Tensor, spec: PreprocessSpec) -> NDArray[np.float64]:
    """The same values, shape (height, width, 3)."""
    values = np.asarray(tensor, dtype=np.float64)
    return values.transpose(1, 2, 0) if spec.layout == "nchw" else values


def to_pixels(tensor: Tensor, spec: PreprocessSpec) -> NDArray[np.float64]:
    """The way back: RGB (height, width, 3) in steps, 0 to 255, not rounded."""
    values = channels_last(tensor, spec)
    if spec.mean is not None and spec.std is not None:
        values = values * np.array(spec.std) + np.array(spec.mean)
    low, high = spec.value_range
    values = (values - low) * (255.0 / (high - low))
    return values[..., ::-1] if spec.channels == "bgr" else values


def _normalised(pixels: Pixels, spec: PreprocessSpec) -> NDArray[np.float32]:
    values = pixels.astype(np.float32)
    if spec.value_range != (0, 255):
        values = values / np.float32(255.0)
    if spec.value_range == (-1, 1):
        values = values * np.float32(2.0) - np.float32(1.0)
    if spec.mean is not None and spec.std is not None:
        mean, std = np.array(spec.mean, np.float32), np.array(spec.std, np.float32)
        values = ((values - mean) / std).astype(np.float32, copy=False)
    return values
