"""The spec by the algorithm of Rust's crate `image`, `imageops::resize`, in NumPy.

The crate samples vertically into float32, then horizontally, and rounds only then, half away from
zero (`FilterType::Nearest`, `Triangle`, `CatmullRom`; source: image-rs/image,
src/imageops/sample.rs, from 0.23 on). Sums run tap by tap in float32, as there, so the pixels are
the same: tests/preprocess/rust_image holds vectors that the crate itself computed.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gate.preprocess.geometry import geometry
from gate.preprocess.implementation import Implementation, always
from gate.preprocess.spec import PreprocessSpec
from gate.preprocess.tensor import Pixels, Tensor, cropped, to_tensor

Mode = Literal["nearest", "bilinear", "bicubic"]
Floats = NDArray[np.float32]

_SUPPORT: dict[Mode, float] = {"nearest": 0.0, "bilinear": 1.0, "bicubic": 2.0}


def preprocess(pixels: Pixels, spec: PreprocessSpec) -> Tensor:
    """The spec's tensor of one picture, uint8 RGB (height, width, 3). Raises DataError."""
    box = geometry(spec, *pixels.shape[:2])
    if spec.resize is not None:
        pixels = resize(pixels, (box.height, box.width), spec.resize.mode)
    return to_tensor(cropped(pixels, box), spec)


def resize(pixels: Pixels, size: tuple[int, int], mode: Mode) -> Pixels:
    """`pixels` of shape (height, width, channels), resized to `size` (height, width)."""
    if pixels.shape[:2] == size:
        return pixels
    tall = _sampled(pixels.astype(np.float32), size[0], mode)
    wide = _sampled(tall.swapaxes(0, 1), size[1], mode).swapaxes(0, 1)
    # Rust's round: half away from zero. float32(v + 0.5) could round up what is just below.
    clamped = np.clip(wide, 0.0, 255.0).astype(np.float64)
    return np.ascontiguousarray(np.floor(clamped + 0.5).astype(np.uint8))


def _sampled(lines: Floats, outputs: int, mode: Mode) -> Floats:
    """Axis 0 resampled to so many lines."""
    inputs = len(lines)
    f32 = np.float32
    ratio = f32(inputs) / f32(outputs)
    scale = max(ratio, f32(1.0))
    support = f32(_SUPPORT[mode]) * scale
    centre = (np.arange(outputs, dtype=np.float32) + f32(0.5)) * ratio
    left = np.clip(np.floor(centre - support).astype(np.int64), 0, inputs - 1)
    right = np.clip(np.ceil(centre + support).astype(np.int64), left + 1, inputs)
    taps = left[:, None] + np.arange(int((right - left).max()))
    weights = _kernel((taps.astype(np.float32) - (centre - f32(0.5))[:, None]) / scale, mode)
    weights = np.where(taps < right[:, None], weights, f32(0.0))
    total = np.zeros(outputs, np.float32)
    for weight in weights.T:
        total += weight
    weights /= total[:, None]
    sampled = np.zeros((outputs, *lines.shape[1:]), np.float32)
    for tap, weight in zip(np.minimum(taps, inputs - 1).T, weights.T, strict=True):
        sampled += lines[tap] * weight.reshape(-1, *([1] * (lines.ndim - 1)))
    return sampled


def _kernel(x: Floats, mode: Mode) -> Floats:
    """Weight at a distance in output pixels: box, triangle, or Keys' cubic with a = -0.5
    (Keys 1981; Mitchell and Netravali's B = 0, C = 0.5)."""
    a = np.abs(x)
    if mode == "nearest":
        return np.ones_like(a)
    if mode == "bilinear":
        return np.maximum(np.float32(1.0) - a, np.float32(0.0))
    cube, square, six = a * a * a, a * a, np.float32(6.0)
    near = np.float32(9.0) * cube - np.float32(15.0) * square + six
    far = np.float32(-3.0) * cube + np.float32(15.0) * square - np.float32(24.0) * a
    outer = np.where(a < 2.0, far + np.float32(12.0), np.float32(0.0))
    return (np.where(a < 1.0, near, outer) / six).astype(np.float32, copy=False)


def _version() -> str:
    return "image (Rust) 0.23 and later, its algorithm"


IMPLEMENTATION = Implementation(lambda _spec: None, always(preprocess), _version)
