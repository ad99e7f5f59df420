"""Peak memory of a process while a file is open."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

_NEW_PEAK = "5"
"""The value that resets the peak (proc(5), `/proc/pid/clear_refs`)."""


class PeakMemory:
    """The peak host memory of one runtime in bytes, over several spans from `begin` to `end`.

    Linux records the peak of a process and resets it with `/proc/self/clear_refs`. On other
    systems, or if this is refused, memory is only read between runs. Memory that allocators cache
    is released once before the file is opened: otherwise a resnet18 seemed to use a third of its
    memory. Runtimes in one process share libraries, so the numbers are only roughly comparable.
    """

    def __init__(self) -> None:
        self.grown: int | None = None
        """Growth at the peak; a decrease counts as 0. None if not measured."""
        self.peak: int | None = None
        """The largest resident memory of the whole process."""
        self._accumulated = self._before = 0
        self._is_exact = self._is_broken = False

    def begin(self) -> None:
        """Start a span that counts for the runtime."""
        with self._unless_broken():
            if self.grown is None:
                _release_cached()
            self._is_exact = _restart_peak()
            self._before = _resident()

    def end(self) -> None:
        """End the span."""
        with self._unless_broken():
            current = _resident()
            peak = max(current, _highest() if self._is_exact else 0)
            grown = self._accumulated + max(0, peak - self._before)
            self._accumulated += max(0, current - self._before)
            self._before = current
            if not self._is_broken:
                self.grown = max(self.grown or 0, grown)
                self.peak = max(self.peak or 0, peak)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Measure a span with `begin` and `end`; a failing block is not counted."""
        self.begin()
        yield
        self.end()

    @contextlib.contextmanager
    def _unless_broken(self) -> Iterator[None]:
        """Discard the measurement after an error, because a partial number would be too small."""
        try:
            yield
        except Exception:
            self._is_broken = True
            self.grown = self.peak = None


def _resident() -> int:
    """Return the resident size, from `/proc/self` because a PID may differ in a container."""
    if sys.platform == "linux":
        return _status("VmRSS:")
    return int(psutil.Process().memory_info().rss)


def _highest() -> int:
    return _status("VmHWM:")


def _status(name: str) -> int:
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _restart_peak() -> bool:
    """Reset the peak; return whether this is supported."""
    try:
        _CLEAR.write_text(_NEW_PEAK)
        return _highest() > 0
    except (OSError, StopIteration):
        return False


def _release_cached() -> None:
    """Return free memory to the system. Only glibc has this call."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
