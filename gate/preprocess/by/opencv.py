"""The spec by OpenCV, as far as OpenCV goes: its linear and cubic filters can't antialias.

`opencv` resizes by INTER_LINEAR, INTER_CUBIC or INTER_NEAREST_EXACT; `opencv-area` takes
INTER_AREA where the picture shrinks, which is what OpenCV has against aliasing: a box filter.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from gate.preprocess.geometry import Geometry, geometry
from gate.preprocess.implementation import Implementation, always
from gate.preprocess.spec import PreprocessSpec, Resize
from gate.preprocess.tensor import Pixels, Tensor, cropped


def preprocess(pixels: Pixels, spec: PreprocessSpec, *, area: bool) -> Tensor:
    """The spec's tensor of one picture, uint8 RGB (height, width, 3). Raises DataError."""
    import cv2

    box = geometry(spec, *pixels.shape[:2])
    picture: Any = cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2BGR)  # as imread has it
    if spec.resize is not None:
        flag = _interpolation(spec.resize, area=area and _shrinks(pixels, box))
        picture = cv2.resize(picture, (box.width, box.height), interpolation=flag)
    picture = cropped(picture, box)
    if spec.channels == "rgb":
        picture = cv2.cvtColor(np.ascontiguousarray(picture), cv2.COLOR_BGR2RGB)
    if spec.dtype != "uint8":
        picture = _normalised(picture, spec)
    if spec.layout == "nchw":
        picture = picture.transpose(2, 0, 1)
    tensor: Tensor = np.ascontiguousarray(picture, dtype=spec.dtype)
    return tensor


def _shrinks(pixels: Pixels, box: Geometry) -> bool:
    return box.height < len(pixels) or box.width < len(pixels[0])


def _interpolation(resize: Resize, *, area: bool) -> int:
    import cv2

    if resize.mode == "nearest":
        return int(cv2.INTER_NEAREST_EXACT)
    if area:
        return int(cv2.INTER_AREA)
    return int(cv2.INTER_LINEAR if resize.mode == "bilinear" else cv2.INTER_CUBIC)


def _normalised(picture: Any, spec: PreprocessSpec) -> Any:
    values = picture.astype(np.float32)
    low, high = spec.value_range
    if high == 1:
        values *= np.float32((high - low) / 255.0)
        values += np.float32(low)
    if spec.mean is not None and spec.std is not None:
        values -= np.array(spec.mean, np.float32)
        values /= np.array(spec.std, np.float32)
    return values


def _incapable(spec: PreprocessSpec, *, area: bool) -> str | None:
    if area and spec.resize is not None and not spec.resize.antialias:
        return "INTER_AREA always antialiases, the spec says antialias: false"
    return None


def _missing() -> str | None:
    if find_spec("cv2") is None:
        return "OpenCV is not installed: pip install 'parity-gate[preprocess]'"
    return None


def _version() -> str:
    import cv2

    return f"opencv {cv2.__version__}"


def _made(*, area: bool) -> Implementation:
    opened = always(partial(preprocess, area=area))
    return Implementation(partial(_incapable, area=area), opened, _version, _missing)


IMPLEMENTATION = _made(area=False)
AREA = _made(area=True)
