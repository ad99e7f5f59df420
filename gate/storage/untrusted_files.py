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
from gate.storage.files import open_plain

# Whoever may write to a registry, a store or a folder of golden vectors chooses every byte there.
# So at most so many are read, of a plain file and not through a link; where a digest is pinned it
# is compared first; and no text is parsed that is nested deeply or holds too many values.
RECORD_LIMIT = 1 << 25
"""Bytes of a record at most."""

ITEM_LIMIT = 1 << 19
"""Values of one text at most: as many take some 100 MB."""

DEPTH_LIMIT = 64
"""How deeply the values of one text are nested at most."""

OURS = frozenset(
    {errno.EAGAIN, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC,
     errno.EROFS, errno.ESTALE}
)  # fmt: skip
"""What goes wrong with this machine, and says nothing about the file."""

_REMEDY = "It was exchanged or damaged: fetch it again, or promote the file anew."
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - _STEPS.keys())


def read_untrusted(path: Path, *, limit: int, sha256: Digest | None = None) -> bytes:
    """The bytes of a plain file, at most `limit`; with `sha256` only those that have this digest.

    Raises EvidenceError where it is missing, a link, a folder, a pipe or a device; DigestMismatch
    where it is longer or has another digest; StorageError where this machine can't read it.
    """
    try:
        # Neither a link's target nor the other end of a pipe is waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise EvidenceError(f"{path} is no plain file. {_REMEDY}")
            if status.st_size > limit:
                raise DigestMismatch(
                    f"{path} has {status.st_size} bytes, at most {limit} are expected. {_REMEDY}"
                )
            # As much as there is, not what a record says: a forged one could ask for all memory.
            data = stream.read(min(limit, status.st_size) + 1)
    except (OSError, ValueError) as error:  # a zero byte in the name
        raise _unreadable(path, error) from error
    if sha256 is not None:
        check_digest(Digest.of_bytes(data), sha256, what=str(path))
    return data


def check_digest(actual: Digest, expected: Digest, *, what: str) -> None:
    """Raise DigestMismatch unless the digest of what a stranger wrote is the pinned one."""
    if actual != expected:
        raise DigestMismatch(f"{what} has digest {actual}, expected {expected}. {_REMEDY}")


def parse_strict_json(data: bytes, *, what: str) -> Any:
    """The value of a JSON text: UTF-8, every key once, finite numbers, few and flat enough.

    Raises EvidenceError on anything else, before a parser has seen what is too much for it.
    """
    _check_structure(data, what=what)
    try:
        return json.loads(
            data.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite
        )
    except ValueError as error:
        raise EvidenceError(f"{what} is no strict JSON: {first_line(error)}. {_REMEDY}") from error


