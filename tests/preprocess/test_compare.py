"""Comparisons of real image files: exact numbers, decisions, failures, and invalid arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gate import PreprocessSpec
from gate.errors import EvidenceError, OnnxFileError
from gate.preprocess import comparison
from gate.preprocess.comparison import ConsumerSelection, ModelFile, compare_consumers
from gate.preprocess.diagnosis import OTHER_PICTURE
from gate.preprocess.implementations import Implementation, pillow_preprocess
from gate.preprocess.pictures import Picture, pictures_in
from gate.records.preprocessing import ConsumerParity, PreprocessingParity
from tests import builders
from tests.preprocess.by.test_onnx_graph import classifier
from tests.preprocess.pictures import SMALL, picture

SHAPES = ((90, 70), (64, 120), (77, 77))


@pytest.fixture
def photos(tmp_path: Path) -> tuple[Picture, ...]:
    for seed, shape in enumerate(SHAPES):
        Image.fromarray(picture(*shape, seed=seed)).save(tmp_path / f"{seed}.png")
    return pictures_in([tmp_path])


def tensors(photos: tuple[Picture, ...], spec: PreprocessSpec = SMALL) -> Any:
    return np.stack([pillow_preprocess(photo.read(), spec) for photo in photos])


def file(path: Path) -> ModelFile:
    return ModelFile(path, builders.digest("model"))


def compare_tensors(photos: tuple[Picture, ...], dumped: Any, **options: Any) -> ConsumerParity:
    result = compare_consumers(
        SMALL, photos, selection=ConsumerSelection(("own",), {"own": dumped}), **options
    )
    (consumer,) = result.parity.consumers
    return consumer


def test_record_has_reference_consumers_and_differences(photos: tuple[Picture, ...]) -> None:
    result = compare_consumers(
        SMALL, photos, selection=ConsumerSelection(("torchvision", "torchvision-no-antialias"))
    )
    parity = result.parity
    near, far = parity.consumers
    assert (parity.reference, parity.images, parity.spec_sha256) == ("pillow", 3, SMALL.digest())
    assert len(parity.reference_values.first) == 16
    assert near.within(1.0)
    assert near.causes == ()
    assert not far.within(1.0)
    assert far.causes == ("no antialias",)
    assert far.worst in [photo.name for photo in photos]
    assert far.shape == (3, 32, 36)
    assert set(parity.versions) == {"pillow", "torchvision", "torchvision-no-antialias"}
    assert set(result.worst_pictures) == {"torchvision", "torchvision-no-antialias"}
    assert PreprocessingParity.from_json(parity.to_json()) == parity


def test_differences_match_a_manual_computation(photos: tuple[Picture, ...]) -> None:
    moved = tensors(photos)
    step = 1 / 255 / 0.224
    moved[1, 1, 3, 4] += 2.5 * step
    observed = compare_tensors(photos, moved)
    assert observed.max_diff == 2.5
    assert observed.max_diff_output == pytest.approx(2.5 * step, rel=1e-4)
    assert observed.mean_diff == pytest.approx(2.5 / moved.size, rel=1e-3)
    assert observed.over_one_step == pytest.approx(1 / moved.size)
    assert [channel.max for channel in observed.channels] == [0.0, 2.5, 0.0]
    assert observed.worst == photos[1].name
    assert observed.values is not None
    assert observed.values.first == tuple(float(value) for value in moved[0].ravel()[:16])
    assert observed.values.max == pytest.approx(float(moved.max()))
    assert (observed.within(2.5), observed.within(2.499)) == (True, False)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_values_never_pass(photos: tuple[Picture, ...], bad: float) -> None:
    moved = tensors(photos)
    moved[0, 0, 0, 0] = bad
    observed = compare_tensors(photos, moved)
    assert observed.nonfinite == 1
    assert not observed.within(1e9)


def test_wrong_shape_never_passes_and_is_explained(photos: tuple[Picture, ...]) -> None:
    observed = compare_tensors(photos, tensors(photos).transpose(0, 2, 3, 1))
    assert observed.images == 0
    assert "layout nhwc instead of nchw" in observed.mismatched[0]
    assert len(observed.mismatched) == 3
    assert not observed.within(math.inf)


def test_tensors_in_another_order_are_named(photos: tuple[Picture, ...]) -> None:
    consumer = compare_tensors(photos, tensors(photos)[[0, 2, 1]])
    worst, other = consumer.worst, {photos[1].name: photos[2].name, photos[2].name: photos[1].name}
    assert worst is not None
    assert consumer.causes == (f"{OTHER_PICTURE} ({other[worst]})",)


def test_changed_answers_are_counted(photos: tuple[Picture, ...], tmp_path: Path) -> None:
    model = classifier(tmp_path / "model.onnx")
    same = compare_tensors(photos, tensors(photos), model=file(model)).decisions
    assert same is not None
    assert (same.images, same.flips, same.confidence_diff_max) == (3, 0, 0.0)
    second = compare_tensors(photos, -3 * tensors(photos), model=file(model)).decisions
    assert second is not None
    assert second.flips == len(second.flipped) > 0
    assert 0.0 < second.confidence_diff_mean <= second.confidence_diff_max


def test_failing_consumer_does_not_stop_the_others(
    photos: tuple[Picture, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def opened(spec: PreprocessSpec) -> Iterator[Any]:
        yield lambda pixels: 1 / 0

    @contextmanager
    def unopened(spec: PreprocessSpec) -> Iterator[Any]:
        raise RuntimeError("no browser\nat all")
        yield

    real = comparison.implementation
    broken = {
        "onnx": Implementation(lambda _: None, opened, lambda: "1"),
        "canvas": Implementation(lambda _: None, unopened, lambda: "1"),
        "opencv": Implementation(lambda _: None, unopened, lambda: "1", lambda: "not installed"),
        "opencv-area": Implementation(
            lambda _: "no such filter", unopened, lambda: "1", lambda: "not installed"
        ),
    }
    monkeypatch.setattr(comparison, "implementation", lambda name: broken.get(name) or real(name))
    selection = ConsumerSelection((*broken, "rust-image"))
    result = compare_consumers(SMALL, photos, selection=selection).parity
    assert "ZeroDivisionError" in str(result.consumers[0].failure)
    assert result.consumers[1].failure == "RuntimeError: no browser"
    assert result.consumers[2].unavailable == "not installed"
    # A policy may waive what is not installed, but not what no machine can compute.
    incapable = result.consumers[3]
    assert (incapable.incapable, incapable.unavailable) == ("no such filter", None)
    assert [consumer.within(1e9) for consumer in result.consumers] == [False] * 4 + [True]


def test_comparison_without_pictures_or_classifier_is_refused(
    photos: tuple[Picture, ...], tmp_path: Path
) -> None:
    with pytest.raises(EvidenceError, match="there are no pictures"):
        compare_consumers(SMALL, (), selection=ConsumerSelection(("onnx",)))
    with pytest.raises(OnnxFileError, match="can't open"):
        compare_tensors(photos, tensors(photos), model=file(tmp_path / "missing.onnx"))
