"""The canvas of a real browser implements the spec."""

from __future__ import annotations

import numpy as np
import pytest

from gate.preprocess.implementations import implementation
from gate.preprocess.resample import Sampling, resample
from gate.preprocess.spec import PreprocessSpec, Resize, to_pixels
from tests.preprocess.pictures import picture

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def chromium() -> None:
    lacking = implementation("canvas").unusable_reason(PreprocessSpec())
    assert lacking is None, lacking


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    "spec",
    [
        PreprocessSpec(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), crop=(21, 30)),
        PreprocessSpec(channels="bgr", value_range=(-1, 1), layout="nhwc"),
        PreprocessSpec(value_range=(0, 255), dtype="uint8"),
    ],
)
def test_canvas_without_resize_equals_the_reference(spec: PreprocessSpec) -> None:
    pixels = picture(60, 47)
    with implementation("canvas").opened(spec) as preprocess:
        observed = preprocess(pixels)
    with implementation("pillow").opened(spec) as preprocess:
        expected = preprocess(pixels)
    assert (observed.shape, observed.dtype) == (expected.shape, expected.dtype)
    assert np.abs(to_pixels(observed, spec) - to_pixels(expected, spec)).max() < 1e-3
    assert "hrom" in implementation("canvas").version()


def test_canvas_without_antialias_truncates_to_sixteenths() -> None:
    spec = PreprocessSpec(
        resize=Resize(size=(60, 50), antialias=False),
        value_range=(0, 255), dtype="uint8", layout="nhwc",
    )  # fmt: skip
    with implementation("canvas").opened(spec) as preprocess:
        for shape in ((200, 300), (40, 30)):
            pixels = picture(*shape)
            cut = resample(pixels, (60, 50), Sampling("bilinear", sixteenths=True))
            assert np.abs(preprocess(pixels).astype(int) - cut).max() <= 1


@pytest.mark.further
def test_canvas_downscales_by_mipmaps() -> None:
    """`resample` says that Chromium downscales with mipmaps, not with Pillow's triangle filter."""
    spec = PreprocessSpec(
        resize=Resize(size=(60, 50)), value_range=(0, 255), dtype="uint8", layout="nhwc"
    )
    with implementation("canvas").opened(spec) as preprocess:
        for shape in ((200, 300), (161, 95), (103, 107), (300, 500)):
            pixels = picture(*shape)
            observed = preprocess(pixels).astype(int)
            off = np.abs(observed - resample(pixels, (60, 50), Sampling("mipmap")))
            assert (off.max() <= 3, off.mean() < 1.5) == (True, True), (
                shape,
                off.max(),
                off.mean(),
            )
            pillow = np.abs(
                observed - resample(pixels, (60, 50), Sampling("bilinear", antialias=True))
            )
            assert pillow.mean() > 2 * off.mean()
