"""A crew of workers of one engine: each takes the next unit when it has done one."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol

from gate.errors import EvidenceError, GateError
from gate.parity.units.part import LeadState, UnitAnswers, UnitPart
from gate.parity.units.unit import Unit
from gate.records.crew import CrewRecord
from gate.scale.assignment import Assignment
from gate.scale.kept_parts import KeptParts
from gate.scale.work import Hand, HandLost, Work

_END_S = 10.0
_LEAVE_S = 1.0
_MOST_WAITING = 32
"""Parts that nobody has taken yet, before the crew waits."""


class CrewEngine(Protocol):
    """What starts workers: processes of this machine, or actors of a cluster."""

    @property
    def name(self) -> Literal["processes", "ray"]:
        """As the evidence calls it."""

    @property
    def count(self) -> int:
        """Workers that it starts."""

    @property
    def assignment(self) -> Assignment:
        """What they measure."""

    def start(self) -> Hand:
        """Start one. It opens what it needs while the lead is measured."""

    def ready(self, hands: Sequence[Hand], *, seconds: float) -> Sequence[Hand]:
        """Those that have answered or ended, waiting so long for the first of them."""

    def close(self) -> None:
        """Give back what it holds; its workers were ended."""


@dataclass
class Workers:
    """As `gate.parity.units.part.Crew`. A worker that ends is replaced, and its unit measured
    again. Parts that are done are kept until all are taken."""

    engine: CrewEngine
    kept: KeptParts | None = None
    _hands: list[Hand] = field(default_factory=list)
    _earlier: int = 0
    """Parts of an earlier check that were used."""
    _done: queue.Queue[UnitPart | GateError | None] = field(
        default_factory=lambda: queue.Queue(_MOST_WAITING)
    )
    _thread: threading.Thread | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)
    _broke: GateError | None = None

    def __enter__(self) -> Workers:
        """Start them: they open model and file while the lead is measured. Raises what starting
        them raises."""
        try:
            for _ in range(self.engine.count):
                self._hands.append(self.engine.start())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """End them all, whatever they do. Kept parts are for whoever was interrupted, or lost a
        worker: of what was refused nothing is used again."""
        self._end()
        interrupted = error is not None and not isinstance(error, Exception)
        lost = error is not None and error is self._broke
        if self.kept is not None and not interrupted and not lost:
            self.kept.remove()

    @property
    def record(self) -> CrewRecord:
        """As `Crew.record`."""
        return CrewRecord(engine=self.engine.name, workers=self.engine.count, earlier=self._earlier)

    def begin(self, lead: LeadState, units: Sequence[Unit]) -> LeadState:
        """As `Crew.begin`."""
        kept = set() if self.kept is None else self.kept.begin(lead, units)
        work = Work(lead.to_json().encode(), deque(units), len(units), kept)
        self._thread = threading.Thread(target=self._drive, args=(work,), daemon=True)
        self._thread.start()
        return lead

    def parts(self) -> Iterator[UnitPart]:
        """As `Crew.parts`. A part is kept when the next one is asked for, because by then this one
        was not refused."""
        while (came := self._done.get()) is not None:
            if isinstance(came, GateError):
                self._broke = came
                raise came
            yield came
            if self.kept is not None:
                self.kept.keep(came)

    def _end(self) -> None:
        self._is_over.set()  # none of them is replaced any more
        if self._thread is not None:
            self._thread.join(_END_S)
        for hand in self._hands:
            hand.end()
        self.engine.close()

    def _drive(self, work: Work) -> None:
        try:
            for hand in self._hands:
                _begin(hand, work)
            while work.left and self._hands and not self._is_over.is_set():
                for hand in self.engine.ready(self._hands, seconds=_LEAVE_S):
                    self._hear(hand, work)
            self._put(work.failure or (_nobody_left() if work.left else None))
        except GateError as error:  # of the engine: it can't start anybody
            self._put(error)
        except Exception as error:
            self._put(EvidenceError(f"the crew of {self.engine.name} broke: {error}. Repeat."))

    def _put(self, answer: UnitPart | GateError | None) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(queue.Full):
                self._done.put(answer, timeout=_LEAVE_S)
                return

    def _hear(self, hand: Hand, work: Work) -> None:
        try:
            answer = hand.answer()
        except HandLost as why:
            self._replace(hand, work, why)
            return
        if answer is None:
            work.begin(hand)
            return
        if isinstance(answer, UnitPart):  # which is its answers, too
            self._put(answer)
        elif isinstance(answer, UnitAnswers):
            self._take_kept(answer, hand, work)
            return
        else:
            work.fail(hand, answer.error())
        work.go_on(hand)

    def _take_kept(self, answer: UnitAnswers, hand: Hand, work: Work) -> None:
        """Use the part of an earlier check where the reference still answers the same."""
        part = None if self.kept is None else self.kept.part(answer)
        if part is None:
            work.repeat(hand)
            return
        self._earlier += 1
        self._put(part)
        work.go_on(hand)

    def _replace(self, hand: Hand, work: Work, why: HandLost) -> None:
        work.lose(hand, why)
        hand.end()
        if self._is_over.is_set():
            return
        self._hands.remove(hand)
        if work.waiting:
            self._hands.append(self.engine.start())
            _begin(self._hands[-1], work)


def _begin(hand: Hand, work: Work) -> None:
    """One that is still opening says when it is there."""
    if not hand.opening:
        work.begin(hand)


def _nobody_left() -> EvidenceError:
    return EvidenceError("no worker is left to measure. Repeat, or measure with one job.")