def parse_plain_yaml(data: bytes, *, what: str) -> Any:
    """The value of a YAML text as few and flat as strict JSON, without aliases, which multiply.

    Raises EvidenceError on anything else.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

    depth = 0
    try:
        text = data.decode()
        # Event by event: whatever is too much ends the scan before it is built.
        for event in YAML(typ="safe", pure=True).parse(text):
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if isinstance(event, AliasEvent) or depth > DEPTH_LIMIT:
                raise ValueError(f"an alias, or nested more than {DEPTH_LIMIT} deep")
        return YAML(typ="safe", pure=True).load(text)
    except (ValueError, YAMLError) as error:
        raise EvidenceError(f"{what} is no plain YAML: {first_line(error)}. {_REMEDY}") from error


@contextlib.contextmanager
def as_mismatch(what: str) -> Iterator[None]:
    """Raise DigestMismatch for whatever fails inside, except this machine's own troubles.

    Errors of the gate pass; raises DigestMismatch about `what` for all else, MemoryError and
    RecursionError included, StorageError if this machine cannot read.
    """
    try:
        yield
    except GateError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OURS:
            raise StorageError(
                f"cannot read {what}: {error}. Repeat when that is mended."
            ) from error
        raise DigestMismatch(
            f"{what} can't be read ({type(error).__name__}: {first_line(error)}), which its "
            f"promoted bytes can. {_REMEDY}"
        ) from error


def _unreadable(path: Path, error: OSError | ValueError) -> GateError:
    code = getattr(error, "errno", None)
    why = "it is a link" if code == errno.ELOOP else getattr(error, "strerror", None) or str(error)
    if code in OURS:
        return StorageError(f"cannot read {path}: {why}. Repeat when that is mended.")
    return EvidenceError(f"cannot read {path}: {why}, expected a plain file. {_REMEDY}")


def _check_structure(data: bytes, *, what: str) -> None:
    """Count what stands outside of strings, without building any of it."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings, outside = plain.count(b'"') // 2, b""
    if strings <= 2 * ITEM_LIMIT:
        outside = b"".join(plain.split(b'"')[::2])
    items = max(-(-strings // 2), sum(map(outside.count, (b",", b"[", b"{"))))
    if items > ITEM_LIMIT:
        raise EvidenceError(f"{what} has {items} values or more, at most {ITEM_LIMIT}. {_REMEDY}")
    brackets = outside.translate(None, delete=_NO_BRACKETS)
    depth = max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)
    if depth > DEPTH_LIMIT:
        raise EvidenceError(f"{what} is nested {depth} deep, at most {DEPTH_LIMIT}. {_REMEDY}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands there twice")
    return made


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


# Whoever parses such a pointer calls it a damaged model; it is whole, and one command fetches the
# content.
_LONGEST = 1024
"""Bytes of a Git-LFS pointer at most, by its specification
(https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md); those of DVC are shorter still."""


_LFS = re.compile(rb"version https://(?:git-lfs\.github|hawser\.github)\.com/spec/\S+\n")
_LFS_SIZE = re.compile(rb"^size (\d+)$", re.MULTILINE)
_DVC = re.compile(rb"^outs:\n- ", re.MULTILINE)
_DVC_HASH = re.compile(rb"^[- ] (?:md5|etag|checksum|version_id): ", re.MULTILINE)
_DVC_PATH = re.compile(rb"^[- ] path: (.+)$", re.MULTILINE)
_DVC_SIZE = re.compile(rb"^[- ] size: (\d+)$", re.MULTILINE)
_SUFFIX = ".dvc"


def detect_pointer_file(path: Path) -> str | None:
    """That `path` has a pointer in place of its content, and how to fetch that; None: it has not.

    A Git-LFS pointer, a pointer of DVC, or nothing where DVC keeps the file or a folder that it is
    in. Never raises: what can't be read is for whoever opens it.
    """
    try:
        if not path.exists():
            return _kept_by_dvc(path)
        if not path.is_file() or path.stat().st_size > _LONGEST:
            return None
        with open_plain(path) as stream:
            text = stream.read(_LONGEST + 1).replace(b"\r\n", b"\n")
    except (OSError, ValueError):  # a zero byte in the name
        return None
    if _LFS.match(text):
        return (
            f"{path} is a pointer of Git-LFS, expected the content{_size(_LFS_SIZE, text)}. "
            "Fetch it: git lfs install, then git lfs pull in its repository; where CI checks it "
            "out, switch LFS on there."
        )
    if _DVC.search(text) and _DVC_HASH.search(text):
        return _of_dvc(path, text)
    return None


def _kept_by_dvc(path: Path) -> str | None:
    """Return how to fetch a missing file, if a pointer of DVC lies beside it or its missing
    folder."""
    place = path
    while place.name and not place.exists():
        pointer = place.with_name(place.name + _SUFFIX)
        if pointer.is_file():
            return (
                f"{path} is not here: DVC keeps it ({pointer}), expected the content. "
                f"Fetch it: dvc pull {pointer}"
            )
        place = place.parent
    return None


def _of_dvc(path: Path, text: bytes) -> str:
    named = _DVC_PATH.search(text)
    content = named[1].decode(errors="replace").strip("'\" ") if named else "a file"
    fetch = f"dvc pull {path}" if path.suffix == _SUFFIX else "dvc pull where it was made"
    return (
        f"{path} is a pointer of DVC to {content}, expected the content"
        f"{_size(_DVC_SIZE, text)}. Fetch it: {fetch}; then name {path.with_name(content)}."
    )


def _size(pattern: re.Pattern[bytes], text: bytes) -> str:
    found = pattern.search(text)
    return f" of {int(found[1])} bytes" if found else ""
