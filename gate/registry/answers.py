"""Answers of a store that are no file of a version: an error page, nothing, the start of a file.

A proxy or a server in trouble gives them with status 200. Whoever overwrites a file can make it
look so, too; all that he wins is that his bytes are called unproven, which serves nobody.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from gate.errors import DigestMismatch, EvidenceError
from gate.golden.folder import GOLDEN_JSON, read_record
from gate.onnx_file.release_file import is_release_file
from gate.preprocess.spec import spec_beside
from gate.records.layout import (
    DECISION,
    DECISION_STATEMENT,
    EVIDENCE,
    EVIDENCE_STATEMENT,
    GOLDEN,
    QUANTIZED,
    RECORDS,
)
from gate.registry.doubts import digest_of_folder
from gate.registry.version_files import Download, ExpectedDigests, Stated, external_data_of
from gate.storage.digest import Digest
from gate.storage.untrusted_files import parse_strict_json, read_untrusted

_TOO_LARGE = Digest.of_bytes(b"more than is allowed")
"""For a download that was cut off here, wherever that was."""

_HEAD = 1024
"""Bytes that are looked at to tell a text."""

_MOST = 4096
"""Files that are looked at, and fields of a protobuf: whatever has more is no page."""

_PAGE = 1 << 16
"""Bytes of a page in JSON that tells of an error, at most."""

_FIELDS = frozenset({*range(1, 9), 14, 20, 25, 26})
"""Numbers of the outermost fields of an ONNX file."""

_SIZES = {1: 8, 5: 4}
"""Bytes of a protobuf's field, by its wire type."""

_OF_MLFLOW = ("conda.yaml", "python_env.yaml")
"""What it writes beside a model: no release files."""

_VARINT, _LENGTH = 0, 2

_MORE, _LOW = 0x80, 0x7F


def answer_of(download: Download) -> str | None:
    """Return which file of a download is an answer of the store, and why; or None. Raises
    StorageError."""
    if download.is_too_large:
        return None
    expected = None if isinstance(download.expected, Stated) else download.expected
    return answer_in(download.folder, expected)


def received_digest(download: Download) -> Digest | None:
    """Return the digest of all files that came; None for an answer of the store. Raises
    StorageError."""
    if download.is_too_large:
        return _TOO_LARGE
    return None if answer_of(download) else digest_of_folder(download.folder)


def answer_in(folder: Path, expected: ExpectedDigests | None) -> str | None:
    """Which file of a download is an answer of the store instead, and why; or None. `expected`:
    None where nobody vouches for what it should be.

    Raises StorageError where this machine can't read.
    """
    for model in islice(folder.rglob("MLmodel"), _MOST):
        problem = _no_text_of_ours(model)
        if problem is not None:
            return f"MLmodel {problem}"
    found = islice((p for kind in ("*.onnx", "*.y*ml") for p in folder.rglob(kind)), _MOST)
    for path in (p for p in found if p.name not in _OF_MLFLOW):
        files = expected
        if path.parent.name == QUANTIZED and expected is not None and expected.twin is not None:
            files = ExpectedDigests(
                sha256=expected.twin.sha256, evidence=expected.twin.evidence_sha256
            )
        for name, problem in _around(path, files):
            return f"{name} {problem}"
    return None


def _around(path: Path, expected: ExpectedDigests | None) -> Iterator[tuple[str, str]]:
    """Answers in the place of an ONNX file, and of what lies beside it."""
    golden = path.parent / GOLDEN
    evidence = None if expected is None else expected.evidence
    data = [path.parent / name for name in external_data_of(path, evidence)]
    arrays = [file for file in islice(golden.rglob("*"), _MOST) if file.name != GOLDEN_JSON]
    sizes = _sizes_of_arrays(golden)
    records = [path.parent / RECORDS / name for name in (EVIDENCE, DECISION)]
    statements = [path.parent / RECORDS / name for name in (EVIDENCE_STATEMENT, DECISION_STATEMENT)]
    kinds = (
        (_no_list if is_release_file(path) else _no_model, [path]),
        (_no_data, data),
        (lambda file: _no_array(file, sizes.get(file)), arrays),
        (_no_record, [*records, golden / GOLDEN_JSON, spec_beside(path)]),
        (_no_envelope, statements),
    )
    for problem_of, files in kinds:
        for file in files:
            problem = problem_of(file)
            if problem is not None:
                yield file.name, problem


