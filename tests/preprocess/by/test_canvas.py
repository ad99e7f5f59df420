"""The canvas of a real browser implements the spec."""

from __future__ import annotations

import numpy as np
import pytest

from gate import PreprocessSpec
from gate.preprocess.implementations import implementation
from gate.preprocess.spec import to_pixels
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
