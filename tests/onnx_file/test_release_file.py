"""A release file names parts in its folder, or is rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import GateError
from gate.errors import OnnxFileError
from gate.onnx_file.release_file import PartEntry, ReleaseFile, release_text
from gate.storage.yaml_section import load_section


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in ("a.onnx", "sub/b.onnx"):
        (tmp_path / name).touch()
    return tmp_path


def write_release(folder: Path, text: str) -> Path:
    path = folder / "release.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("chain: a.b:run\nparts: {a: {file: none.onnx}}\n", "the part a is missing"),
        ("chain: a.b:run\nparts: {a: {file: ../a.onnx}}\n", "expected a file in the folder"),
        ("chain: a.b:run\nparts: {a: {file: /etc/passwd}}\n", "expected a file in the folder"),
        ("chain: a.b:run\nparts: {}\n", "release.yaml:2: parts"),
        ("chain: run\nparts: {a: {file: a.onnx}}\n", "release.yaml:1: chain"),
        ("parts: {a: {file: a.onnx}}\n", "chain"),
        ("chain: a.b:run\nparts: {'a b': {file: a.onnx}}\n", "parts"),
        ("chain: a.b:run\nparts: {a: {fil: a.onnx}}\n", "fil"),
        ("- 1\n", "release.yaml"),
    ],
)
def test_invalid_release_file_is_refused(folder: Path, text: str, wanted: str) -> None:
    with pytest.raises(GateError, match=wanted):
        ReleaseFile.load(write_release(folder, text))


def test_link_loop_is_refused(folder: Path) -> None:
    (folder / "loop").symlink_to(folder / "loop")
    with pytest.raises(OnnxFileError, match="expected a file in the folder"):
        ReleaseFile.load(write_release(folder, "chain: a.b:run\nparts: {a: {file: loop/a.onnx}}\n"))


@given(
    files=st.dictionaries(
        st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True),
        st.text(st.characters(categories=["L", "N", "P", "Zs"]), min_size=1, max_size=12),
        min_size=1,
    ),
    reference=st.none() | st.text("abc.'{}:#", min_size=1),
)
def test_written_release_file_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, str], reference: str | None
) -> None:
    path = tmp_path_factory.mktemp("written") / "release.yaml"
    parts = {name: PartEntry(file=file, reference=reference) for name, file in files.items()}
    path.write_text(release_text("a.b:run", parts))
    assert load_section(ReleaseFile, path, None) == ReleaseFile(chain="a.b:run", parts=parts)
