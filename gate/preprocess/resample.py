"""Known resampling kernels in float64, including Rust's `image` crate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gate.preprocess.implementations import Implementation, always
from gate.preprocess.spec import PreprocessSpec, cropped, geometry, to_tensor
from gate.storage.arrays import Pixels, Tensor

Mode = Literal["nearest", "bilinear", "bicubic"]

RustImageFloats = NDArray[np.float32]

_SUPPORT: dict[Mode, float] = {"nearest": 0.0, "bilinear": 1.0, "bicubic": 2.0}


def preprocess(pixels: Pixels, spec: PreprocessSpec) -> Tensor:
    """Preprocess one picture, uint8 RGB (height, width, 3). Raises DataError."""
    box = geometry(spec, *pixels.shape[:2])
    if spec.resize is not None:
        pixels = resize(pixels, (box.height, box.width), spec.resize.mode)
    return to_tensor(cropped(pixels, box), spec)


def resize(pixels: Pixels, size: tuple[int, int], mode: Mode) -> Pixels:
    """Resize `pixels`, shape (height, width, channels), to `size` (height, width).

    Like Rust's crate `image`: samples vertically in float32, then horizontally, and rounds only at
    the end, half away from zero (`FilterType::Nearest`, `Triangle`, `CatmullRom`; source:
    image-rs/image, src/imageops/sample.rs, since 0.23). The order of summation is the same, so that
    the pixels are equal: tests/preprocess/rust_image has vectors that the crate computed.
    """
    if pixels.shape[:2] == size:
        return pixels
    tall = _sampled(pixels.astype(np.float32), size[0], mode)
    wide = _sampled(tall.swapaxes(0, 1), size[1], mode).swapaxes(0, 1)
    # Rust's round: half away from zero. In float32, v + 0.5 could round a value just below up.
    clamped = np.clip(wide, 0.0, 255.0).astype(np.float64)
    return np.ascontiguousarray(np.floor(clamped + 0.5).astype(np.uint8))


def _sampled(lines: RustImageFloats, outputs: int, mode: Mode) -> RustImageFloats:
    """Resample axis 0 to `outputs` lines."""
    inputs = len(lines)
    f32 = np.float32
    ratio = f32(inputs) / f32(outputs)
    scale = max(ratio, f32(1.0))
    support = f32(_SUPPORT[mode]) * scale
    center = (np.arange(outputs, dtype=np.float32) + f32(0.5)) * ratio
    left = np.clip(np.floor(center - support).astype(np.int64), 0, inputs - 1)
    right = np.clip(np.ceil(center + support).astype(np.int64), left + 1, inputs)
    taps = left[:, None] + np.arange(int((right - left).max()))
    weights = _rust_image_kernel(
        (taps.astype(np.float32) - (center - f32(0.5))[:, None]) / scale, mode
    )
    weights = np.where(taps < right[:, None], weights, f32(0.0))
    total = np.zeros(outputs, np.float32)
    for weight in weights.T:
        total += weight
    weights /= total[:, None]
    sampled = np.zeros((outputs, *lines.shape[1:]), np.float32)
    for tap, weight in zip(np.minimum(taps, inputs - 1).T, weights.T, strict=True):
        sampled += lines[tap] * weight.reshape(-1, *([1] * (lines.ndim - 1)))
    return sampled


def _rust_image_kernel(x: RustImageFloats, mode: Mode) -> RustImageFloats:
    """Return the weight at a distance in output pixels: box, triangle, or Keys' cubic with a = -0.5
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

Filter = Literal["nearest", "bilinear", "bicubic", "box", "mipmap"]

Coordinates = Literal["half_pixel", "asymmetric", "align_corners"]
"""The input coordinate of an output pixel o, by the names of ONNX's Resize: (o + 0.5) * ratio -
0.5; o * ratio; o * (inputs - 1) / (outputs - 1)."""

Floats = NDArray[np.float64]

_REACH: dict[Filter, int] = {"bilinear": 1, "bicubic": 2}

_EDGE = 1e-6
"""Maximum distance of a coordinate from a pixel's edge that counts as on the edge."""


@dataclass(frozen=True)
class Sampling:
    """The settings of resampling.

    `box` averages the area that an output pixel covers. `mipmap` halves the picture by averaging
    four pixels, interpolates bilinearly in the two nearest levels, and blends them at the level
    `log2(shrinking) - 1/2`. This matches measurements of Skia, the canvas of Chromium.
    """

    filter: Filter
    antialias: bool = False
    coordinates: Coordinates = "half_pixel"
    edges_down: bool = False
    """Nearest: a coordinate on the edge of two pixels selects the first, not the second."""
    single: bool = False
    """Nearest: coordinates in float32, which may fall on either side of an edge."""
    round_between: bool = True
    """Round and clip to 0 to 255 also between the axes, as Pillow does with antialiasing."""
    sixteenths: bool = False
    """Without antialias: truncate fractions of a pixel to 1/16, like Skia's cheapest filter."""
    vertical_first: bool = False
    """With `round_between`: resample the height first. Pillow 13 chooses by the sizes."""


def resample(pixels: Pixels, size: tuple[int, int], sampling: Sampling) -> Pixels:
    """Resample `pixels`, uint8 (height, width, channels), to `size` (height, width)."""
    if sampling.vertical_first:
        transposed = resample(
            pixels.swapaxes(0, 1), size[::-1], replace(sampling, vertical_first=False)
        )
        return transposed.swapaxes(0, 1)
    values = pixels.astype(np.float64)
    sampled = _mipmapped if sampling.filter == "mipmap" else _separable
    return _rounded(sampled(values, size, sampling)).astype(np.uint8)


