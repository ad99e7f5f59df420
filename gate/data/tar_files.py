"""Where the samples of a tar lie in it: its headers are walked once, nothing is taken out.

As WebDataset has it: the members of a sample lie together and have one name up to the first dot.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError, first_line
from gate.parity.sources.files import SourceFile

PICTURES = frozenset({"png", "jpg", "jpeg", "bmp", "webp", "tif", "tiff", "gif"})
ARRAY, LABEL = "npy", "cls"
MEMBER_BYTES = 1 << 30
"""Of one member at most."""
_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class Member:
    """What a member's name says: `0001.left.npy` is the array `left` of sample `0001`."""

    key: str
    field: str
    """All after the first dot, in small letters."""

    @property
    def name(self) -> str:
        """Of the field, without what it is written in; empty where it has none."""
        return self.field.rpartition(".")[0]

    @property
    def kind(self) -> str:
        """What it is written in."""
        return self.field.rpartition(".")[2]

    @property
    def matters(self) -> bool:
        """Whether it is an array, a picture or a label; texts and pickles are passed over."""
        return self.kind in {ARRAY, LABEL} | PICTURES


class TarIndex:
    """Where the fields of each sample of one tar begin, and how long they are."""

    def __init__(self, file: SourceFile, fields: tuple[str, ...] | None = None) -> None:
        """`fields`: those of the first sample of the set; None: this is its tar. Raises
        DataError."""
        self._file = file
        spans: list[NDArray[np.int64]] = []
        for key, found in _samples(file):
            fields = fields or tuple(found)
            if found.keys() != set(fields):
                raise DataError(
                    f"sample {key} of {file.name} has {sorted(found)}, the first one has "
                    f"{sorted(fields)}. Give each sample the same fields."
                )
            spans.append(np.array([found[field] for field in fields], np.int64))
        if not spans or not fields:
            raise DataError(
                f"{file.name} holds neither arrays (.npy) nor pictures: nothing to measure. "
                "Expected members such as 0001.npy, 0001.jpg and 0001.cls, as WebDataset has them."
            )
        self.fields = fields
        self.spans = np.stack(spans)
        """Offset and length in bytes, shape (samples, fields, 2)."""

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.spans)


def _samples(file: SourceFile) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Key, and the fields that matter with offset and length, sample by sample."""
    key, found = "", dict[str, tuple[int, int]]()
    done: set[str] = set()
    for member, span in _members(file):
        if member.key != key:
            if found:
                yield key, found
            done.add(key)
            key, found = member.key, {}
            if key in done:
                raise DataError(
                    f"{file.name} has members of sample {key} in two places. Keep the members of a "
                    "sample together, and give each sample its own name."
                )
        if member.field in found:
            raise DataError(f"{file.name} has {key}.{member.field} twice. Keep one of the two.")
        found[member.field] = span
    if found:
        yield key, found


def _members(file: SourceFile) -> Iterator[tuple[Member, tuple[int, int]]]:
    with file.open() as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                end = 0
                for info in archive:
                    archive.members = []  # type: ignore[attr-defined]  # or it keeps all
                    end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                    member = _member(info, file)
                    if member is not None:
                        yield member, (info.offset_data, info.size)
                _check_end(stream, end, file)
        except tarfile.TarError as error:
            raise DataError(
                f"cannot read {file.name} as .tar: {first_line(error)}. Expected a whole tar that "
                "is not compressed; unpack a .tar.gz with gunzip."
            ) from error


def _member(info: tarfile.TarInfo, file: SourceFile) -> Member | None:
    """None: it does not matter."""
    if info.isdir():
        return None
    folders, base = info.name.split("/")[:-1], info.name.split("/")[-1]
    if info.name.startswith("/") or ".." in folders:
        raise _strange(info, file, "leads out of its folder")
    if not info.isreg() or info.issparse():
        raise _strange(info, file, "is a link, a device, or has holes")
    if info.size > MEMBER_BYTES:
        raise _strange(info, file, f"has {info.size} bytes, more than {MEMBER_BYTES}")
    stem, dot, field = base.partition(".")
    member = Member("/".join([*folders, stem]).removeprefix("./"), field.lower())
    return member if stem and dot and member.matters else None


def _check_end(stream: IO[bytes], end: int, file: SourceFile) -> None:
    """What was cut off between two members looks like a shorter tar, but for its last block."""
    stream.seek(end)
    if stream.read(_BLOCK) != bytes(_BLOCK):
        raise DataError(
            f"{file.name} has no end: it was cut off after its last member. Copy it again."
        )


def _strange(info: tarfile.TarInfo, file: SourceFile, how: str) -> DataError:
    return DataError(
        f"member {info.name!r} of {file.name} {how}. Expected plain files of samples only; write "
        "the tar anew."
    )
