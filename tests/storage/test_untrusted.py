"""Untrusted files are size-limited and hashed before they are parsed."""

from __future__ import annotations

import errno
import json
import os
import time
import tracemalloc
from pathlib import Path

import pytest

from gate import Decision, Digest, Evidence
from gate.errors import DigestMismatch, EvidenceError, StorageError
from gate.storage.untrusted_files import (
    DEPTH_LIMIT,
    ITEM_LIMIT,
    as_mismatch,
    parse_plain_yaml,
    parse_strict_json,
    read_untrusted,
)
from tests import builders

GOLDEN = Path(__file__).parents[1] / "golden"
YAML_BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    f"{name}: &{name} [{','.join(['*' + chr(ord(name) - 1)] * 9)}]\n".encode()
    for name in "bcdefghi"
)
DEEP = b"[" * 20_000 + b"]" * 20_000


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device", "missing", "null byte"])
def test_only_a_regular_file_is_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_bytes(b"{}")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    paths = {"folder": tmp_path, "device": Path("/dev/zero"), "null byte": tmp_path / "x\0y"}
    with pytest.raises(EvidenceError, match="regular file"):
        read_untrusted(paths.get(kind, tmp_path / kind), limit=10)


def test_oversized_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(DigestMismatch, match="at most 10"):
        read_untrusted(path, limit=10)
    path.write_bytes(b"0123456789")
    assert read_untrusted(path, limit=10) == b"0123456789"


def test_file_with_another_digest_is_not_returned(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"{}")
    assert read_untrusted(tmp_path / "file", limit=9, sha256=Digest.from_bytes(b"{}")) == b"{}"
    with pytest.raises(DigestMismatch, match=f"expected {Digest.from_bytes(b'[]')}"):
        read_untrusted(tmp_path / "file", limit=9, sha256=Digest.from_bytes(b"[]"))


def test_local_error_is_not_a_mismatch(tmp_path: Path, monkeypatch) -> None:
    def fail(*_arguments: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(StorageError, match="Too many open files"):
        read_untrusted(tmp_path / "file", limit=9)


@pytest.mark.parametrize(
    "value",
    [
        {}, [], 0, -1.5e-7, None, "text", {"a": [1, {"b": True}]}, {"\\": '"[[[', "[": "\\\\"},
        ["\\\"" * 9, "{[,"], "ä\u2028", [[[]]] * 99,
    ],
)  # fmt: skip
def test_strict_json_equals_json_loads(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=2)):
        assert parse_strict_json(text.encode(), label="x") == value


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (DEEP, "nested 20000 deep"),
        (b'{"a":' * 20_000, "nested 20000 deep"),
        (b"[" * (DEPTH_LIMIT + 1) + b"]" * (DEPTH_LIMIT + 1), "nested 65 deep"),
        (b"[" + b"[]," * ITEM_LIMIT + b"[]]", "values, the maximum is"),
        (b'["' + b'","' * (2 * ITEM_LIMIT) + b'"]', "values, the maximum is"),
        (b'"' * (8 * ITEM_LIMIT), "values, the maximum is"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'[{"a": {"b": 1, "b": 1}}]', "twice"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"[1e999]", "finite"),
        (b"[" + b"9" * 5000 + b"]", "not valid JSON"),
        (YAML_BOMB, "not valid JSON"),
        (b"a: 1", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"{} {}", "not valid JSON"),
        (b"\xff\xfe[\0]\0", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'["\n"]', "not valid JSON"),
    ],
)  # fmt: skip
def test_invalid_json_is_refused_quickly(data: bytes, says: str) -> None:
    begun = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(EvidenceError, match=says):
            parse_strict_json(data, label="it")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begun < 30
    assert most < 150e6


@pytest.mark.further
@pytest.mark.parametrize(
    "data", [YAML_BOMB, DEEP, b"- " * 300 + b"x", b"a: *b", b"a: b: c", b"\xff"]
)
def test_yaml_with_aliases_or_nesting_is_refused(data: bytes) -> None:
    begun = time.monotonic()
    with pytest.raises(EvidenceError, match="not plain YAML"):
        parse_plain_yaml(data, label="it")
    assert time.monotonic() - begun < 30


def test_plain_yaml_is_read() -> None:
    assert parse_plain_yaml(b"a:\n  b: [1, {c: d}]\n", label="it") == {"a": {"b": [1, {"c": "d"}]}}


@pytest.mark.parametrize(
    "error", [MemoryError, RecursionError, KeyError, OSError(errno.EISDIR, "x")]
)
def test_any_parse_error_is_a_mismatch(error: Exception) -> None:
    with pytest.raises(DigestMismatch, match="version 1 can't be read"), as_mismatch("version 1"):
        raise error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "x"), StorageError("x"), EvidenceError("x")])
def test_specific_errors_are_kept(error: Exception) -> None:
    kind = StorageError if isinstance(error, OSError) else type(error)
    with pytest.raises(kind), as_mismatch("version 1"):
        raise error


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("evidence-*")), ids=lambda path: path.stem)
def test_old_records_are_verified_by_their_text(path: Path) -> None:
    """A ledger contains the record's digest: the file's own JSON must have the same digest."""
    expected = Evidence.load(path).digest()
    assert (
        Evidence.from_untrusted(path.read_bytes(), label="it", sha256=expected).digest() == expected
    )
    with pytest.raises(DigestMismatch, match="expected"):
        Evidence.from_untrusted(path.read_bytes(), label="it", sha256=builders.digest("other"))


def test_old_decision_is_readable() -> None:
    path = GOLDEN / "decision-v1.json"
    assert Decision.from_untrusted(path.read_bytes(), label="it") == Decision.load(path)


@pytest.mark.parametrize("data", [b"[]", b"{}", b'{"a": "\\ud800"}', DEEP])
def test_invalid_record_is_always_the_same_error(data: bytes) -> None:
    for sha256 in (None, builders.digest("other")):
        with pytest.raises((EvidenceError, DigestMismatch)):
            Evidence.from_untrusted(data, label="it", sha256=sha256)