def weights(inputs: int, outputs: int, sampling: Sampling) -> Floats:
    """Return the weights of the inputs for each output, shape (outputs, inputs); rows sum to 1."""
    if sampling.filter == "nearest":
        return _nearest(inputs, outputs, sampling)
    if sampling.filter == "box":
        return _box(inputs, outputs)
    ratio, kind = inputs / outputs, sampling.filter
    centers = _source_coordinates(inputs, outputs, sampling.coordinates)
    if sampling.antialias:
        wide = _resample_kernel(
            (np.arange(inputs) - centers[:, None]) / max(ratio, 1.0), kind, a=-0.5
        )
        total: Floats = wide.sum(axis=1, keepdims=True)
        return wide / total
    if sampling.sixteenths:
        centers = np.floor(centers * 16.0) / 16.0
    reach = _REACH[kind]
    taps = np.floor(centers).astype(np.int64)[:, None] + np.arange(1 - reach, reach + 1)
    matrix = np.zeros((outputs, inputs))
    rows = np.broadcast_to(np.arange(outputs)[:, None], taps.shape)
    narrow = _resample_kernel(taps - centers[:, None], kind, a=-0.75)
    np.add.at(matrix, (rows, np.clip(taps, 0, inputs - 1)), narrow)
    return matrix


def _separable(values: Floats, size: tuple[int, int], sampling: Sampling) -> Floats:
    across = weights(values.shape[1], size[1], sampling)
    down = weights(values.shape[0], size[0], sampling)
    wide = np.einsum("ow,hwc->hoc", across, values, optimize=True)
    if sampling.round_between and sampling.antialias:
        wide = _rounded(wide)
    resampled: Floats = np.einsum("oh,hwc->owc", down, wide, optimize=True)
    return resampled


def _mipmapped(values: Floats, size: tuple[int, int], sampling: Sampling) -> Floats:
    shrinking = math.sqrt(values.shape[0] / size[0] * values.shape[1] / size[1])
    level = max(math.log2(shrinking) - 0.5, 0.0)
    for _ in range(int(level)):
        values = _halved(values)
    linear = replace(sampling, filter="bilinear", antialias=False)
    near, far = _separable(values, size, linear), _separable(_halved(values), size, linear)
    return near + (far - near) * (level % 1.0)


def _source_coordinates(inputs: int, outputs: int, coordinates: Coordinates) -> Floats:
    output, ratio = np.arange(outputs, dtype=np.float64), inputs / outputs
    if coordinates == "half_pixel":
        return (output + 0.5) * ratio - 0.5
    if coordinates == "asymmetric":
        return output * ratio
    return output * ((inputs - 1) / max(outputs - 1, 1))


def _nearest(inputs: int, outputs: int, sampling: Sampling) -> Floats:
    if sampling.single:
        ratio = np.float32(inputs) / np.float32(outputs)
        centers = ((np.arange(outputs, dtype=np.float32) + np.float32(0.5)) * ratio).astype(float)
    else:
        offset = 0.0 if sampling.coordinates == "asymmetric" else 0.5
        edge = -_EDGE if sampling.edges_down else _EDGE
        centers = _source_coordinates(inputs, outputs, sampling.coordinates) + offset + edge
    matrix: Floats = np.eye(inputs)[np.clip(np.floor(centers), 0, inputs - 1).astype(np.int64)]
    return matrix


def _box(inputs: int, outputs: int) -> Floats:
    """Return the share of each input pixel in an output pixel's area (OpenCV's INTER_AREA)."""
    edges = np.arange(outputs + 1) * (inputs / outputs)
    low = np.maximum(edges[:-1, None], np.arange(inputs))
    high = np.minimum(edges[1:, None], np.arange(inputs) + 1)
    covered: Floats = np.maximum(high - low, 0.0)
    total: Floats = covered.sum(axis=1, keepdims=True)
    return covered / total


def _halved(values: Floats) -> Floats:
    return _halved_height(_halved_height(values).swapaxes(0, 1)).swapaxes(0, 1)


def _halved_height(values: Floats) -> Floats:
    """Return the average of each pair of rows, or weighted triples (1/4, 1/2, 1/4) if odd.

    A single row is unchanged.
    """
    if len(values) == 1:
        return values
    if len(values) % 2 == 0:
        return (values[0::2] + values[1::2]) / 2.0
    return (values[0:-2:2] + 2.0 * values[1::2] + values[2::2]) / 4.0


def _resample_kernel(x: Floats, kind: Filter, *, a: float) -> Floats:
    """Evaluate the triangle, or Keys' cubic convolution (IEEE Trans. ASSP 29, 1981) with parameter
    a."""
    d = np.abs(x)
    if kind == "bilinear":
        return np.maximum(1.0 - d, 0.0)
    near = (a + 2.0) * d**3 - (a + 3.0) * d**2 + 1.0
    far = a * (d**3 - 5.0 * d**2 + 8.0 * d - 4.0)
    return np.where(d < 1.0, near, np.where(d < 2.0, far, 0.0))


def _rounded(values: Floats) -> Floats:
    return np.floor(np.clip(values, 0.0, 255.0) + 0.5)