def _no_text_of_ours(path: Path) -> str | None:
    head = _head(path)
    if head is None:
        return None
    if not head:
        return "is empty"
    return "is a page" if _is_page(head) else None


def _no_list(path: Path) -> str | None:
    """The file of a release is YAML, which may begin as JSON does."""
    head = _head(path)
    if head is None:
        return None
    if not head:
        return "is empty"
    return "is a page" if head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"<" else None


def _no_model(path: Path) -> str | None:
    head = _head(path)
    if head and _is_page(head):
        return "is a page"
    return _no_data(path) or ("is cut off" if head and _is_cut_off(path) else None)


def _no_data(path: Path) -> str | None:
    """Weights may begin with any byte."""
    head = _head(path)
    if head is None:
        return None
    if not head:
        return "is empty"
    return "is a text" if _is_text(head) else None


def _sizes_of_arrays(golden: Path) -> dict[Path, int]:
    """Of the files beside golden.json in bytes, as that says; nothing where it is not whole."""
    try:
        record, _ = read_record(golden)
    except (DigestMismatch, EvidenceError):
        return {}
    return {golden / name: size for name, size in record.sizes.items()}


def _no_array(path: Path, size: int | None) -> str | None:
    """Samples may be a text, but not one of another size. `size`: in bytes; None: not known."""
    head = _head(path)
    if head is None:
        return None
    if _is_page(head) and _is_text(head):
        return "is a page"
    actual = path.stat().st_size
    if actual == size:
        return None
    if not head:
        return "is empty"
    if size is not None and _is_text(head):
        return "is a text"
    return "is cut off" if size is not None and actual < size else None


def _no_record(path: Path) -> str | None:
    """A record is JSON, too, and says which version of its schema it is of. What is no JSON at all
    may be a record that somebody edited."""
    return _no_json(path, key="schema_version")


def _no_envelope(path: Path) -> str | None:
    """A statement is JSON, too, and names the type of its payload."""
    return _no_json(path, key="payloadType")


def _no_json(path: Path, *, key: str) -> str | None:
    head = _head(path)
    if head is None:
        return None
    if not head:
        return "is empty"
    if head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"<":
        return "is a page"
    try:
        value = parse_strict_json(read_untrusted(path, limit=_PAGE), what=path.name)
    except (DigestMismatch, EvidenceError):
        return None
    other = isinstance(value, dict) and value and key not in value
    return "tells of something else" if other else None


def _head(path: Path) -> bytes | None:
    """The first bytes of a plain file; None where there is none."""
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as stream:
        return stream.read(_HEAD)


def _is_page(head: bytes) -> bool:
    """HTML, XML or JSON, in whatever encoding; no protobuf begins so."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"<", b"{")


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the last letter may be cut
    except UnicodeDecodeError:
        return False
    return all(char.isprintable() or char.isspace() for char in text)


def _is_cut_off(path: Path) -> bool:
    """Whether a protobuf ends within one of its outermost fields. Nothing inside them is read."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        for _ in range(_MOST):
            if stream.tell() == size:
                return False
            tag = _varint(stream)
            if tag is None or tag >> 3 not in _FIELDS:
                return tag is None
            kind = tag & 7
            if kind == _VARINT:
                if _varint(stream) is None:
                    return True
                continue
            length = _varint(stream) if kind == _LENGTH else _SIZES.get(kind, -1)
            if length is None or stream.tell() + length > size:
                return True
            if length < 0:
                return False
            stream.seek(length, 1)
    return False


def _varint(stream: BinaryIO) -> int | None:
    """The number that comes next; None where the file ends within it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)
        if not byte:
            return None
        value |= (byte[0] & _LOW) << shift
        if not byte[0] & _MORE:
            break
    return value
