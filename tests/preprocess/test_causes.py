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


def resize_with_pillow(pixels: Pixels, filter_: Any = Image.Resampling.BILINEAR) -> NDArray[Any]:
    resized = np.asarray(Image.fromarray(pixels).resize(SIZE[::-1], filter_))
    return resized[BOX].transpose(2, 0, 1).astype(np.float32)


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


@pytest.mark.parametrize("seed", range(3))
def test_rounding_has_no_cause(seed: int) -> None:
    pixels = picture(120, 180, seed=seed)
    reference = pillow_preprocess(pixels, SMALL)
    moved = np.random.default_rng(seed).choice([-1, 0, 1], reference.shape) / 255 / STD
    result = diagnose(
        pixels, (reference + 0.49 * moved).astype(np.float32), SMALL, reference=reference
    )
    assert result == ((), 0.0)
