"""Subjects of multi-file releases, and untrusted release files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gate import Digest, GateError
from gate.errors import LimitExceeded, OnnxFileError
from gate.onnx_file.release_file import ReleaseFile, is_release_file, onnx_files
from gate.onnx_file.sandboxed_reading import read_subject_in_sandbox, release_within
from tests.onnx_file import hostile
from tests.onnx_file.hostile import TIGHT_LIMITS, WIDE_LIMITS
from tests.registry import parts, releases


def test_digest_covers_all_files(tmp_path: Path) -> None:
    path = parts.write_release(tmp_path)
    subject = read_subject_in_sandbox(path, None)
    names = ("release.yaml", "encoder.onnx", "head.onnx")
    assert subject.sha256 == Digest.from_manifest(tmp_path, names)
    assert subject.size_bytes == sum((tmp_path / name).stat().st_size for name in names)
    assert subject.external_data == names[1:]
    for name in names:
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data + (b"\n" if name == "release.yaml" else b"r\x01x"))
        assert Digest.from_manifest(tmp_path, names) != subject.sha256
        (tmp_path / name).write_bytes(data)


def test_external_data_of_parts_belongs_to_the_release(tmp_path: Path) -> None:
    releases.onnx_file_with_data(tmp_path / "sub" / "head.onnx")
    releases.onnx_file(tmp_path / "encoder.onnx")
    path = tmp_path / "release.yaml"
    path.write_text(
        "chain: a.b:run\nparts: {encoder: {file: encoder.onnx}, head: {file: ./sub/head.onnx}}\n"
    )
    subject = read_subject_in_sandbox(path, None)
    assert subject.external_data == ("encoder.onnx", "sub/head.onnx", "sub/weights.data")
    assert subject.parts["head"].file == "sub/head.onnx"
    assert onnx_files(path)["head"] == tmp_path / "sub" / "head.onnx"


def test_sandbox_reads_the_same_release(tmp_path: Path) -> None:
    path = parts.write_release(tmp_path)
    assert release_within(path, WIDE_LIMITS).subject() == read_subject_in_sandbox(path, None)


@pytest.mark.further
def test_reading_a_part_beyond_limits_is_stopped(tmp_path: Path) -> None:
    path = parts.write_release(tmp_path)
    next(iter(hostile.EXPENSIVE_TO_READ.values()))(tmp_path / "head.onnx")
    with pytest.raises(LimitExceeded):
        read_subject_in_sandbox(path, TIGHT_LIMITS)


def _write_alias_bomb(path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    path.write_text("\n".join(lines))


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "huge": lambda path: path.write_bytes(b"#" * (1 << 17)),
    "deep": lambda path: path.write_text("[" * 30_000),
    "aliases": _write_alias_bomb,
    "a pipe": _replace_by_pipe,
    "no text": lambda path: path.write_bytes(b"\x08\x0a\xff\xfe"),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_malicious_release_file_is_refused(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = parts.write_release(tmp_path)
    make(path)
    with pytest.raises(GateError):
        ReleaseFile.load(path)


def test_nested_release_is_refused(tmp_path: Path) -> None:
    path = parts.write_release(tmp_path)
    (tmp_path / "inner.yml").write_text(path.read_text())
    path.write_text(path.read_text().replace("head.onnx", "inner.yml"))
    assert is_release_file(tmp_path / "inner.yml")
    with pytest.raises(OnnxFileError, match="a release can't contain releases"):
        read_subject_in_sandbox(path, None)


def test_linked_release_file_is_read(tmp_path: Path) -> None:
    """As the cache of DVC has it."""
    path = parts.write_release(tmp_path)
    path.rename(tmp_path / "cached")
    path.symlink_to(tmp_path / "cached")
    assert list(ReleaseFile.load(path).parts) == list(parts.NAMES)
