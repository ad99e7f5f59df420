"""The simulated sampling methods, which explain differences, equal their libraries."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gate.preprocess.resample import Filter, Sampling, resample, weights
from tests.preprocess.pictures import picture

SHAPES = ((60, 83), (81, 47), (199, 313), (19, 31))
"""Resizing these to SIZE puts no coordinate on a pixel edge, where libraries differ."""
SIZE = (48, 37)


def pillow(pixels, filter_):
    return np.asarray(Image.fromarray(pixels).resize(SIZE[::-1], filter_))


def torch_resize(pixels, mode, **options):
    values = torch.from_numpy(pixels).permute(2, 0, 1)[None].double()
    created = torch.nn.functional.interpolate(values, SIZE, mode=mode, **options)
    return created[0].permute(1, 2, 0).round().clamp(0, 255).numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("sampling", "library", "allowed"),
    [
        (Sampling("bilinear", True), lambda p: pillow(p, Image.Resampling.BILINEAR), 1),
        (Sampling("nearest"), lambda p: pillow(p, Image.Resampling.NEAREST), 0),
        (Sampling("bilinear"), lambda p: torch_resize(p, "bilinear"), 1),
        (Sampling("bicubic"), lambda p: torch_resize(p, "bicubic"), 1),
        (Sampling("bicubic", True, round_between=False),
         lambda p: torch_resize(p, "bicubic", antialias=True), 1),
        (Sampling("bilinear", coordinates="align_corners"),
         lambda p: torch_resize(p, "bilinear", align_corners=True), 1),
        (Sampling("nearest", coordinates="asymmetric"), lambda p: torch_resize(p, "nearest"), 0),
        (Sampling("nearest", single=True), lambda p: torch_resize(p, "nearest-exact"), 0),
        (Sampling("nearest", coordinates="asymmetric"),
         lambda p: cv2.resize(p, SIZE[::-1], interpolation=cv2.INTER_NEAREST), 0),
        (Sampling("bilinear"), lambda p: cv2.resize(p, SIZE[::-1], interpolation=cv2.INTER_LINEAR), 1),
    ],
)  # fmt: skip
def test_resample_equals_its_library(shape, sampling, library, allowed) -> None:
    pixels = picture(*shape)
    off = np.abs(resample(pixels, SIZE, sampling).astype(float) - library(pixels))
    assert off.max() <= allowed


def test_box_filter_equals_opencv_area() -> None:
    pixels = picture(200, 313)
    expected = cv2.resize(pixels, SIZE[::-1], interpolation=cv2.INTER_AREA).astype(int)
    assert np.abs(expected - resample(pixels, SIZE, Sampling("box"))).max() <= 1


@pytest.mark.parametrize("shape", [(81, 47), (60, 80)])
def test_pillow_resizes_one_axis_first(shape: tuple[int, int]) -> None:
    pixels = picture(*shape)
    expected = pillow(pixels, Image.Resampling.BICUBIC).astype(int)
    created = [
        resample(pixels, SIZE, Sampling("bicubic", True, vertical_first=first))
        for first in (False, True)
    ]
    assert min(np.abs(item - expected).max() for item in created) <= 1


@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from(["nearest", "bilinear", "bicubic", "box"]),
    st.booleans(),
)
def test_rows_sum_to_one(inputs: int, outputs: int, kind: Filter, antialias: bool) -> None:
    """Otherwise an image of one color would change its color."""
    result = weights(inputs, outputs, Sampling(kind, antialias and kind in ("bilinear", "bicubic")))
    assert result.shape == (outputs, inputs)
    np.testing.assert_allclose(result.sum(axis=1), 1.0)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 20), st.integers(1, 20))
def test_mipmaps_keep_a_uniform_color(height: int, width: int, rows: int, columns: int) -> None:
    pixels = np.full((height, width, 3), 77, np.uint8)
    assert (resample(pixels, (rows, columns), Sampling("mipmap")) == 77).all()
