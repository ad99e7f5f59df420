from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from gate import Evidence, PreprocessSpec, SampleSet
from gate.measure.artifacts import thumbnails
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
