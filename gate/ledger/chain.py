"""A chain of lines that grows: proven once, then only what came since is read.

Each line holds the SHA-256 of the line before it. The last line that was read is read again each
time: one that is another by now, or gone, has all lines read anew. So that an edit before it is
found too, all lines are hashed again from time to time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from gate.errors import EvidenceError
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


class Row(NamedTuple):
    """A line as it is kept."""

    number: int
    line: bytes
    signature: str | None = None


Rows = Callable[[int], Sequence[Row]]
"""Gives the rows from a number on, in their order."""


class Chain(Generic[Link_co]):
    """The lines that were read. Knows their digests and the last row, and nothing else of them."""

    def __init__(self, place: str, parse: Callable[[bytes, int], Link_co]) -> None:
        self.place = place
        """What messages call it."""
        self._parse = parse
        self.last: Row | None = None
        """As it is kept now."""
        self._digests = bytearray()
        self._hashed_at = -_REHASH_S

    @property
    def lines(self) -> int:
        """How many were read."""
        return len(self._digests) // _WIDTH

    def digest(self, number: int) -> Digest | None:
        """Of a line that was read; None where there is no such line."""
        if not 1 <= number <= self.lines:
            return None
        return Digest(bytes(self._digests[(number - 1) * _WIDTH : number * _WIDTH]).hex())

    def read(self, rows: Rows) -> tuple[bool, list[Link_co]]:
        """What the lines say that came since the last time. True: those are all lines, because
        they are others than they were, or are read for the first time.

        Raises EvidenceError where a line can't be parsed or the chain is broken; and what `rows`
        raises.
        """
        if self.lines and time.monotonic() - self._hashed_at <= _REHASH_S:
            found = rows(self.lines)
            if found and self._is_last(found[0]):
                self.last = found[0]
                return False, self._take(found[1:])
        everything = rows(1)
        if not self._holds(everything):
            self._forget()
        anew = self.lines == 0
        links = self._take(everything[self.lines :])
        self._hashed_at = time.monotonic()
        return anew, links

    def _forget(self) -> None:
        self.last, self._digests = None, bytearray()

    def _is_last(self, row: Row) -> bool:
        return row.number == self.lines and Digest.of_bytes(row.line) == self.digest(self.lines)

    def _holds(self, rows: Sequence[Row]) -> bool:
        """Whether these rows begin with the lines that were read."""
        if not 0 < self.lines <= len(rows):
            return False
        first = rows[: self.lines]
        self.last = first[-1]
        return b"".join(hashlib.sha256(row.line).digest() for row in first) == self._digests

    def _take(self, rows: Sequence[Row]) -> list[Link_co]:
        links, digests, first = [], bytearray(), self.lines + 1
        head = self.digest(self.lines)
        parent = None if head is None else head.hex
        for number, row in enumerate(rows, start=first):
            if row.number != number:
                raise EvidenceError(self._missing(number, row.number))
            link = self._parse(row.line, number)
            if (link.parent.hex if link.parent else None) != parent:
                before = None if parent is None else Digest(parent)
                raise EvidenceError(self._broken(number, link.parent, before))
            made = hashlib.sha256(row.line)
            links.append(link)
            digests += made.digest()
            parent = made.hexdigest()
        self._digests += digests
        self.last = rows[-1] if rows else self.last
        return links

    def _missing(self, number: int, there: int) -> str:
        return (
            f"{self.place}:{number}: the chain is broken: the line that follows line {number - 1} "
            f"has number {there}. Lines were removed or put in. {_RESTORE}"
        )

    def _broken(self, number: int, parent: Digest | None, before: Digest | None) -> str:
        return (
            f"{self.place}:{number}: the chain is broken: this line follows a line with "
            f"digest {parent}, the line before it has {before}. Line {number} or "
            f"line {number - 1} was changed, or lines were removed or put in. {_RESTORE}"
        )


_RESTORE = "Restore it from a copy; or keep it as it is and start anew in another place."
