"""Workers that are processes of this machine."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Literal

from gate.parity.units.unit import Unit
from gate.scale.assignment import Assignment
from gate.scale.early import EarlyProcess
from gate.scale.work import Hand, HandLost
from gate.scale.worker import Answer, read_answer


@dataclass(eq=False)
class _Process:
    """As `gate.scale.work.Hand`."""

    process: EarlyProcess
    unit: Unit | None = None
    opening: bool = False

    def begin(self, lead: bytes) -> None:
        """As `Hand.begin`."""
        with contextlib.suppress(BrokenPipeError):  # it is heard of as one that died
            self.process.connection.send_bytes(lead)

    def give(self, unit: Unit, *, again: bool) -> None:
        """As `Hand.give`."""
        with contextlib.suppress(BrokenPipeError):
            self.process.connection.send((unit.index, unit.start, unit.stop, again))

    def answer(self) -> Answer:
        """As `Hand.answer`."""
        try:
            return read_answer(self.process.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise HandLost(f"code {self.process.ended()}") from error

    def end(self) -> None:
        """As `Hand.end`."""
        self.process.end()


@dataclass(frozen=True)
class Processes:
    """As `gate.scale.workers.CrewEngine`: so many processes, with so many threads each."""

    assignment: Assignment
    count: int
    threads: int = 1
    early: deque[EarlyProcess] = field(default_factory=deque)
    """Those that have started already; whoever started them ends what is left."""
    name: Literal["processes", "ray"] = "processes"

    def start(self) -> Hand:
        """As `CrewEngine.start`."""
        process = self.early.popleft() if self.early else EarlyProcess.start()
        with contextlib.suppress(BrokenPipeError):  # it is heard of as one that died
            process.connection.send((self.assignment.to_json(), self.threads))
        return _Process(process)

    def ready(self, hands: Sequence[Hand], *, seconds: float) -> Sequence[Hand]:
        """As `CrewEngine.ready`."""
        mine = [hand for hand in hands if isinstance(hand, _Process)]
        answered = wait([hand.process.connection for hand in mine], seconds)
        return [hand for hand in mine if hand.process.connection in answered]

    def close(self) -> None:
        """Nothing is held."""
