"""Untrusted files are read in a sandbox within limits, and its result is verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gate.errors import DigestMismatch, EvidenceError, LimitExceeded, OnnxFileError
from gate.onnx_file import sandboxed_reading
from gate.onnx_file.reading import read_subject
from gate.onnx_file.sandboxed_reading import origin_within, read_subject_in_sandbox
from gate.onnx_file.tested_file import quantized_from
from tests.onnx_file import hostile
from tests.onnx_file.hostile import PARENT_BYTES, TIGHT_LIMITS, WIDE_LIMITS
from tests.registry.releases import onnx_file, onnx_file_with_data, twin_file
from tests.sandbox.peak import bounded_growth


@pytest.mark.parametrize("make", [onnx_file, onnx_file_with_data])
def test_sandbox_reads_the_same_subject(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path / "model.onnx")
    expected = read_subject(path)
    assert (
        read_subject_in_sandbox(path, WIDE_LIMITS)
        == expected
        == read_subject_in_sandbox(path, None)
    )


@pytest.mark.further
def test_origin_of_a_quantized_file(tmp_path: Path) -> None:
    exact = onnx_file(tmp_path / "model.onnx")
    twin = twin_file(tmp_path / "twin" / "model.onnx", of=exact, seed=1)
    assert origin_within(twin, WIDE_LIMITS) == quantized_from(twin) == origin_within(twin, None)
    assert origin_within(exact, WIDE_LIMITS) is None


@pytest.mark.further
@pytest.mark.parametrize("read", [read_subject_in_sandbox, origin_within])
@pytest.mark.parametrize("make", hostile.EXPENSIVE_TO_READ.values(), ids=hostile.EXPENSIVE_TO_READ)
def test_reading_a_file_beyond_limits_is_stopped(tmp_path: Path, make, read) -> None:
    path = make(tmp_path / "model.onnx")
    with bounded_growth(PARENT_BYTES), pytest.raises(LimitExceeded, match="^reading model.onnx"):
        read(path, TIGHT_LIMITS)


INVALID_FILES = {"missing": None, "empty": b"", "no ONNX": b"\xff" * 100, "a text": b"<html>"}


@pytest.mark.parametrize("data", INVALID_FILES.values(), ids=INVALID_FILES)
def test_invalid_file_has_the_same_error_in_the_sandbox(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "model.onnx"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(OnnxFileError) as expected:
        read_subject(path)
    with pytest.raises(OnnxFileError) as there:
        read_subject_in_sandbox(path, WIDE_LIMITS)
    assert str(there.value) == str(expected.value)


def test_file_larger_than_the_memory_limit_is_not_opened(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as stream:
        stream.truncate(TIGHT_LIMITS.memory_bytes + 1)
    monkeypatch.setattr(sandboxed_reading, "run_in_sandbox", None)
    with pytest.raises(LimitExceeded, match="has 300 MB.*was not read.*--memory-limit"):
        read_subject_in_sandbox(path, TIGHT_LIMITS)


def test_file_larger_than_a_protobuf_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as stream:
        stream.truncate(2**31)
    with bounded_growth(PARENT_BYTES), pytest.raises(OnnxFileError, match="at most 2147483647"):
        read_subject(path)


FALSE_RESULTS = {
    "other bytes": ({"sha256": "sha256:" + "0" * 64}, DigestMismatch),
    "files of others": ({"external_data": ["../private"]}, OnnxFileError),
    "all files": ({"external_data": ["/etc/passwd"]}, OnnxFileError),
    "no record": ({"size_bytes": "many"}, EvidenceError),
    "more fields": ({"passed": True}, EvidenceError),
}


@pytest.mark.parametrize(("lie", "error"), FALSE_RESULTS.values(), ids=FALSE_RESULTS)
def test_false_result_of_the_sandbox_is_refused(tmp_path: Path, monkeypatch, lie, error) -> None:
    path = onnx_file(tmp_path / "models" / "model.onnx")
    (tmp_path / "private").write_text("secret")
    plain = read_subject(path).to_plain() | lie
    monkeypatch.setattr(sandboxed_reading, "run_in_sandbox", lambda *_, **__: plain)
    with pytest.raises(error):
        read_subject_in_sandbox(path, TIGHT_LIMITS)
