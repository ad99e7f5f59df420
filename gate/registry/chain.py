"""A chain of lines in a file that grows: proven once, then only what came since is read.

Each line holds the SHA-256 of the line before it. A file of which nothing is said to have changed
is not read; one that grew is read from where it ended; any other is read whole. So that an edit is
found that kept size and time, the bytes are hashed again from time to time.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, Protocol, TypeVar

from gate.errors import EvidenceError, StorageError
from gate.storage.digest import Digest

_REHASH_S = 600.0
"""After which the lines that were read are hashed again."""
_WIDTH = 32


class Linked(Protocol):
    """What a line says."""

    @property
    def parent(self) -> Digest | None:
        """Digest of the line before; None in the first line."""
        ...


Link_co = TypeVar("Link_co", bound=Linked, covariant=True)


class _Status(NamedTuple):
    """What the file system says of a file; equal: nobody wrote to it."""

    device: int
    inode: int
    size: int
    written_ns: int
    changed_ns: int


class Chain(Generic[Link_co]):
    """The whole lines of a file. Knows their digests, and keeps nothing else of them."""

    def __init__(self, path: Path, parse: Callable[[bytes, int], Link_co]) -> None:
        self.path = path
        self._parse = parse
        self.tail = b""
        """What stood behind the last newline when it was read last."""
        self._status: _Status | None = None
        self._hashed_at = -_REHASH_S
        self._size = 0
        self._hash = hashlib.sha256()
        self._digests = bytearray()

    @property
    def lines(self) -> int:
        """How many were read."""
        return len(self._digests) // _WIDTH

    @property
    def size(self) -> int:
        """Bytes of the lines that were read, newlines included."""
        return self._size

    def digest(self, number: int) -> Digest | None:
        """Of a line that was read, without its newline; None where there is no such line."""
        if not 1 <= number <= self.lines:
            return None
        return Digest(bytes(self._digests[(number - 1) * _WIDTH : number * _WIDTH]).hex())

    def read(self) -> tuple[bool, list[Link_co]]:
        """What the lines say that came since the last time. True: those are all lines, because the
        file is another than it was, or is read for the first time.

        Raises EvidenceError where a line can't be parsed or the chain is broken, StorageError.
        """
        try:
            with self.path.open("rb") as stream:
                status = _status(stream.fileno())
                due = time.monotonic() - self._hashed_at > _REHASH_S
                if status == self._status and not due:
                    return False, []
                links = None if due else self._added(stream, status)
                anew = False
                if links is None:
                    stream.seek(0)
                    data = self._proven(stream.read())
                    anew, links = self.lines == 0, self._take(data)
                    self._hashed_at = time.monotonic()
        except FileNotFoundError:
            self._forget()
            return True, []
        except OSError as error:
            raise StorageError(
                f"cannot read the ledger {self.path}: {error.strerror}. Fix its permissions."
            ) from error
        self._status = status
        return anew, links

    def _added(self, stream: BinaryIO, status: _Status) -> list[Link_co] | None:
        """The lines that were added; None where the file did more than to grow by whole lines: a
        copy in its place may have the same number."""
        if not _grew(self._status, status):
            return None
        stream.seek(self._size)
        try:
            return self._take(stream.read())
        except EvidenceError:
            return None

    def _forget(self) -> None:
        self.tail, self._status, self._size = b"", None, 0
        self._hash, self._digests = hashlib.sha256(), bytearray()

    def _proven(self, data: bytes) -> bytes:
        """What follows the lines that were read, if they are what they were; else everything."""
        before = memoryview(data)[: self._size]
        if len(data) >= self._size and hashlib.sha256(before).digest() == self._hash.digest():
            return data[self._size :]
        self._forget()
        return data

    def _take(self, data: bytes) -> list[Link_co]:
        *lines, tail = data.split(b"\n")
        links, digests, first = [], bytearray(), self.lines + 1
        head = self.digest(self.lines)
        parent = None if head is None else head.hex
        for number, line in enumerate(lines, start=first):
            link = self._parse(line, number)
            if (link.parent.hex if link.parent else None) != parent:
                before = None if parent is None else Digest(parent)
                raise EvidenceError(self._broken(number, link.parent, before))
            made = hashlib.sha256(line)
            links.append(link)
            digests += made.digest()
            parent = made.hexdigest()
        whole = memoryview(data)[: len(data) - len(tail)]
        self._hash.update(whole)
        self._size += len(whole)
        self._digests += digests
        self.tail = tail
        return links

    def _broken(self, number: int, parent: Digest | None, before: Digest | None) -> str:
        return (
            f"{self.path}:{number}: the chain is broken: this line follows a line with "
            f"digest {parent}, the line before it has {before}. Line {number} or "
            f"line {number - 1} was changed, or lines were removed or put in. Restore the "
            "file from a copy; or keep it as it is under another name and start anew."
        )


def _grew(before: _Status | None, now: _Status) -> bool:
    if before is None or (before.device, before.inode) != (now.device, now.inode):
        return False
    return now.size > before.size


def _status(descriptor: int) -> _Status:
    # Of the open file: a network file system asks its server when a file is opened.
    found = os.fstat(descriptor)
    return _Status(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
