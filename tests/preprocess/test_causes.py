"""Each known fault, created without the gate's code, is diagnosed; rounding is not a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from gate.preprocess import diagnosis
from gate.preprocess.diagnosis import diagnose
from gate.preprocess.implementations import pillow_preprocess
from tests.preprocess.pictures import SMALL, picture

MEAN, STD = np.float32(SMALL.mean)[:, None, None], np.float32(SMALL.std)[:, None, None]
SIZE, BOX = (40, 60), (slice(4, 36), slice(12, 48))
Pixels = NDArray[np.uint8]


def resize_with_pillow(
    pixels: Pixels,
    filter_: Any = Image.Resampling.BILINEAR,
    size: tuple[int, int] = SIZE,
    box: tuple[slice, slice] = BOX,
) -> NDArray[Any]:
    resized = np.asarray(Image.fromarray(pixels).resize(size[::-1], filter_))
    return resized[box].transpose(2, 0, 1).astype(np.float32)


def resize_with_torch(pixels: Pixels, **options: Any) -> NDArray[Any]:
    values = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    created = torch.nn.functional.interpolate(values, SIZE, **options)[0].round().numpy()
    return created[:, *BOX]


def normalize(values: NDArray[Any]) -> NDArray[Any]:
    return (values / 255 - MEAN) / STD


def squash(pixels: Pixels) -> NDArray[Any]:
    return np.asarray(
        Image.fromarray(pixels).resize((36, 32), Image.Resampling.BILINEAR)
    ).transpose(2, 0, 1)


def resize_without_margin(pixels: Pixels) -> NDArray[Any]:
    resized = Image.fromarray(pixels).resize((54, 36), Image.Resampling.BILINEAR)
    return np.asarray(resized)[2:34, 9:45].transpose(2, 0, 1)


def shift_crop(pixels: Pixels) -> NDArray[Any]:
    resized = Image.fromarray(pixels).resize(SIZE[::-1], Image.Resampling.BILINEAR)
    return np.asarray(resized)[3:35, 12:48].transpose(2, 0, 1)


FAULTS: dict[str, tuple[Callable[[Pixels], NDArray[Any]], set[str]]] = {
    "no antialias": (lambda p: normalize(resize_with_torch(p, mode="bilinear")), {diagnosis.NO_ANTIALIAS}),
    "align corners": (
        lambda p: normalize(resize_with_torch(p, mode="bilinear", align_corners=True)),
        {diagnosis.NO_ANTIALIAS, diagnosis.ALIGN_CORNERS},
    ),
    "bicubic": (
        lambda p: normalize(resize_with_pillow(p, Image.Resampling.BICUBIC)),
        {"bicubic instead of bilinear"},
    ),
    "box": (lambda p: normalize(resize_with_pillow(p, Image.Resampling.BOX)), {diagnosis.AREA}),
    "bgr": (lambda p: normalize(resize_with_pillow(p)[::-1]), {diagnosis.SWAPPED}),
    "no mean": (lambda p: resize_with_pillow(p) / 255, {diagnosis.NO_MEAN_STD}),
    "mean of bgr": (
        lambda p: (resize_with_pillow(p) / 255 - MEAN[::-1]) / STD[::-1],
        {diagnosis.SWAPPED_MEAN},
    ),
    "0 to 255": (lambda p: (resize_with_pillow(p) - MEAN) / STD, {diagnosis.SCALE_255}),
    "raw": (resize_with_pillow, {diagnosis.SCALE_255, diagnosis.NO_MEAN_STD}),
    "twice": (lambda p: normalize(resize_with_pillow(p) / 255), {diagnosis.SCALE_TWICE}),
    "-1 to 1": (
        lambda p: resize_with_pillow(p) / 127.5 - 1,
        {diagnosis.WRONG_RANGE, diagnosis.NO_MEAN_STD},
    ),
    "squashed": (lambda p: normalize(squash(p)), {diagnosis.SQUASHED}),
    "no margin": (lambda p: normalize(resize_without_margin(p)), {diagnosis.NO_MARGIN}),
    "crop": (lambda p: normalize(shift_crop(p)), {diagnosis.CROP_OFF}),
    "corner": (
        lambda p: normalize(resize_with_pillow(p, box=(slice(0, 32), slice(0, 36)))),
        {diagnosis.CROP_MOVED},
    ),
    "corner, bgr": (
        lambda p: normalize(resize_with_pillow(p, box=(slice(0, 32), slice(20, 56)))[::-1]),
        {diagnosis.CROP_MOVED, diagnosis.SWAPPED},
    ),
    "turned": (
        lambda p: normalize(
            resize_with_pillow(
                np.rot90(p, -1), size=(60, 40), box=(slice(14, 46), slice(2, 38))
            )
        ),
        {diagnosis.TURNED},
    ),
    "bgr, raw": (
        lambda p: resize_with_pillow(p)[::-1],
        {diagnosis.SWAPPED, diagnosis.SCALE_255, diagnosis.NO_MEAN_STD},
    ),
    "no antialias, no mean": (
        lambda p: resize_with_torch(p, mode="bilinear") / 255,
        {diagnosis.NO_ANTIALIAS, diagnosis.NO_MEAN_STD},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "causes"), FAULTS.values(), ids=FAULTS)
def test_known_fault_is_diagnosed(
    fault: Callable[[Pixels], NDArray[Any]], causes: set[str]
) -> None:
    pixels = picture(120, 180)
    reference = pillow_preprocess(pixels, SMALL)
    result = diagnose(pixels, fault(pixels).astype(np.float32), SMALL, reference=reference)
    assert set(result.causes) == causes
    assert result.explained > 0.9


@pytest.mark.parametrize(
    ("mean", "std", "says"),
    [
        ((0.485, 0.456, 0.406), (0.229, 0.3, 0.225), "(std of g 0.3 instead of 0.224)"),
        ((0.485, 0.456, 0.5), (0.229, 0.224, 0.225), "(mean of b 0.5 instead of 0.406)"),
        (
            (0.406, 0.456, 0.485),
            (0.229, 0.224, 0.225),
            "(mean of r 0.406 instead of 0.485, mean of b 0.485 instead of 0.406)",
        ),
    ],
)
def test_another_mean_or_std_is_named(mean: Any, std: Any, says: str) -> None:
    pixels = picture(120, 180)
    wrong = (resize_with_pillow(pixels) / 255 - np.float32(mean)[:, None, None]) / np.float32(std)[
        :, None, None
    ]
    reference = pillow_preprocess(pixels, SMALL)
    result = diagnose(pixels, wrong.astype(np.float32), SMALL, reference=reference)
    assert result.causes == (f"{diagnosis.OTHER_MEAN_STD} {says}",)


def test_range_of_one_is_named_where_the_spec_has_255() -> None:
    pixels = picture(120, 180)
    spec = SMALL.model_copy(update={"value_range": (0, 255), "mean": None, "std": None})
    reference = pillow_preprocess(pixels, spec)
    for wrong in (reference / 255, reference / 127.5 - 1):
        result = diagnose(pixels, wrong.astype(np.float32), spec, reference=reference)
        assert result.causes == (diagnosis.RANGE_OF_ONE,)


@pytest.mark.parametrize("seed", range(3))
def test_noise_has_no_cause(seed: int) -> None:
    pixels = picture(120, 180, seed=seed)
    reference = pillow_preprocess(pixels, SMALL)
    noise = np.random.default_rng(seed).normal(0, 9 / 255, reference.shape) / STD
    wrong = (reference + noise).astype(np.float32)
    assert diagnose(pixels, wrong, SMALL, reference=reference) == ((), 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_rounding_has_no_cause(seed: int) -> None:
    pixels = picture(120, 180, seed=seed)
    reference = pillow_preprocess(pixels, SMALL)
    moved = np.random.default_rng(seed).choice([-1, 0, 1], reference.shape) / 255 / STD
    result = diagnose(
        pixels, (reference + 0.49 * moved).astype(np.float32), SMALL, reference=reference
    )
    assert result == ((), 0.0)
