"""Limits of time, memory and size, and their text form."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gate.errors import TooLarge

_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(s|m|h)?", re.ASCII)
_MEMORY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([kmgt]i?)?b?", re.IGNORECASE | re.ASCII)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_CGROUP = Path("/sys/fs/cgroup")

_SHARE = 0.8
"""Share of the machine's memory; the rest is left to the system and other processes."""


CHECK_S = 4 * 3600.0
"""Default of gate check: thousands of samples take one or two hours on few cores."""

FILE_S = 600.0
"""Default for reading a file and computing its golden vectors, which takes seconds."""

FILE_BYTES = 4 * 2**30


@dataclass(frozen=True)
class SandboxLimits:
    """The limits of one process and its descendants."""

    time_s: float
    """Wall-clock time."""
    memory_bytes: int
    """Private memory: pages of mapped files do not count."""

    @classmethod
    def for_command(cls, time_s: float | None, memory_bytes: int | None, *, usual_s: float) -> Self:
        """Return the limits of a command. Defaults: `usual_s`, and 80 % of the machine's memory."""
        return cls(time_s or usual_s, memory_bytes or usual_memory())

    @classmethod
    def for_service(cls, time_s: float | None = None, memory_bytes: int | None = None) -> Self:
        """Return the limits of the service. Defaults: 10 minutes, and 4 GiB or 80 % of the memory
        if that is less."""
        return cls(time_s or FILE_S, memory_bytes or min(FILE_BYTES, usual_memory()))


def usual_memory() -> int:
    """Return 80 % of the memory of the machine or of its control group, in bytes."""
    import psutil

    available = [psutil.virtual_memory().total]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup versions 2 and 1
        try:
            available.append(int((_CGROUP / name).read_text()))
        except (OSError, ValueError):  # The file does not exist, or contains 'max'.
            continue
    return int(min(available) * _SHARE)


def parse_duration(text: str) -> float:
    """Parse `90`, `90s`, `30m`, `1.5h` into seconds. Raises ValueError."""
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2] or "s"] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"{text!r} is not a valid duration. Use 90s, 30m or 1.5h")
    return seconds


def parse_size(text: str) -> int:
    """Parse `8GB` (10^9), `512MiB` (2^20), `4G`, or a number of bytes. Raises ValueError."""
    match = _MEMORY.fullmatch(text.strip())
    unit = (match[2] or "").lower() if match else ""
    size = int(float(match[1]) * (_BINARY | _BYTES)[unit]) if match else 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a valid size. Use 8GB, 512MiB or 4G")
    return size


def time_text(seconds: float) -> str:
    """Format a duration: `1.5 h`, `10 min`, `3 s`."""
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:g} h"
    return f"{seconds / 60:g} min" if seconds >= 2 * 60 else f"{seconds:.3g} s"


def memory_text(size: int) -> str:
    """Format a size: `4.3 GB`, `300 MB`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


_POLL_S = 0.02


@contextlib.contextmanager
def limit_folder_size(folder: Path, limit: int) -> Iterator[None]:
    """Limit the total size of the files in `folder` while the context is open.

    Once the limit is exceeded, all files are truncated repeatedly, so that the disk does not fill
    up while the writer continues. Then raises TooLarge at the end, whatever else was raised.
    """
    watcher, stopped = _SizeWatcher(folder, limit), threading.Event()

    def run() -> None:
        while not stopped.wait(_POLL_S):
            with contextlib.suppress(OSError, RecursionError):
                watcher.check()

    thread = threading.Thread(target=run, name="gate-watch-size", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        watcher.check()
        if watcher.exceeded:
            raise TooLarge(f"the files are larger than the limit of {limit} bytes")


class _SizeWatcher:
    """Checks the size of a folder. Once it is too large, keeps its files empty."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self.exceeded = False

    def check(self) -> None:
        files, total = [], 0
        for path in self._folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # The writer may rename files.
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):  # Never truncate the target of a link.
                    files.append(path)
                    total += status.st_size
        self.exceeded = self.exceeded or total > self._limit
        if self.exceeded:
            for path in files:
                with contextlib.suppress(OSError):
                    os.truncate(path, 0)
