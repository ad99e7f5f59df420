"""What an error of sqlite means: a database that is only locked is as whole as ever."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Literal

_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_MALFORMED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_LOCKED_WORDS = ("database is locked", "database table is locked", "database schema is locked")
_MALFORMED_WORDS = ("disk image is malformed", "file is not a database")

WAIT = (
    "Another process holds it and nothing is damaged: leave the file and those beside it "
    "(-wal, -shm, -journal) where they are, and repeat when that process is done, or end it "
    "(fuser -v names it)."
)
"""What to do about a database that is locked."""


def trouble(error: BaseException) -> Literal["locked", "malformed"] | None:
    """Whether the error, or what caused it, is of a locked or of a malformed database.

    By sqlite's own code; by its words where a server passes them on.
    """
    for cause in _causes(error):
        code = getattr(cause, "sqlite_errorcode", None)
        if isinstance(code, int):
            kind = code & 0xFF  # the rest tells more precisely how
            return "locked" if kind in _LOCKED else "malformed" if kind in _MALFORMED else None
    words = str(error).lower()
    if any(phrase in words for phrase in _LOCKED_WORDS):
        return "locked"
    return "malformed" if any(phrase in words for phrase in _MALFORMED_WORDS) else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
