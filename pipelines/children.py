"""The processes of `make stack`: they end with it, however it ends.

Each has a keeper (`pipelines.keeper`). Where that was killed too, the next start finds what is
left by a mark in its environment, which all inherit, and ends it.
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
from pipelines.keeper import STOP_S

_MARK = "PARITY_GATE_STACK"
"""Names the folder whose `make stack` started a process."""


@dataclass(frozen=True)
class Child:
    """A process of ours; `name` says where its log is."""

    name: str
    process: subprocess.Popen[bytes]

    def check(self) -> None:
        """Raise RegistryUnavailable if it ended."""
        if self.process.poll() is not None:
            raise RegistryUnavailable(f"{self.name} ended with {self.process.returncode}.")


@contextmanager
def alone() -> Iterator[list[str]]:
    """Be the only `make stack` of this project; gives what a killed one had left, and was ended.

    Raises RegistryUnavailable where another one runs: both would have the webhook of one registry.
    """
    place = paths.state() / "stack.lock"
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("a+", encoding="ascii") as lock:
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
    """A process of ours with a log in `.gate/`; ended with SIGTERM, then with SIGKILL."""
    log = paths.state() / f"{name.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        # Its own session, so that Ctrl-C reaches only us and we end it in order.
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelines.keeper", *command],
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
    """The keeper does it as soon as the pipe is closed."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(2 * STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        _end_leftovers()


def _end_leftovers() -> list[str]:
    """End what processes of an earlier `make stack` of this project live; gives their names."""
    left = [process for process in psutil.process_iter() if _is_ours(process)]
    for process in left:
        with suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(left, timeout=STOP_S)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=STOP_S)
    return [f"process {process.pid}" for process in left]


def _is_ours(process: psutil.Process) -> bool:
    """Of others' processes the environment can't be read, and the dead have none."""
    with suppress(psutil.Error, OSError):
        return bool(process.pid != os.getpid() and process.environ().get(_MARK) == _mark())
    return False


def _mark() -> str:
    return str(paths.state())
