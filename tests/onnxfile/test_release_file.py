"""A release file names parts that lie beside it, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.errors import GateError, OnnxFileError
from gate.onnxfile.release_file import ReleaseFile, is_release


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in ("a.onnx", "sub/b.onnx"):
        (tmp_path / name).touch()
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "release.yaml"
    path.write_text(text)
    return path


def test_parts_are_read_in_their_order(folder: Path) -> None:
    parts = "{z: {file: sub/b.onnx, reference: x.y}, a: {file: a.onnx}}"
    path = written(folder, f"chain: a.b:run\nparts: {parts}\n")
    release = ReleaseFile.load(path)
    assert list(release.parts) == ["z", "a"]
    assert release.parts["z"].reference == "x.y"
    assert is_release(path)
    assert not is_release(folder / "a.onnx")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("chain: a.b:run\nparts: {a: {file: none.onnx}}\n", "the part a is missing"),
        ("chain: a.b:run\nparts: {a: {file: ../a.onnx}}\n", "expected one in the folder"),
        ("chain: a.b:run\nparts: {a: {file: /etc/passwd}}\n", "expected one in the folder"),
        ("chain: a.b:run\nparts: {}\n", "release.yaml:2: parts"),
        ("chain: run\nparts: {a: {file: a.onnx}}\n", "release.yaml:1: chain"),
        ("parts: {a: {file: a.onnx}}\n", "chain"),
        ("chain: a.b:run\nparts: {'a b': {file: a.onnx}}\n", "parts"),
        ("chain: a.b:run\nparts: {a: {fil: a.onnx}}\n", "fil"),
        ("- 1\n", "release.yaml"),
    ],
)
def test_what_is_none_is_refused(folder: Path, text: str, wanted: str) -> None:
    with pytest.raises(GateError, match=wanted):
        ReleaseFile.load(written(folder, text))


def test_links_that_lead_to_one_another_lead_nowhere(folder: Path) -> None:
    (folder / "loop").symlink_to(folder / "loop")
    with pytest.raises(OnnxFileError, match="expected one in the folder"):
        ReleaseFile.load(written(folder, "chain: a.b:run\nparts: {a: {file: loop/a.onnx}}\n"))
