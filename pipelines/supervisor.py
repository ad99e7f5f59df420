"""`python -m pipelines.supervisor COMMAND …` ends the command together with its starter.

stdin is a pipe that only the starter holds open. It closes when the starter closes it, or dies,
even by SIGKILL. Then, and when the command ends by itself, all processes of the command are ended
with SIGTERM, later SIGKILL. The exit code is the command's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

STOP_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""


def main(command: list[str]) -> int:
    """Run the command until it ends, or until the pipe is closed."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    for wait in (process.wait, lambda: os.read(0, 1)):
        threading.Thread(target=_stop_after, args=(wait, stop), daemon=True).start()
    stop.wait()
    _end_group(process)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _stop_after(wait: Callable[[], object], stop: threading.Event) -> None:
    wait()
    stop.set()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STOP_S
    _signal(process.pid, signal.SIGTERM)
    while time.monotonic() < deadline:
        process.poll()
        if not _is_alive(process.pid):
            return
        time.sleep(0.1)
    _signal(process.pid, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _is_alive(group: int) -> bool:
    """Return whether a process of the group is alive; zombies do not count."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
