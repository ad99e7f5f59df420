"""Workers that are processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Literal

from gate.parity.units.part import UnitPart
from gate.parity.units.unit import Unit
from gate.scale.assignment import Assignment
from gate.scale.work import Hand, HandLost
from gate.scale.worker import WorkerFailure, read_answer, serve

_END_S = 10.0
_LEAVE_S = 1.0
"""For a process that has nothing to do to leave by itself."""


@dataclass(eq=False)
class _Process:
    """As `gate.scale.work.Hand`."""

    process: SpawnProcess
    connection: Connection
    unit: Unit | None = None

    def begin(self, lead: bytes) -> None:
        """As `Hand.begin`."""
        with contextlib.suppress(BrokenPipeError):  # it is heard of as one that died
            self.connection.send_bytes(lead)

    def give(self, unit: Unit) -> None:
        """As `Hand.give`."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send((unit.index, unit.start, unit.stop))

    def answer(self) -> UnitPart | WorkerFailure:
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
