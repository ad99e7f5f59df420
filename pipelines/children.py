"""The child processes of `make stack`, which always end together with it.

Each child has a supervisor (`pipelines.supervisor`). If the supervisor was killed too, the next
`make stack` finds the remaining processes by a variable in their environment and ends them.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from gate.errors import RegistryUnavailable
from pipelines import paths
from pipelines.supervisor import STOP_S

_MARK = "PARITY_GATE_STACK"
"""Environment variable that marks child processes with the state folder of their `make stack`."""


@dataclass(frozen=True)
class Child:
    """A child process; `name` contains the path of its log."""

    name: str
    process: subprocess.Popen[bytes]

    def check(self) -> None:
        """Raise RegistryUnavailable if the process has ended."""
        if self.process.poll() is not None:
            raise RegistryUnavailable(f"{self.name} ended with {self.process.returncode}.")


@contextmanager
def alone() -> Iterator[list[str]]:
    """Lock this project for one `make stack`; yield the names of leftover processes that were
    ended.

    Raises RegistryUnavailable if another `make stack` runs: both would register the registry's
    webhook.
    """
    path = paths.state() / "stack.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise RegistryUnavailable(
                f"make stack runs in this folder already (process {lock.read().strip() or '?'}). "
                "Use it, or end it first with Ctrl-C."
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield _end_leftovers()


@contextmanager
def started(name: str, command: list[str], env: Mapping[str, str]) -> Iterator[Child]:
    """Start a child process with a log in `.gate/`; end it with SIGTERM, later SIGKILL."""
    log = paths.state() / f"{name.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        # A new session: Ctrl-C reaches only this process, which then ends the child.
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelines.supervisor", *command],
            env={**env, _MARK: _mark()},
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        yield Child(f"{name} (its log: {log})", process)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child by closing the pipe that its supervisor reads."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(2 * STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        _end_leftovers()


def _end_leftovers() -> list[str]:
    """End processes of an earlier `make stack` of this project; return their names."""
    leftovers = [process for process in psutil.process_iter() if _has_mark(process)]
    for process in leftovers:
        with suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(leftovers, timeout=STOP_S)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=STOP_S)
    return [f"process {process.pid}" for process in leftovers]


def _has_mark(process: psutil.Process) -> bool:
    """Return whether a process belongs to this project; the environment of other users is
    unreadable."""
    with suppress(psutil.Error, OSError):
        return bool(process.pid != os.getpid() and process.environ().get(_MARK) == _mark())
    return False


def _mark() -> str:
    return str(paths.state())
