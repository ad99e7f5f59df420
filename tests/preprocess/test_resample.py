"""The simulated sampling methods, which explain differences, equal their libraries."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from gate.preprocess.resample import Sampling, resample
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
