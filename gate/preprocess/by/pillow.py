"""The spec by Pillow and NumPy: the reference that the other implementations are compared with."""

from __future__ import annotations

import numpy as np

from gate.preprocess.geometry import Geometry, geometry
from gate.preprocess.implementation import Implementation, always
from gate.preprocess.spec import PreprocessSpec, Resize
from gate.preprocess.tensor import Pixels, Tensor, cropped, to_tensor


def preprocess(pixels: Pixels, spec: PreprocessSpec) -> Tensor:
    """The spec's tensor of one picture, uint8 RGB (height, width, 3). Raises DataError."""
    box = geometry(spec, *pixels.shape[:2])
    resized = pixels if spec.resize is None else _resize(pixels, box, spec.resize)
    return to_tensor(cropped(resized, box), spec)


def lacking(spec: PreprocessSpec) -> str | None:
    """Pillow's resize always antialiases; its transform, which does not, cuts instead of rounding
    (half a step too dark) and has another bicubic (a = -1)."""
    if spec.resize and spec.resize.mode != "nearest" and not spec.resize.antialias:
        return "Pillow's resize always antialiases, the spec says antialias: false"
    return None


def _resize(pixels: Pixels, box: Geometry, resize: Resize) -> Pixels:
    from PIL import Image

    resized = Image.fromarray(pixels).resize(
        (box.width, box.height), Image.Resampling[resize.mode.upper()]
    )
    return np.asarray(resized)


def _version() -> str:
    import PIL

    return f"pillow {PIL.__version__}"


IMPLEMENTATION = Implementation(lacking, always(preprocess), _version)
