"""By how much the process grows while a runtime opens the file and runs it for the first time.

The runtimes share a process, and allocators keep what they were given: a figure to compare
runtimes and releases by, roughly; nothing is decided by it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


class Footprint:
    """Adds up growth of the resident memory of this process; what shrinks counts as nothing."""

    def __init__(self) -> None:
        self._grown: int | None = None

    @property
    def bytes(self) -> int | None:
        """Of the host; None: nothing was watched."""
        return self._grown

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count what the process grows by meanwhile, unless it fails."""
        process = psutil.Process()
        before = process.memory_info().rss
        yield
        self._grown = (self._grown or 0) + max(0, process.memory_info().rss - before)
