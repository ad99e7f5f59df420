"""Read untrusted files: limit the size, hash, then parse strictly."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from gate.errors import DigestMismatch, EvidenceError, GateError, StorageError, first_line
from gate.storage.digest import Digest
from gate.storage.files import open_failure, open_plain, path_for_messages

# Anyone with write access to a registry, a store or a folder of golden vectors controls its bytes.
# So only regular files are read, without following links and up to a size limit; an expected digest
# is compared before parsing; and nesting and the number of values are limited.
RECORD_LIMIT = 1 << 25
"""Maximum size of a record, in bytes."""

ITEM_LIMIT = 1 << 19
"""Maximum number of values in one text. They take about 100 MB."""

DEPTH_LIMIT = 64
"""Maximum nesting depth of one text."""

MACHINE_ERRORS = frozenset(
    {errno.EAGAIN, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC,
     errno.EROFS, errno.ESTALE}
)  # fmt: skip
"""Error codes that are caused by this machine, not by the file."""

_REMEDY = "It was replaced or damaged: fetch it again, or promote the file again."
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - _STEPS.keys())


def read_untrusted(path: Path, *, limit: int, sha256: Digest | None = None) -> bytes:
    """Return the content of a regular file of at most `limit` bytes, with the digest `sha256`.

    Raises EvidenceError if it is missing, a link, a folder, a pipe or a device; DigestMismatch if
    it is longer or has another digest; StorageError if this machine can't read it.
    """
    label = path_for_messages(path)
    try:
        # O_NOFOLLOW refuses links; O_NONBLOCK does not wait for the other end of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise EvidenceError(f"{label} is not a regular file. {_REMEDY}")
            if status.st_size > limit:
                raise DigestMismatch(
                    f"{label} has {status.st_size} bytes, expected at most {limit}. {_REMEDY}"
                )
            # By the file's size: a forged record could state a limit that exhausts the memory.
            data = stream.read(min(limit, status.st_size) + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name.
        raise _unreadable(label, error) from error
    if sha256 is not None:
        check_digest(Digest.from_bytes(data), sha256, label=label)
    return data


def check_digest(actual: Digest, expected: Digest, *, label: str) -> None:
    """Raise DigestMismatch unless the digest of untrusted content is the expected one."""
    if actual != expected:
        raise DigestMismatch(f"{label} has digest {actual}, expected {expected}. {_REMEDY}")


def parse_strict_json(data: bytes, *, label: str) -> Any:
    """Parse JSON: UTF-8, unique keys, finite numbers, limited depth and number of values.

    Raises EvidenceError for anything else. The limits are checked before parsing.
    """
    _check_structure(data, label=label)
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_number,
        )
    except ValueError as error:
        raise EvidenceError(f"{label} is not valid JSON: {first_line(error)}. {_REMEDY}") from error


def parse_plain_yaml(data: bytes, *, label: str) -> Any:
    """Parse YAML of limited depth without aliases, which could multiply values.

    Raises EvidenceError for anything else.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

    depth = 0
    try:
        text = data.decode()
        # Check the events before building any value.
        for event in YAML(typ="safe", pure=True).parse(text):
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if isinstance(event, AliasEvent) or depth > DEPTH_LIMIT:
                raise ValueError(f"it has an alias, or is nested more than {DEPTH_LIMIT} deep")
        return YAML(typ="safe", pure=True).load(text)
    except (ValueError, YAMLError) as error:
        raise EvidenceError(f"{label} is not plain YAML: {first_line(error)}. {_REMEDY}") from error


@contextlib.contextmanager
def as_mismatch(label: str) -> Iterator[None]:
    """Turn exceptions, including MemoryError and RecursionError, into DigestMismatch about `label`.

    GateError is not changed. Raises StorageError if this machine is the cause.
    """
    try:
        yield
    except GateError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
            message = f"cannot read {label}: {error}. Retry when that is fixed."
            raise StorageError(message) from error
        raise DigestMismatch(
            f"{label} can't be read ({type(error).__name__}: {first_line(error)}), unlike the "
            f"promoted file. {_REMEDY}"
        ) from error


