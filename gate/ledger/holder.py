"""Holder: which process has a lock, and whether it is known to be dead."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Self

from gate.errors import EvidenceError
from gate.storage.record import Record

_PROC = Path("/proc")
_STATE, _START = 0, 19
"""Among the fields of /proc/PID/stat that follow the program's name."""


class Holder(Record):
    """A process, so that another one of the same machine can tell it from a later one."""

    pid: int
    host: str
    since: str
    """UTC, ISO 8601."""
    machine: str | None = None
    """The kernel's boot and the numbering of processes, which containers have of their own; None:
    nobody else can tell whether it lives."""
    start: str | None = None
    """When the process was started, in the kernel's ticks."""

    @classmethod
    def this_process(cls, *, since: str) -> Self:
        """The caller's."""
        pid, found = os.getpid(), _stat(os.getpid())
        start = None if found is None else found[_START]
        return cls(pid=pid, host=socket.gethostname(), since=since, machine=_machine(), start=start)

    @classmethod
    def of(cls, text: str) -> Self:
        """Read what was kept; of what can't be read nobody knows who it is, or whether it lives."""
        try:
            return cls.from_json(text)
        except EvidenceError:
            return cls(pid=0, host="a host that does not say its name", since="nobody knows when")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def is_dead(self) -> bool:
        """Whether it certainly is; a process of another machine is not known to be."""
        if self.machine is None or self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # it is somebody else's
            pass
        found = _stat(self.pid)
        if found is None:
            return False
        return found[_STATE] in ("Z", "X") or self.start not in (None, found[_START])


def _machine() -> str | None:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return None


def _stat(pid: int) -> list[str] | None:
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
