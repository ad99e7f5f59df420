"""Workers that are processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Literal

from gate.parity.units.unit import Unit
from gate.scale.assignment import Assignment
from gate.scale.work import Hand, HandLost
from gate.scale.worker import Answer, read_answer, serve

_END_S = 10.0
_LEAVE_S = 1.0
"""For a process that has nothing to do to leave by itself."""


@dataclass(eq=False)
class _Process:
    """As `gate.scale.work.Hand`."""

    process: SpawnProcess
    connection: Connection
    unit: Unit | None = None
    opening: bool = False

    def begin(self, lead: bytes) -> None:
        """As `Hand.begin`."""
        with contextlib.suppress(BrokenPipeError):  # it is heard of as one that died
            self.connection.send_bytes(lead)

    def give(self, unit: Unit, *, again: bool) -> None:
        """As `Hand.give`."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send((unit.index, unit.start, unit.stop, again))

    def answer(self) -> Answer:
        """As `Hand.answer`."""
        try:
            return read_answer(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.process.join(_END_S)
            raise HandLost(f"code {self.process.exitcode}") from error

    def end(self) -> None:
        """As `Hand.end`."""
        self.connection.close()  # by which it hears that there is no more to do
        self.process.join(_LEAVE_S)
        self.process.terminate()
        self.process.join(_END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(_END_S)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """What starts inside never hears of Ctrl-C, not even while it imports: it leaves when its
    connection ends. A child has the mask of the thread that started it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class Processes:
    """As `gate.scale.workers.CrewEngine`: so many processes, with so many threads each."""

    assignment: Assignment
    count: int
    threads: int = 1
    name: Literal["processes", "ray"] = "processes"

    def start(self) -> Hand:
        """As `CrewEngine.start`."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(theirs, self.assignment, self.threads), daemon=True
        )
        with _interrupts_held():
            process.start()
        theirs.close()
        return _Process(process, ours)

    def ready(self, hands: Sequence[Hand], *, seconds: float) -> Sequence[Hand]:
        """As `CrewEngine.ready`."""
        mine = [hand for hand in hands if isinstance(hand, _Process)]
        answered = wait([hand.connection for hand in mine], seconds)
        return [hand for hand in mine if hand.connection in answered]

    def close(self) -> None:
        """Nothing is held."""
