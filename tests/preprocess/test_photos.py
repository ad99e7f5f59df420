"""Images similar to photos: which implementations agree, which do not, and why."""

from __future__ import annotations

import pytest

from gate.preprocess.comparison import ConsumerSelection, compare_consumers
from gate.preprocess.diagnosis import AREA, HALF_PIXEL, NO_ANTIALIAS
from gate.preprocess.pictures import pictures_in
from gate.preprocess.spec import PreprocessSpec
from gate.records.preprocessing import PreprocessingParity
from tests.exhaustive import EXHAUSTIVE
from tests.preprocess.natural_images import SIZES, natural_image, write_images

COUNT = 50 if EXHAUSTIVE else 16


@pytest.fixture(scope="module")
def parity(tmp_path_factory: pytest.TempPathFactory) -> PreprocessingParity:
    photos = pictures_in(write_images(tmp_path_factory.mktemp("photos"), COUNT))
    selection = ConsumerSelection(
        ("torchvision", "torchvision-no-antialias", "opencv", "opencv-area", "onnx",
         "onnx-asymmetric", "rust-image")
    )  # fmt: skip
    return compare_consumers(PreprocessSpec.imagenet(), photos, selection=selection).parity


@pytest.mark.further
@pytest.mark.parametrize(
    ("name", "causes"),
    [
        ("torchvision-no-antialias", (NO_ANTIALIAS,)),
        ("opencv", (NO_ANTIALIAS,)),
        ("opencv-area", (AREA,)),
        ("onnx-asymmetric", (NO_ANTIALIAS, HALF_PIXEL)),
    ],
)
def test_known_differences_are_diagnosed_on_natural_images(
    parity: PreprocessingParity, name: str, causes: tuple[str, ...]
) -> None:
    consumer = parity.consumer(name)
    assert consumer is not None
    assert consumer.max_diff is not None
    assert consumer.explained is not None
    assert consumer.max_diff > 30
    assert consumer.causes == causes
    assert consumer.explained > 0.95


def test_natural_images_vary_and_are_reproducible() -> None:
    pictures = [natural_image(seed) for seed in range(len(SIZES))]
    assert {picture.shape[:2] for picture in pictures} == set(SIZES)
    assert (natural_image(3) == natural_image(3)).all()
    assert all(picture.std() > 20 for picture in pictures)
