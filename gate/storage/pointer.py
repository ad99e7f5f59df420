"""Files whose content is kept elsewhere: what Git-LFS and DVC leave in its place in a clone.

Whoever parses such a pointer calls it a damaged model; it is whole, and one command fetches the
content.
"""

from __future__ import annotations

import re
from pathlib import Path

from gate.storage.files import open_plain

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


def missing_content(path: Path) -> str | None:
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
    """By the pointer beside a file that is not there, or beside the first folder that is not."""
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
