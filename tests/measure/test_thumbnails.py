from __future__ import annotations

import io
import math

import numpy as np
import pytest
from PIL import Image

from gate import Evidence, PreprocessSpec, SampleSet
from gate.measure.artifacts import MAX_THUMBNAILS, SIDE, thumbnails
from gate.preprocess.spec import Resize, to_tensor
from gate.records.outputs import WorstSample
from tests import builders


def evidence_with_worst(*runtimes: tuple[int, ...]) -> Evidence:
    """Return evidence in which each runtime's output has these worst samples."""
    measured = []
    for name, samples in zip(("ort-cpu", "ort-cpu-optimized"), runtimes, strict=False):
        worst = tuple(WorstSample(sample=location, max_abs_diff=1.0) for location in samples)
        output = builders.output_parity(worst=worst)
        measured.append(builders.runtime_evidence(name, outputs=(output,)))
    return builders.evidence(runtimes=tuple(measured))


def decode_png(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)))


SPEC = PreprocessSpec(
    resize=Resize(size=(8, 10)), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1), channels="bgr"
)
PIXELS = np.random.default_rng(0).integers(0, 256, size=(6, 8, 10, 3), dtype=np.uint8)


def test_preprocessing_is_inverted_exactly():
    tensors = np.stack([to_tensor(pixels, SPEC) for pixels in PIXELS])
    pictures = thumbnails(
        SampleSet.from_arrays({"input": tensors}), evidence_with_worst((4, 1)), SPEC
    )
    assert sorted(pictures) == [1, 4]
    for location, png in pictures.items():
        assert (decode_png(png) == PIXELS[location]).all()


def test_uint8_inputs_are_shown_unchanged():
    pictures = thumbnails(SampleSet.from_arrays({"input": PIXELS}), evidence_with_worst((0,)))
    assert (decode_png(pictures[0]) == PIXELS[0]).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_picture_without_spec_is_scaled_to_its_range(channels, scale):
    tensors = np.random.default_rng(0).normal(size=(2, channels, 8, 9)).astype(np.float32) * scale
    tensors = tensors.astype(np.float32)
    pixels = decode_png(
        thumbnails(SampleSet.from_arrays({"x": tensors}), evidence_with_worst((1,)))[1]
    )
    assert (pixels.min(), pixels.max()) == (0, 255)
    assert pixels.shape[:2] == (8, 9)
    flat = tensors[1].transpose(1, 2, 0).reshape(pixels.shape)
    assert np.corrcoef(pixels.ravel(), flat.ravel())[0, 1] > 0.999


@pytest.mark.parametrize("value", [0.0, 3.0, math.nan, math.inf])
def test_constant_or_nonfinite_picture_is_black(value):
    tensors = np.full((1, 1, 8, 8), value, np.float32)
    samples = SampleSet.from_arrays({"x": tensors}).allow_nan()
    assert not decode_png(thumbnails(samples, evidence_with_worst((0,)))[0]).any()


def test_values_outside_the_range_are_clipped():
    tensors = np.full((1, 3, 8, 10), 1e6, np.float32)
    tensors[0, 0, 0, 0] = np.nan
    pixels = decode_png(
        thumbnails(
            SampleSet.from_arrays({"x": tensors}).allow_nan(), evidence_with_worst((0,)), SPEC
        )[0]
    )
    assert pixels.max() == 255


def test_mismatching_spec_is_ignored():
    grayscale = np.random.default_rng(0).normal(size=(1, 1, 8, 10)).astype(np.float32)
    pixels = decode_png(
        thumbnails(SampleSet.from_arrays({"x": grayscale}), evidence_with_worst((0,)), SPEC)[0]
    )
    assert (pixels.shape, pixels.max()) == ((8, 10), 255)


def test_size_and_number_of_thumbnails_are_limited():
    tensors = np.zeros((40, 1, 300, 150), np.float32)
    samples = SampleSet.from_arrays({"x": tensors})
    first, second = tuple(range(8)), tuple(range(20, 28))
    pictures = thumbnails(samples, evidence_with_worst(first, second))
    assert list(pictures) == [p for pair in zip(first, second, strict=True) for p in pair]
    assert decode_png(pictures[0]).shape == (SIDE, SIDE // 2)
    limited = thumbnails(samples, evidence_with_worst(tuple(range(30))))
    assert len(limited) == MAX_THUMBNAILS


@pytest.mark.parametrize("arrays", [
    {"x": np.zeros((4, 10), np.float32)},
    {"x": np.zeros((4, 3, 16), np.float32)},
    {"x": np.zeros((4, 5, 8, 8), np.float32)},
    {"x": np.zeros((4, 8, 8, 3), np.float32)},
    {"x": np.zeros((4, 3, 8, 8), np.uint8)},
    {"x": np.zeros((4, 3, 8, 8), np.int64)},
    {"x": np.zeros((4, 1, 1, 8), np.float32)},
    {"x": np.zeros((4, 3, 8, 8), np.float32), "y": np.zeros((4, 1), np.float32)},
])  # fmt: skip
def test_inputs_that_are_not_pictures_have_no_thumbnails(arrays):
    assert thumbnails(SampleSet.from_arrays(arrays), evidence_with_worst((0,)), SPEC) == {}


def test_missing_sample_has_no_thumbnail():
    assert thumbnails(SampleSet.from_arrays({"x": PIXELS}), evidence_with_worst((99,))) == {}
    assert thumbnails(SampleSet.from_arrays({"x": PIXELS}), builders.evidence()) == {}
