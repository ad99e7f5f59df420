"""Files are verified against the evidence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gate import GateError
from gate.errors import DigestMismatch, EvidenceError
from gate.onnx_file.sandboxed_reading import verify_description, verify_files
from tests.registry import parts, releases


@pytest.fixture
def release(tmp_path: Path) -> Path:
    releases.onnx_file_with_data(tmp_path / "sub" / "head.onnx")
    releases.onnx_file(tmp_path / "encoder.onnx")
    path = tmp_path / "release.yaml"
    path.write_text(
        "chain: a.b:run\nparts: {encoder: {file: encoder.onnx}, head: {file: sub/head.onnx}}\n"
    )
    return path


def test_unchanged_release_is_verified(release: Path) -> None:
    verify_files(release, parts.evidence(release))
    verify_description(release, parts.evidence(release), None)


CHANGED_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (
        lambda path: (path.parent / "sub" / "weights.data").write_bytes(b"\0" * 120),
        r"the part head \(.*head.onnx\) has digest",
    ),
    "no weights": (
        lambda path: (path.parent / "sub" / "weights.data").unlink(),
        "head.onnx: the data file weights.data is missing",
    ),
    "file": (
        lambda path: releases.onnx_file(path.parent / "encoder.onnx", seed=3),
        r"the part encoder \(.*\) has digest",
    ),
    "list": (
        lambda path: path.write_text(path.read_text().replace("a.b:run", "a.b:ran")),
        "release.yaml has digest",
    ),
}


@pytest.mark.parametrize(("spoil", "wanted"), CHANGED_FILES.values(), ids=CHANGED_FILES)
def test_changed_file_of_a_release_is_named(
    release: Path, spoil: Callable[[Path], object], wanted: str
) -> None:
    measured = parts.evidence(release)
    spoil(release)
    with pytest.raises(DigestMismatch, match=wanted):
        verify_files(release, measured)


def test_evidence_of_one_file_does_not_describe_a_release(release: Path) -> None:
    single = releases.evidence(release.parent / "encoder.onnx")
    with pytest.raises(EvidenceError, match="the evidence does not describe"):
        verify_description(release, single, None)


def test_evidence_of_a_release_does_not_describe_one_file(release: Path) -> None:
    with pytest.raises(GateError):
        verify_description(release.parent / "encoder.onnx", parts.evidence(release), None)
