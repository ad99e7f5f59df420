"""A child under watch: what it takes of time and memory, with all that it started."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil

from gate.bounded.limits import ChildLimits, memory_text, time_text
from gate.errors import LimitExceeded

_DESCENDANTS_S = 1.0
"""After which its own children are looked for anew: that means a look at all processes."""


class ChildWatch:
    """Of one running child.

    Memory is what the kernel gave out, not what was asked for: PyTorch reserves 0.8 GB to use 0.3,
    and CUDA whole terabytes, so that no bound of addresses (RLIMIT_AS, RLIMIT_DATA) would fit.
    """

    def __init__(self, pid: int, limits: ChildLimits) -> None:
        self._child = psutil.Process(pid)
        self._limits = limits
        self._began = time.monotonic()
        self._descendants: list[psutil.Process] = []
        self._looked = self._began

    def look(self, what: str) -> None:
        """Raise LimitExceeded where too much was taken."""
        now, limits = time.monotonic(), self._limits
        if now - self._looked > _DESCENDANTS_S:
            self._looked = now
            with contextlib.suppress(psutil.Error):
                self._descendants = self._child.children(recursive=True)
        if now - self._began > limits.time_s:
            raise LimitExceeded(
                f"{what} took more than the {time_text(limits.time_s)} that are allowed. Nothing "
                "was decided. If the file is trusted, allow more with --time-limit."
            )
        taken = sum(map(_memory, (self._child, *self._descendants)))
        if taken > limits.memory_bytes:
            error = LimitExceeded(too_much_memory(what, limits))
            # A note, because the message of the same fault is the same each time.
            error.add_note(f"seen: {memory_text(taken)} after {time_text(now - self._began)}")
            raise error

    def kill(self) -> None:
        """End the child and all that it started."""
        for process in (*self._tree(), *self._tree()):  # what was started meanwhile, too
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _tree(self) -> Iterator[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            self._child.suspend()  # it starts no more
            yield from self._child.children(recursive=True)
        yield from (*self._descendants, self._child)


def too_much_memory(what: str, limits: ChildLimits) -> str:
    """The message."""
    return (
        f"{what} took more than the {memory_text(limits.memory_bytes)} of memory that are allowed, "
        "or than there is. Nothing was decided. If the file is trusted, allow more with "
        "--memory-limit."
    )


def _memory(process: psutil.Process) -> int:
    try:
        taken = process.memory_info()
    except psutil.Error:  # it ended
        return 0
    return int(taken.rss - getattr(taken, "shared", 0))
