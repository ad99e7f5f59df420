"""A crew of processes on this machine: each takes the next unit when it has done one."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from gate.errors import EvidenceError, GateError
from gate.parity.units.part import LeadState, UnitPart
from gate.parity.units.unit import Unit
from gate.records.crew import CrewRecord
from gate.scale.assignment import Assignment
from gate.scale.worker import read_answer, serve

_TRIES = 3
"""Processes that may die over one unit."""
_END_S = 10.0
_LEAVE_S = 1.0
"""For a process that has nothing to do to leave by itself."""
_MOST_WAITING = 32
"""Parts that nobody has taken yet, before the crew waits."""

_LOST = EvidenceError("no process is left to measure. Repeat, or measure with one job.")


@dataclass(eq=False)
class _Hand:
    """One process, and the unit that it has."""

    process: SpawnProcess
    connection: Connection
    unit: Unit | None = None


@dataclass
class Processes:
    """As `gate.parity.units.part.Crew`. A process that dies is replaced, and its unit measured
    again."""

    assignment: Assignment
    jobs: int
    threads: int = 1
    """Of each."""
    _hands: list[_Hand] = field(default_factory=list)
    _done: queue.Queue[UnitPart | GateError | None] = field(
        default_factory=lambda: queue.Queue(_MOST_WAITING)
    )
    _thread: threading.Thread | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Processes:
        """Start them: they open model and file while the lead is measured."""
        self._hands = [self._started() for _ in range(self.jobs)]
        return self

    def __exit__(self, *_: object) -> None:
        """End them all, whatever they do."""
        self._is_over.set()  # none of them is replaced any more
        if self._thread is not None:
            self._thread.join(_END_S)
        for hand in self._hands:
            hand.connection.close()  # by which it hears that there is no more to do
        for hand in self._hands:
            _end(hand)

    @property
    def record(self) -> CrewRecord:
        """As `Crew.record`."""
        return CrewRecord(engine="processes", workers=self.jobs)

    def begin(self, lead: LeadState, units: Sequence[Unit]) -> LeadState:
        """As `Crew.begin`."""
        work = _Work(lead.to_json().encode(), deque(units), len(units))
        self._thread = threading.Thread(target=self._drive, args=(work,), daemon=True)
        self._thread.start()
        return lead

    def parts(self) -> Iterator[UnitPart]:
        """As `Crew.parts`."""
        while (came := self._done.get()) is not None:
            if isinstance(came, GateError):
                raise came
            yield came

    def _started(self) -> _Hand:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(theirs, self.assignment, self.threads), daemon=True
        )
        process.start()
        theirs.close()
        return _Hand(process, ours)

    def _drive(self, work: _Work) -> None:
        try:
            for hand in self._hands:
                work.begin(hand)
            while work.left and self._hands and not self._is_over.is_set():
                ready = wait([hand.connection for hand in self._hands], _LEAVE_S)
                for hand in [hand for hand in self._hands if hand.connection in ready]:
                    self._hear(hand, work)
            self._put(work.failure or (_LOST if work.left else None))
        except Exception as error:
            self._put(EvidenceError(f"the crew of processes broke: {error}. Repeat."))

    def _put(self, answer: UnitPart | GateError | None) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(queue.Full):
                self._done.put(answer, timeout=_LEAVE_S)
                return

    def _hear(self, hand: _Hand, work: _Work) -> None:
        try:
            answer = read_answer(hand.connection.recv_bytes())
        except (EOFError, OSError):
            self._replace(hand, work)
            return
        if isinstance(answer, UnitPart):
            self._put(answer)
        else:
            work.fail(hand, answer.error())
        work.go_on(hand)

    def _replace(self, hand: _Hand, work: _Work) -> None:
        """Of one that died."""
        hand.process.join(_END_S)
        work.lose(hand, code=hand.process.exitcode)
        if self._is_over.is_set():
            return
        self._hands.remove(hand)
        if work.waiting:
            self._hands.append(self._started())
            work.begin(self._hands[-1])


@dataclass
class _Work:
    """What is still to do."""

    lead: bytes
    waiting: deque[Unit]
    left: int
    """Units that nobody has answered for."""
    failure: GateError | None = None
    """Of the first unit, by index, that can't be measured."""
    _failed: int | None = None
    _lost: dict[int, int] = field(default_factory=dict)

    def begin(self, hand: _Hand) -> None:
        """Give a new process the lead, and its first unit."""
        with contextlib.suppress(BrokenPipeError):  # it is heard of as one that died
            hand.connection.send_bytes(self.lead)
        self._give(hand)

    def go_on(self, hand: _Hand) -> None:
        """It has answered."""
        if hand.unit is not None:
            hand.unit = None
            self.left -= 1
        self._give(hand)

    def lose(self, hand: _Hand, *, code: int | None) -> None:
        """It died: its unit goes to another one."""
        unit, hand.unit = hand.unit, None
        if unit is None:
            return
        self._lost[unit.index] = self._lost.get(unit.index, 0) + 1
        if self._lost[unit.index] < _TRIES:
            self.waiting.appendleft(unit)
            return
        self.left -= 1
        self._note(
            unit.index,
            EvidenceError(
                f"unit {unit.index} (samples {unit.start} to {unit.stop - 1}) ended {_TRIES} "
                f"processes, the last with code {code}. Look at the memory of this machine, or "
                "measure with one job."
            ),
        )

    def fail(self, hand: _Hand, error: GateError) -> None:
        """It can't measure its unit; what it can't open, nobody can."""
        self._note(-1 if hand.unit is None else hand.unit.index, error)

    def _note(self, index: int, error: GateError) -> None:
        if self._failed is None or index < self._failed:
            self._failed, self.failure = index, error
        while self.waiting and self.waiting[-1].index > self._failed:
            self.waiting.pop()
            self.left -= 1

    def _give(self, hand: _Hand) -> None:
        if self.waiting:
            hand.unit = self.waiting.popleft()
            with contextlib.suppress(BrokenPipeError):
                hand.connection.send((hand.unit.index, hand.unit.start, hand.unit.stop))


def _end(hand: _Hand) -> None:
    hand.process.join(_LEAVE_S)
    hand.process.terminate()
    hand.process.join(_END_S)
    if hand.process.is_alive():
        hand.process.kill()
        hand.process.join(_END_S)
