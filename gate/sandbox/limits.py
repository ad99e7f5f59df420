"""A limit on what comes into a folder while somebody else's code fills it."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from pydantic import NonNegativeInt

from gate.storage.record import Record

MAX_BYTES = 8 << 30
"""Of a model with all that is beside it."""
_MAX_FILES = 10_000
_MORE_BYTES, _MORE_FILES = 64 << 20, 100
"""What registries and reviewers may put beside a version."""
_LOOK_S = 0.02


class Extent(Record):
    """How much a version was when it was promoted, with all that is beside it."""

    size_bytes: NonNegativeInt
    files: NonNegativeInt

    @property
    def most_bytes(self) -> int:
        """That may come of it now."""
        return self.size_bytes + _MORE_BYTES

    def check(self, size_bytes: int, files: int) -> None:
        """Raise TooLarge where there is far more now than this."""
        if size_bytes > self.most_bytes:
            raise TooLarge(f"there are {size_bytes} bytes or more, expected {self.size_bytes}")
        if files > self.files + _MORE_FILES:
            raise TooLarge(f"there are {files} files and folders or more, expected {self.files}")


MAX_EXTENT = Extent(size_bytes=MAX_BYTES, files=_MAX_FILES)
"""Of what was promoted by a version of the gate that did not write it down."""


class TooLarge(Exception):
    """More bytes came than were allowed. A refusal, not a fault of this machine."""


@contextlib.contextmanager
def limited(folder: Path, limit: int) -> Iterator[None]:
    """While this lasts, at most `limit` bytes come into `folder`.

    From the moment that too many are there, all that comes is thrown away while it is written, so
    that the disk does not fill up however long the other side goes on. Raises TooLarge at the end
    then, whatever else was raised.
    """
    watch, done = _Watch(folder, limit), threading.Event()

    def run() -> None:
        while not done.wait(_LOOK_S):
            with contextlib.suppress(OSError, RecursionError):
                watch.look()

    thread = threading.Thread(target=run, name="gate-watch-size", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        watch.look()
        if watch.exceeded:
            raise TooLarge(f"more came than the {limit} bytes that are allowed")


class _Watch:
    """Looks at a folder's size; once it is too large, keeps its files empty."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self.exceeded = False

    def look(self) -> None:
        files, total = [], 0
        for path in self._folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # renamed by the writer
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):  # a link could lead to somebody else's file
                    files.append(path)
                    total += status.st_size
        self.exceeded = self.exceeded or total > self._limit
        if self.exceeded:
            for path in files:
                with contextlib.suppress(OSError):
                    os.truncate(path, 0)
