"""A limit on what comes into a folder while somebody else's code fills it."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 8 << 30
"""Of a model with all that is beside it."""
_LOOK_S = 0.02


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
            with contextlib.suppress(OSError):
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
