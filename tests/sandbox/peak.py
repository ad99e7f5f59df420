"""The memory of the parent process, and its remaining children."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import psutil


@contextlib.contextmanager
def bounded_growth(most: int) -> Iterator[None]:
    """Assert that this process grows by less than `most` bytes, and leaves no child process."""
    me, result = psutil.Process(), threading.Event()
    before, children = me.memory_info().rss, set(me.children(recursive=True))
    peaks = [before]

    def look() -> None:
        while not result.wait(0.02):
            peaks.append(me.memory_info().rss)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        result.set()
        thread.join()
    assert max(peaks) - before < most
    assert set(me.children(recursive=True)) <= children
