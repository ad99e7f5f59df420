"""Where the spec's resize and crop lie in a picture: whole numbers, the same for all consumers."""

from __future__ import annotations

from typing import NamedTuple

from gate.errors import DataError
from gate.preprocess.spec import PreprocessSpec

_PIXEL_LIMIT = 1 << 28
"""Of a resized picture: one with a side of a single pixel would grow beyond all memory."""


class Geometry(NamedTuple):
    """The size after resize, and the box that the crop takes of it."""

    height: int
    width: int
    top: int
    left: int
    bottom: int
    right: int


def geometry(spec: PreprocessSpec, height: int, width: int) -> Geometry:
    """The geometry of a picture of this size.

    Raises DataError for an empty picture, for one that is smaller than the crop, and for one
    that `shortest_side` would blow up.
    """
    if height < 1 or width < 1:
        raise DataError(f"a picture of {height} x {width} pixels is empty. Give another one.")
    resized = _resized(spec, height, width)
    if resized[0] * resized[1] > _PIXEL_LIMIT:
        raise DataError(
            f"a picture of {height} x {width} pixels would become {resized[0]} x {resized[1]}. "
            "Leave it out, or resize to a fixed size."
        )
    crop = spec.crop or resized
    if crop[0] > resized[0] or crop[1] > resized[1]:
        raise DataError(
            f"a picture of {resized[0]} x {resized[1]} pixels is smaller than the crop "
            f"{list(crop)}. Give larger pictures, or a resize before the crop."
        )
    top, left = round((resized[0] - crop[0]) / 2), round((resized[1] - crop[1]) / 2)
    return Geometry(*resized, top, left, top + crop[0], left + crop[1])


def _resized(spec: PreprocessSpec, height: int, width: int) -> tuple[int, int]:
    if spec.resize is None:
        return height, width
    if spec.resize.size is not None:
        return spec.resize.size
    side, shorter = spec.resize.shortest_side or 0, min(height, width)
    return side * height // shorter, side * width // shorter
