"""Every implementation follows the spec, or says why it can't."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from gate import PreprocessSpec
from gate.preprocess.implementations import implementation
from gate.preprocess.spec import to_pixels
from gate.records.preprocessing import IMPLEMENTATIONS
from gate.storage.arrays import Tensor
from tests.preprocess.pictures import SMALL, picture

FAST = tuple(name for name in IMPLEMENTATIONS if name != "canvas")
SHAPES = ((60, 80), (81, 47), (33, 33))
VALUES = {
    "plain": PreprocessSpec(),
    "crop": PreprocessSpec(crop=(21, 30)),
    "bgr": PreprocessSpec(channels="bgr", mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7)),
    "range": PreprocessSpec(value_range=(-1, 1), layout="nhwc"),
    "bytes": PreprocessSpec(value_range=(0, 255), dtype="uint8", layout="nhwc", channels="bgr"),
    "caffe": PreprocessSpec(
        value_range=(0, 255), channels="bgr", mean=(103.9, 116.8, 123.7), std=(1.0, 1.0, 1.0)
    ),
    "half": PreprocessSpec(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), dtype="float16"),
}


def run(name: str, spec: PreprocessSpec, *pictures: NDArray[np.uint8]) -> list[Tensor]:
    result = implementation(name)
    assert result.unusable_reason(spec) is None
    with result.opened(spec) as preprocess:
        return [preprocess(pixels) for pixels in pictures]


def steps(tensor: Tensor, wanted: Tensor, spec: PreprocessSpec) -> float:
    assert (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype)
    return float(np.abs(to_pixels(tensor, spec) - to_pixels(wanted, spec)).max())


@pytest.mark.parametrize("name", [n for n in FAST if n != "onnx-asymmetric"])
@pytest.mark.parametrize("spec", VALUES.values(), ids=VALUES)
def test_implementations_are_equal_without_resize(name: str, spec: PreprocessSpec) -> None:
    pictures = [picture(*shape) for shape in SHAPES]
    allowed = 0.2 if spec.dtype == "float16" else 1e-3
    for observed, expected in zip(
        run(name, spec, *pictures), run("pillow", spec, *pictures), strict=True
    ):
        assert steps(observed, expected, spec) <= allowed


@pytest.mark.parametrize("spec", VALUES.values(), ids=VALUES)
def test_to_pixels_inverts_the_preprocessing(spec: PreprocessSpec) -> None:
    (tensor,) = run("pillow", spec, picture(40, 50))
    expected = run("pillow", PreprocessSpec(crop=spec.crop, value_range=(0, 255), layout="nhwc"),
                 picture(40, 50))[0]  # fmt: skip
    assert np.abs(to_pixels(tensor, spec) - expected).max() < 0.2


def test_pillow_reference_equals_manual_computation() -> None:
    """Compute without the gate's code: Pillow's resize, a crop, and normalization."""
    pixels = picture(100, 150)
    resized = np.asarray(Image.fromarray(pixels).resize((60, 40), Image.Resampling.BILINEAR))
    cropped = resized[4:36, 12:48].astype(np.float32) / 255
    expected = (cropped - np.float32(SMALL.mean)) / np.float32(SMALL.std)
    (observed,) = run("pillow", SMALL, pixels)
    np.testing.assert_array_equal(observed, expected.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("name", "mode", "antialias", "allowed"),
    [
        ("torchvision", "bilinear", True, 1.0),
        ("onnx", "bilinear", True, 1.0),
        ("rust-image", "bilinear", True, 1.0),
        # Pillow 13 may resize the height first, torchvision never: clamping differs in between.
        ("torchvision", "bicubic", True, 10.0),
        ("opencv", "nearest", False, 0.0),
    ],
)
def test_implementation_is_close_to_pillow(
    name: str, mode: str, antialias: bool, allowed: float
) -> None:
    spec = PreprocessSpec(resize={"size": (48, 37), "mode": mode, "antialias": antialias})
    pictures = [picture(*shape) for shape in (*SHAPES, (200, 313), (20, 30))]
    for observed, expected in zip(
        run(name, spec, *pictures), run("pillow", spec, *pictures), strict=True
    ):
        assert steps(observed, expected, spec) <= allowed + 1e-3


@pytest.mark.parametrize("name", ["opencv", "onnx"])
def test_implementation_without_antialias_is_close_to_torchvision(name: str) -> None:
    spec = PreprocessSpec(resize={"size": (48, 37), "antialias": False})
    pictures = [picture(*shape) for shape in (*SHAPES, (200, 313), (20, 30))]
    expected = run("torchvision", spec, *pictures)
    for observed, item in zip(run(name, spec, *pictures), expected, strict=True):
        assert steps(observed, item, spec) <= 1.001


@pytest.mark.parametrize(
    ("name", "resize", "says"),
    [
        ("pillow", {"size": (8, 8), "antialias": False}, "always antialiases"),
        ("opencv-area", {"size": (8, 8), "antialias": False}, "always antialiases"),
        ("onnx-asymmetric", None, "no coordinates"),
        ("canvas", {"size": (8, 8), "mode": "bicubic"}, "no bicubic"),
    ],
)
def test_unsupported_spec_has_a_reason(name: str, resize: dict | None, says: str) -> None:
    assert says in str(implementation(name).unusable_reason(PreprocessSpec(resize=resize)))