def _unreadable(label: str, error: OSError | ValueError) -> GateError:
    reason = open_failure(error)
    if getattr(error, "errno", None) in MACHINE_ERRORS:
        return StorageError(f"cannot read {label}: {reason}. Retry when that is fixed.")
    return EvidenceError(f"cannot read {label}: {reason}, expected a regular file. {_REMEDY}")


def _check_structure(data: bytes, *, label: str) -> None:
    """Count values and nesting outside of strings, without parsing."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings, outside = plain.count(b'"') // 2, b""
    if strings <= 2 * ITEM_LIMIT:
        outside = b"".join(plain.split(b'"')[::2])
    items = max(-(-strings // 2), sum(map(outside.count, (b",", b"[", b"{"))))
    if items > ITEM_LIMIT:
        raise EvidenceError(
            f"{label} has at least {items} values, the maximum is {ITEM_LIMIT}. {_REMEDY}"
        )
    brackets = outside.translate(None, delete=_NO_BRACKETS)
    depth = max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)
    if depth > DEPTH_LIMIT:
        raise EvidenceError(
            f"{label} is nested {depth} deep, the maximum is {DEPTH_LIMIT}. {_REMEDY}"
        )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key occurs twice")
    return mapping


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


_MAX_POINTER = 1024
"""Maximum size in bytes of a Git-LFS pointer
(https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md). DVC's pointers are shorter."""


_LFS = re.compile(rb"version https://(?:git-lfs\.github|hawser\.github)\.com/spec/\S+\n")
_LFS_SIZE = re.compile(rb"^size (\d+)$", re.MULTILINE)
_DVC = re.compile(rb"^outs:\n- ", re.MULTILINE)
_DVC_HASH = re.compile(rb"^[- ] (?:md5|etag|checksum|version_id): ", re.MULTILINE)
_DVC_PATH = re.compile(rb"^[- ] path: (.+)$", re.MULTILINE)
_DVC_SIZE = re.compile(rb"^[- ] size: (\d+)$", re.MULTILINE)
_SUFFIX = ".dvc"


def detect_pointer_file(path: Path) -> str | None:
    """Return an error with a remedy if `path` is a pointer in place of the content, or None.

    Detects pointers of Git-LFS and DVC, and missing files that DVC tracks. Without this, a parser
    would report a damaged model. Never raises: opening the file will.
    """
    try:
        if not path.exists():
            return _describe_dvc_tracked(path)
        if not path.is_file() or path.stat().st_size > _MAX_POINTER:
            return None
        with open_plain(path) as stream:
            text = stream.read(_MAX_POINTER + 1).replace(b"\r\n", b"\n")
    except (OSError, ValueError):  # ValueError: a null byte in the name.
        return None
    if _LFS.match(text):
        return (
            f"{path} is a Git-LFS pointer, expected the content{_size(_LFS_SIZE, text)}. "
            "Fetch it: git lfs install, then git lfs pull in its repository. In CI, enable LFS in "
            "the checkout step."
        )
    if _DVC.search(text) and _DVC_HASH.search(text):
        return _describe_dvc_pointer(path, text)
    return None


def _describe_dvc_tracked(path: Path) -> str | None:
    """Return how to fetch a missing file, if there is a DVC pointer for it or a parent folder."""
    target = path
    while target.name and not target.exists():
        pointer = target.with_name(target.name + _SUFFIX)
        if pointer.is_file():
            return (
                f"{path} does not exist: it is tracked by DVC ({pointer}). "
                f"Fetch it: dvc pull {pointer}"
            )
        target = target.parent
    return None


def _describe_dvc_pointer(path: Path, text: bytes) -> str:
    match = _DVC_PATH.search(text)
    content = match[1].decode(errors="replace").strip("'\" ") if match else "a file"
    fetch = f"dvc pull {path}" if path.suffix == _SUFFIX else "dvc pull in its repository"
    return (
        f"{path} is a DVC pointer to {content}, expected the content"
        f"{_size(_DVC_SIZE, text)}. Fetch it: {fetch}; then name {path.with_name(content)}."
    )


def _size(pattern: re.Pattern[bytes], text: bytes) -> str:
    match = pattern.search(text)
    return f" of {int(match[1])} bytes" if match else ""
