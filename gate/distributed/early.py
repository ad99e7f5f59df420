"""Processes that start before anybody knows what they are to measure: they import PyTorch while the
process that will tell them does."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import psutil

from gate.installation import logical_cores
from gate.model.factory import paused_gc

_LEAVE_S = 1.0
"""For a process that has nothing to do to leave by itself."""

_END_S = 10.0


@dataclass(eq=False)
class EarlyProcess:
    """It waits for its assignment, and then for units."""

    process: SpawnProcess
    connection: Connection

    @classmethod
    def start(cls) -> EarlyProcess:
        """Start one, which never hears of Ctrl-C."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with _interrupts_held():
            process.start()
        theirs.close()
        return cls(process, ours)

    def ended(self) -> int | None:
        """Its exit code, soon after it was lost."""
        self.process.join(_END_S)
        return self.process.exitcode

    def end(self) -> None:
        """End it, whatever it does."""
        self.connection.close()  # by which it hears that there is no more to do
        self.process.join(_LEAVE_S)
        self.process.terminate()
        self.process.join(_END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(_END_S)


_LEAST_BYTES = 2**29
"""Of a process with PyTorch and ONNX Runtime, before it opens a model (measured: 0.45 GiB)."""


def most_processes(count: int) -> tuple[int, str]:
    """Return how many of `count` processes this machine has cores and free memory for, at least
    one; and which of both allows no more."""
    cores = logical_cores()
    room = max(psutil.virtual_memory().available // _LEAST_BYTES, 1)
    if room < cores:
        return min(count, room), f"the free memory holds {room} of at least 512 MiB"
    return min(count, cores), f"this machine has {cores} cores"


@contextlib.contextmanager
def early_processes(count: int) -> Iterator[deque[EarlyProcess]]:
    """Inside, so many have started; whoever takes one out ends it."""
    waiting: deque[EarlyProcess] = deque()
    try:
        for _ in range(count):
            waiting.append(EarlyProcess.start())
        yield waiting
    finally:
        for process in waiting:
            process.process.terminate()  # it has nothing to give back
        for process in waiting:
            process.end()


def _serve(connection: Connection) -> None:
    with paused_gc():
        from gate.distributed.worker import serve
    serve(connection)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """What starts inside never hears of Ctrl-C, not even while it imports: it leaves when its
    connection ends. A child has the mask of the thread that started it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which the first process would start, and unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
