"""The spec by torchvision v2 on uint8 tensors: with and without antialias."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from gate.preprocess.geometry import geometry
from gate.preprocess.implementation import Implementation, always
from gate.preprocess.spec import PreprocessSpec
from gate.preprocess.tensor import Pixels, Tensor


def preprocess(pixels: Pixels, spec: PreprocessSpec, *, antialias: bool) -> Tensor:
    """The spec's tensor of one picture, uint8 RGB (height, width, 3). Raises DataError."""
    import torch
    from torchvision.transforms.v2 import functional

    geometry(spec, *pixels.shape[:2])  # refuses what torchvision would pad
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    image = _resized(image, spec, antialias=antialias)
    if spec.crop is not None:
        image = functional.center_crop(image, list(spec.crop))
    if spec.channels == "bgr":
        image = image.flip(0)
    if spec.dtype != "uint8":
        image = functional.to_dtype(image, torch.float32, scale=spec.value_range != (0, 255))
        if spec.value_range == (-1, 1):
            image = image * 2.0 - 1.0
        if spec.mean is not None and spec.std is not None:
            image = functional.normalize(image, list(spec.mean), list(spec.std))
    if spec.layout == "nhwc":
        image = image.permute(1, 2, 0)
    tensor: Tensor = np.ascontiguousarray(image.numpy(), dtype=spec.dtype)
    return tensor


def _resized(image: Any, spec: PreprocessSpec, *, antialias: bool) -> Any:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    if spec.resize is None:
        return image
    # torch's own 'nearest' has no half-pixel centres.
    mode = "NEAREST_EXACT" if spec.resize.mode == "nearest" else spec.resize.mode.upper()
    side = spec.resize.shortest_side
    return functional.resize(
        image,
        [side] if side is not None else list(spec.resize.size or ()),
        interpolation=InterpolationMode[mode],
        antialias=antialias and spec.resize.antialias,
    )


def _version() -> str:
    from importlib.metadata import version

    return f"torchvision {version('torchvision')}"


def _made(*, antialias: bool) -> Implementation:
    return Implementation(
        lambda _spec: None, always(partial(preprocess, antialias=antialias)), _version
    )


IMPLEMENTATION = _made(antialias=True)
NO_ANTIALIAS = _made(antialias=False)
