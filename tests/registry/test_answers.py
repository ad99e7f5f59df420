"""What a store in trouble gives, and what an editor may have written."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from gate.registry.answers import answer_in
from gate.registry.version_files import ExpectedDigests
from gate.storage.digest import Digest
from tests.registry.releases import onnx_file

EXPECTED = ExpectedDigests(sha256=Digest.of_bytes(b"model"))
HTML = b"<!DOCTYPE html><html><title>502</title></html>"
JSON = b'{"error_code": "INTERNAL_ERROR", "message": "try later"}'
WHOLE = b'{"schema_version": 1}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return onnx_file(tmp_path_factory.mktemp("whole") / "model.onnx", seed=1).read_bytes()


@pytest.fixture
def folder(tmp_path: Path, model: bytes) -> Path:
    for name, data in (
        ("MLmodel", b"flavors: {}"),
        ("model.onnx", model),
        ("gate/evidence.json", WHOLE),
        ("gate/decision.json", WHOLE),
        ("golden/golden.json", WHOLE),
        ("golden/input-0.bin", b"<s>, {}"),
        ("quantized/model.int8.onnx", model),
        ("quantized/gate/evidence.json", WHOLE),
        ("notes.html", HTML),
        ("requirements.txt", b""),
    ):
        path = tmp_path / "m" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "m" / "golden/input-0.bin").write_bytes(bytes(range(256)))
    return tmp_path


def test_a_whole_version_is_no_answer(folder: Path):
    assert answer_in(folder, EXPECTED) is None


@pytest.mark.parametrize("file", ["model.onnx", "quantized/model.int8.onnx"])
@pytest.mark.parametrize(
    "page",
    [b"", HTML, b"\n  " + HTML, b"\xef\xbb\xbf" + HTML, "<p>é</p>".encode("latin-1"), JSON, b"[]",
     b"<?xml version='1.0'?><Error/>", b"Service Unavailable", "später".encode(),
     ("é" * 2000).encode()],
)  # fmt: skip
def test_a_page_in_the_place_of_a_model(folder: Path, file: str, page: bytes):
    (folder / "m" / file).write_bytes(page)
    assert Path(file).name in str(answer_in(folder, EXPECTED))


@pytest.mark.parametrize("cut", [1, 2, 20, 100])
def test_the_beginning_of_a_model(folder: Path, model: bytes, cut: int):
    (folder / "m" / "model.onnx").write_bytes(model[:-cut])
    assert answer_in(folder, EXPECTED) == "model.onnx is cut off"


@pytest.mark.parametrize(
    "other",
    [lambda whole: whole + b"\0", lambda whole: whole + b"x", lambda whole: whole[:-4] + bytes(4),
     lambda whole: whole + whole[:2], gzip.compress, lambda whole: b"\xff" * 100],
)  # fmt: skip
def test_other_bytes_are_no_answer(folder: Path, model: bytes, other):
    (folder / "m" / "model.onnx").write_bytes(other(model))
    assert answer_in(folder, EXPECTED) is None


@pytest.mark.parametrize(
    ("file", "data", "answer"),
    [
        ("MLmodel", HTML, True),
        ("MLmodel", JSON, True),
        ("MLmodel", b"", True),
        ("MLmodel", b"flavors: []", False),
        ("gate/evidence.json", HTML, True),
        ("gate/evidence.json", JSON, True),
        ("gate/evidence.json", b"", True),
        ("gate/evidence.json", b"{}", False),
        ("gate/evidence.json", WHOLE + b"x", False),
        ("gate/evidence.json", b"[" * 20_000, False),
        ("quantized/gate/evidence.json", HTML, True),
        ("golden/golden.json", JSON, True),
        ("golden/input-0.bin", HTML, True),
        ("golden/input-0.bin", b"<" + bytes(range(256)), False),
        ("golden/input-0.bin", b"abc", False),
    ],
)
def test_what_is_beside_a_model(folder: Path, file: str, data: bytes, answer: bool):
    (folder / "m" / file).write_bytes(data)
    assert (answer_in(folder, EXPECTED) is not None) is answer
