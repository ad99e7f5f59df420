from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gate import Digest, GateError
from pipelines import images, paths, prepare
from pipelines.override import override
from tests.pipelines.conftest import FEW_SAMPLES


def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path("data").iterdir() if path.is_file()}


def pictures(folder: Path, *, classes: int = 3, each: int = 8) -> Path:
    generator = np.random.default_rng(0)
    for label in range(classes):
        for number in range(each):
            path = folder / f"class{label}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
    return folder


def test_digits_are_split_by_class_and_described(project: Path) -> None:
    assert prepare.main() == 0
    manifest = json.loads(paths.MANIFEST.read_text())
    evaluation = np.load(paths.EVAL_IMAGES)
    labels = np.load(paths.EVAL_LABELS)
    assert manifest["counts"] == {"train": 1347, "eval": 450}
    assert evaluation.shape == (450, 3, 16, 16)
    assert evaluation.dtype == np.float32
    assert -1.0 <= evaluation.min() < evaluation.max() <= 1.0
    assert np.bincount(labels).min() >= 40
    for name, digest in manifest["sha256"].items():
        assert str(Digest.from_file(Path("data") / name)) == digest


def test_data_is_reproducible_by_seed(trained: Path) -> None:
    first = files()
    prepare.main()
    assert files() == first
    override(["prepare.seed=1"])
    prepare.main()
    assert files() != first


def test_pictures_are_read_one_at_a_time(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one picture is in memory: the file grows by one sample per picture."""
    pictures(project / "data" / "raw")
    override(["prepare.source=folder", *FEW_SAMPLES])
    sizes = []
    to_tensor = images.to_tensor

    def record_size(pixels: Any, spec: Any) -> Any:
        written = list(Path("data").glob(".train_images.npy.*.tmp"))
        sizes.append(sum(path.stat().st_size for path in written))
        return to_tensor(pixels, spec)

    monkeypatch.setattr(images, "to_tensor", record_size)
    prepare.main()
    assert sorted(sizes[:19]) == sizes[:19]


def test_npz_with_pictures_or_tensors(project: Path) -> None:
    labels = np.arange(12) % 3
    grey = np.random.default_rng(0).integers(0, 256, (12, 10, 10), dtype=np.uint8)
    override(["prepare.source=npz", "prepare.path=data/raw/x.npz", *FEW_SAMPLES])
    np.savez("data/raw/x.npz", images=grey, labels=labels)
    assert prepare.main() == 0
    assert np.load(paths.TRAIN_IMAGES).shape[1:] == (3, 16, 16)
    tensors = np.random.default_rng(0).normal(size=(12, 1, 5, 7)).astype(np.float32)
    np.savez("data/raw/x.npz", images=tensors, labels=labels)
    assert prepare.main() == 0
    pair = np.concatenate([np.load(paths.TRAIN_IMAGES), np.load(paths.EVAL_IMAGES)])
    assert sorted(map(bytes, pair)) == sorted(map(bytes, tensors))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("model.num_classes=3",), r"6 evaluation samples \(25% of 24\).*requires 400"),
        (("gate.min_samples=7", "model.num_classes=null"), "6 evaluation samples.*requires 7"),
        (("gate.min_samples=6",), "3 classes, the model has 10.*Set model.num_classes: 3"),
        (("gate.min_samples=6", "model.num_classes=2"), "3 classes, the model has 2"),
        ((), r"(?s)requires 400.*3 classes, the model has 10"),
    ],
)
def test_unsuitable_data_is_reported_before_training(
    project: Path, settings: tuple[str, ...], says: str
) -> None:
    pictures(project / "data" / "raw")
    override(["prepare.source=folder", *settings])
    with pytest.raises(GateError, match=says):
        prepare.main()
    assert files() == {}


def corrupt_picture(folder: Path) -> None:
    path = pictures(folder) / "class1" / "3.png"
    path.write_bytes(path.read_bytes()[:-300])


def not_a_picture(folder: Path) -> None:
    (pictures(folder) / "class1" / "3.png").write_text("hello")


def one_class(folder: Path) -> None:
    pictures(folder, classes=1)


def one_picture(folder: Path) -> None:
    pictures(folder, each=1)


def file_without_class(folder: Path) -> None:
    Image.new("RGB", (8, 8)).save(folder / "loose.png")


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (lambda folder: None, "has no pictures"),
        (file_without_class, "has no pictures"),
        (lambda folder: folder.rmdir(), "is not a folder"),
        (corrupt_picture, r"class1.3\.png is not a complete picture"),
        (not_a_picture, r"class1.3\.png is not a complete picture"),
        (one_class, "1 classes"),
        (one_picture, "smallest with 1 samples"),
    ],
)
def test_bad_folder_is_refused_and_old_data_kept(trained: Path, tamper: Any, says: str) -> None:
    before = files()
    tamper(trained / "data" / "raw")
    override(["prepare.source=folder", *FEW_SAMPLES])
    with pytest.raises(GateError, match=says):
        prepare.main()
    assert files() == before


NAN = np.ones((6, 1, 4, 4), np.float32)
NAN[3, 0, 1, 1] = np.nan
GOOD = np.ones((6, 1, 4, 4), np.float32)
LABELS = np.array([0, 1, 0, 1, 0, 1])


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"images": GOOD}, "lacks labels"),
        ({"images": GOOD, "labels": LABELS[:5]}, "5 labels for 6 images"),
        ({"images": GOOD, "labels": LABELS.astype(float)}, "expected integers"),
        ({"images": GOOD, "labels": LABELS - 1}, "labels reach from -1"),
        (
            {"images": GOOD, "labels": LABELS, "classes": np.array(["a"])},
            "labels reach from 0 to 1",
        ),
        ({"images": NAN, "labels": LABELS}, "sample 3 holds NaN"),
        ({"images": GOOD.astype(np.float64), "labels": LABELS}, "float64"),
        ({"images": np.array([{}] * 6), "labels": LABELS}, "allow_pickle"),
        ({"images": GOOD[:0], "labels": LABELS[:0]}, "0 labels"),
    ],
)
def test_bad_npz_is_refused(project: Path, arrays: dict[str, Any], says: str) -> None:
    override(["prepare.source=npz", "prepare.path=data/raw/x.npz", *FEW_SAMPLES])
    np.savez("data/raw/x.npz", **arrays)
    with pytest.raises(GateError, match=says):
        prepare.main()


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 torn"])
def test_missing_or_truncated_npz_is_refused(project: Path, content: bytes | None) -> None:
    override(["prepare.source=npz", "prepare.path=data/raw/x.npz", *FEW_SAMPLES])
    if content is not None:
        Path("data/raw/x.npz").write_bytes(content)
    with pytest.raises(GateError, match=r"cannot read data/raw/x\.npz"):
        prepare.main()


def test_full_disk_keeps_the_old_data(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files()
    written = 0
    to_tensor = images.to_tensor

    def full(pixels: Any, spec: Any) -> Any:
        nonlocal written
        written += 1
        if written > 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return to_tensor(pixels, spec)

    monkeypatch.setattr(images, "to_tensor", full)
    override(["prepare.seed=5"])
    with pytest.raises(GateError, match="No space left"):
        prepare.main()
    assert files() == before
