"""The preprocessing spec in the pipeline: file, digest, pictures, and parity if required."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gate import Digest, Policy, PreprocessSpec
from gate.policy.sections import PreprocessingPolicy
from gate.preprocess.implementations import pillow_preprocess
from gate.preprocess.pictures import pictures_in
from pipelines import images, paths, prepare
from pipelines.measuring import measure_preprocessing
from pipelines.override import override
from pipelines.params import PrepareParams
from tests.pipelines.conftest import FEW_SAMPLES, ONNX


def test_stored_picture_gives_its_sample(project: Path) -> None:
    prepare.main()
    spec = PreprocessSpec.load(paths.PREPROCESSING)
    assert spec == PrepareParams.load().preprocessing
    samples = np.load(paths.EVAL_IMAGES)
    pictures = pictures_in([paths.PICTURES])
    assert len(pictures) == 64
    for picture in pictures:
        path = int(Path(picture.name).stem)
        np.testing.assert_array_equal(pillow_preprocess(picture.read(), spec), samples[path])


def test_pictures_of_earlier_settings_are_removed(project: Path) -> None:
    prepare.main()
    override(["prepare.pictures=3"])
    prepare.main()
    assert sorted(path.name for path in paths.PICTURES.iterdir()) == [
        "00000.png", "00224.png", "00449.png",
    ]  # fmt: skip


def test_tensor_data_has_no_pictures(project: Path) -> None:
    tensors = np.random.default_rng(0).normal(size=(12, 3, 5, 7)).astype(np.float32)
    np.savez("data/raw/x.npz", images=tensors, labels=np.arange(12) % 3)
    override(["prepare.source=npz", "prepare.path=data/raw/x.npz", *FEW_SAMPLES])
    prepare.main()
    assert list(paths.PICTURES.iterdir()) == []
    settings = PreprocessingPolicy(consumers=("rust-image",))
    policy = Policy.default().model_copy(update={"preprocessing": settings})
    assert measure_preprocessing(policy, ONNX) is None


def test_tensors_do_not_change_with_a_spec() -> None:
    """The results equal those of the pipeline's first version, so that trained models remain
    valid."""
    spec = PreprocessSpec(resize={"size": (64, 64)}, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    grey = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    pixels = np.asarray(
        Image.fromarray(grey).convert("RGB").resize((64, 64), Image.Resampling.BILINEAR)
    )
    half = np.array((0.5, 0.5, 0.5), np.float32)
    expected = (pixels.astype(np.float32) / np.float32(255.0) - half) / half
    observed = images.to_tensor(np.repeat(grey[..., None], 3, axis=2), spec)
    assert observed.tobytes() == np.ascontiguousarray(expected.transpose(2, 0, 1)).tobytes()


@pytest.mark.parametrize("consumers", [("rust-image", "onnx"), ("opencv",)])
def test_preprocessing_parity_uses_the_stored_pictures(
    project: Path, consumers: tuple[str, ...]
) -> None:
    prepare.main()
    settings = PreprocessingPolicy(consumers=consumers)
    policy = Policy.default().model_copy(update={"preprocessing": settings})
    observed = measure_preprocessing(policy, ONNX)
    assert observed is not None
    assert (observed.images, observed.spec_sha256) == (64, Digest.from_json(
        PreprocessSpec.load(paths.PREPROCESSING).to_plain()
    ))  # fmt: skip
    assert [consumer.consumer for consumer in observed.consumers] == list(consumers)
    assert all(consumer.within(1.0) for consumer in observed.consumers)
    assert measure_preprocessing(Policy.default(), ONNX) is None
