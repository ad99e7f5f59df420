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
"""The value that restarts the peak (proc(5), `/proc/pid/clear_refs`)."""


class PeakMemory:
    """The peak memory of one runtime from `begin` to `end`, over several such spans, in bytes of
    the host.

    Linux keeps the peak since the process began, and restarts it by `/proc/self/clear_refs`.
    Elsewhere, and where that is refused, memory is read between the runs only. What allocators hold
    for later use is given back once, before the file is opened: without that, a resnet18 seemed to
    take a third of its memory. Runtimes in one process share libraries, so that the figure compares
    runtimes and releases roughly.
    """

    def __init__(self) -> None:
        self.grown: int | None = None
        """By how much it grew at its peak; what shrinks counts as nothing. None: it was not
        measured, or could not be once."""
        self.peak: int | None = None
        """The largest resident memory, everything else in the process included."""
        self._kept = self._before = 0
        self._is_exact = self._is_broken = False

    def begin(self) -> None:
        """Attribute memory to the runtime from here on."""
        with self._unless_broken():
            if self.grown is None:
                _give_back()
            self._is_exact = _restart_peak()
            self._before = _resident()

    def end(self) -> None:
        """Up to here it was."""
        with self._unless_broken():
            now = _resident()
            peak = max(now, _highest() if self._is_exact else 0)
            grown = self._kept + max(0, peak - self._before)
            self._kept, self._before = self._kept + max(0, now - self._before), now
            if not self._is_broken:
                self.grown = max(self.grown or 0, grown)
                self.peak = max(self.peak or 0, peak)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """`begin` and `end`; what fails is not counted."""
        self.begin()
        yield
        self.end()

    @contextlib.contextmanager
    def _unless_broken(self) -> Iterator[None]:
        """A part of the figure would be too little, so that what breaks once leaves none. It is no
        fault of the runtime's."""
        try:
            yield
        except Exception:
            self._is_broken = True
            self.grown = self.peak = None


def _resident() -> int:
    """Return the resident size by `/proc/self`, which is this process even if its number belongs to
    another process in `/proc`, which psutil would read."""
    if sys.platform == "linux":
        return _status("VmRSS:")
    return int(psutil.Process().memory_info().rss)


def _highest() -> int:
    return _status("VmHWM:")


def _status(name: str) -> int:
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _restart_peak() -> bool:
    """Whether the peak is counted from now on."""
    try:
        _CLEAR.write_text(_NEW_PEAK)
        return _highest() > 0
    except (OSError, StopIteration):
        return False


def _give_back() -> None:
    """Return free memory to the system. Only glibc has this call."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
