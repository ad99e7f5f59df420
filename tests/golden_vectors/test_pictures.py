"""Golden vectors that start from pictures: written, verified, refused when changed."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from gate import Digest, PreprocessSpec, verify_golden
from gate.errors import DigestMismatch, EvidenceError
from gate.golden.folder import (
    GOLDEN_JSON,
    ExpectedOutput,
    add_pictures,
    files_of,
    read_golden,
)
from gate.golden.manifest import GoldenModel
from gate.onnx_file.reading import read_subject
from gate.preprocess.implementations import pillow_preprocess
from gate.preprocess.pictures import read_picture
from gate.preprocess.spec import Resize
from tests import builders
from tests.golden_vectors.vectors import origin, write_vectors
from tests.preprocess.by.test_onnx_graph import classifier
from tests.preprocess.pictures import SMALL, picture


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    created = [tmp_path / f"{seed}.png" for seed in range(5)]
    for seed, path in enumerate(created):
        Image.fromarray(picture(60, 70 + seed, seed=seed)).save(path)
    return created


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return classifier(tmp_path / "model.onnx")


@pytest.fixture
def folder(tmp_path: Path, photos: list[Path], model: Path) -> Path:
    """Golden vectors of the pictures 1 and 3, with these pictures."""
    samples = np.stack([pillow_preprocess(read_picture(photos[index]), SMALL) for index in (1, 3)])
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    logits = session.run(None, {"x": samples})[0]
    write_vectors(
        tmp_path / "golden",
        model=GoldenModel(sha256=read_subject(model).sha256, file=model.name),
        inputs={"x": samples},
        outputs={"logits": ExpectedOutput(logits, 1e-4, 1.0)},
        origin=origin(),
    )
    add_pictures(tmp_path / "golden", SMALL, photos)
    return tmp_path / "golden"


def test_pictures_are_stored_and_verified(folder: Path, model: Path, photos: list[Path]) -> None:
    read = read_golden(folder)
    reported = read.golden.pictures
    assert reported is not None
    assert (reported.input, reported.spec, reported.max_diff) == ("x", SMALL, 1.0)
    observed = [np.array(Image.open(io.BytesIO(data))) for data in read.pictures]
    for pixels, index in zip(observed, (1, 3), strict=True):
        np.testing.assert_array_equal(pixels, read_picture(photos[index]))
    assert {path.name for path in folder.iterdir()} == set(files_of(read.golden))
    assert verify_golden(model, folder).passed


def first_picture(folder: Path) -> Path:
    return sorted(folder.glob("picture-0-*.png"))[0]


def swap_picture(folder: Path) -> None:
    """Replace a picture and make the record match."""
    path = first_picture(folder)
    Image.fromarray(picture(60, 71, seed=9)).save(path)
    change_picture(folder, sha256=str(Digest.from_file(path)), size_bytes=path.stat().st_size)


def write_invalid_picture(folder: Path) -> None:
    path = first_picture(folder)
    path.write_bytes(b"hello")
    change_picture(folder, sha256=str(Digest.from_file(path)), size_bytes=5)


def change_picture(folder: Path, **fields: Any) -> None:
    plain = json.loads((folder / GOLDEN_JSON).read_text())
    plain["pictures"]["files"][0] |= fields
    (folder / GOLDEN_JSON).write_text(json.dumps(plain))


def change_spec(folder: Path) -> None:
    plain = json.loads((folder / GOLDEN_JSON).read_text())
    plain["pictures"]["spec"]["channels"] = "bgr"
    (folder / GOLDEN_JSON).write_text(json.dumps(plain))


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (swap_picture, "/255 from its golden input, allowed 1"),
        (write_invalid_picture, "is not a complete picture"),
        (change_spec, "from its golden input"),
    ],
)
def test_changed_picture_does_not_pass(
    folder: Path, model: Path, tamper: Callable[[Path], None], says: str
) -> None:
    tamper(folder)
    result = verify_golden(model, folder)
    assert not result.passed
    assert says in result.problems[0]


def replace_picture(folder: Path, data: bytes) -> None:
    """Replace the bytes of a picture and make the record match."""
    first_picture(folder).write_bytes(data)
    change_picture(folder, sha256=str(Digest.from_bytes(data)), size_bytes=len(data))


def encode_picture(height: int, width: int, form: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, form)
    return stream.getvalue()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 70\n%%EndComments\n(x) print\n%%EOF\n"


def change_resize(folder: Path, **resize: Any) -> None:
    """Let the preprocessing spec enlarge the picture before it is cropped."""
    plain = json.loads((folder / GOLDEN_JSON).read_text())
    plain["pictures"]["spec"]["resize"] |= {"size": None, "shortest_side": None} | resize
    (folder / GOLDEN_JSON).write_text(json.dumps(plain))


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (lambda folder: replace_picture(folder, EPS), "is not a complete picture"),
        (
            lambda folder: replace_picture(folder, encode_picture(60, 71, "JPEG")),
            "is not a complete picture",
        ),
        (
            lambda folder: replace_picture(folder, encode_picture(60, 71, "TIFF")),
            "is not a complete picture",
        ),
        (
            lambda folder: replace_picture(folder, encode_picture(8192, 8192)),
            "8192 x 8192 pixels, the maximum",
        ),
        (lambda folder: change_resize(folder, shortest_side=8192), "exceeds the maximum"),
        (lambda folder: change_resize(folder, size=[16_384, 16_384]), "exceeds the maximum"),
    ],
)
def test_picture_decoding_is_limited(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, tamper: Callable[[Path], None], says: str
) -> None:  # fmt: skip
    def start(*_arguments: object, **_options: object) -> None:
        pytest.fail("a picture started a program")

    tamper(folder)
    monkeypatch.setattr("subprocess.Popen", start)
    tracemalloc.start()
    try:
        result = verify_golden(model, folder)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert says in result.problems[0]
    assert peak_bytes < 50e6


def test_pictures_of_another_release_are_not_opened(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_picture(folder, EPS)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("a picture was opened"))
    result = verify_golden(model, folder, golden_sha256=builders.digest("promoted"))
    assert "the digest of the golden vectors is" in result.problems[0]
    model.write_bytes(model.read_bytes() + b"\0")
    assert "has digest" in verify_golden(model, folder).problems[0]


@pytest.mark.parametrize(
    ("tamper", "error"),
    [
        (lambda folder: first_picture(folder).write_bytes(b"x" * first_picture(folder).stat().st_size), DigestMismatch),
        (lambda folder: first_picture(folder).write_bytes(first_picture(folder).read_bytes() + b"x"), DigestMismatch),
        (lambda folder: first_picture(folder).unlink(), EvidenceError),
        (lambda folder: change_picture(folder, file="../../etc.png"), EvidenceError),
        (lambda folder: change_picture(folder, file="golden.json"), EvidenceError),
        (lambda folder: change_picture(folder, size_bytes=1 << 40), EvidenceError),
    ],
)  # fmt: skip
def test_damaged_pictures_are_refused(
    folder: Path, tamper: Callable[[Path], Any], error: type[Exception]
) -> None:
    tamper(folder)
    with pytest.raises(error):
        read_golden(folder)


def test_every_sample_needs_its_picture(folder: Path, photos: list[Path]) -> None:
    with pytest.raises(EvidenceError, match="no picture gives the golden sample 1"):
        add_pictures(folder, SMALL, photos[:2])
    with pytest.raises(EvidenceError, match="verified with Pillow"):
        add_pictures(folder, PreprocessSpec(resize=Resize(size=(8, 8), antialias=False)), photos)
