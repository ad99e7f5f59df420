"""A crew of workers of one engine: each takes the next unit when it has done one."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol

from gate.errors import EvidenceError, GateError
from gate.parity.units.part import LeadState, UnitPart
from gate.parity.units.unit import Unit
from gate.records.crew import CrewRecord
from gate.scale.assignment import Assignment
from gate.scale.kept_parts import KeptParts
from gate.scale.work import Hand, HandLost, Work

_END_S = 10.0
_LEAVE_S = 1.0
_MOST_WAITING = 32
"""Parts that nobody has taken yet, before the crew waits."""

_LOST = EvidenceError("no worker is left to measure. Repeat, or measure with one job.")


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
    _units: Sequence[Unit] = ()
    _found: tuple[Unit, ...] = ()
    """Units that were kept."""
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
        return CrewRecord(engine=self.engine.name, workers=self.engine.count)

    def begin(self, lead: LeadState, units: Sequence[Unit]) -> LeadState:
        """As `Crew.begin`."""
        found = () if self.kept is None else self.kept.units(lead, units)
        self._units, self._found = units, found
        left = deque(unit for unit in units if unit not in set(found))
        work = Work(lead.to_json().encode(), left, len(left))
        self._thread = threading.Thread(target=self._drive, args=(work,), daemon=True)
        self._thread.start()
        return lead

    def parts(self) -> Iterator[UnitPart]:
        """As `Crew.parts`. A kept part comes in its turn: never many that wait for others."""
        there, out = deque(self._found), {unit.index for unit in self._units}
        out -= {unit.index for unit in there}
        while True:
            while self.kept and there and there[0].index < min(out, default=math.inf):
                yield self.kept.part(there.popleft())
            came = self._done.get()
            if came is None:
                return
            if isinstance(came, GateError):
                self._broke = came
                raise came
            if self.kept:
                self.kept.keep(came)
            out.discard(came.index)
            yield came

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
                work.begin(hand)
            while work.left and self._hands and not self._is_over.is_set():
                for hand in self.engine.ready(self._hands, seconds=_LEAVE_S):
                    self._hear(hand, work)
            self._put(work.failure or (_LOST if work.left else None))
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
        if isinstance(answer, UnitPart):
            self._put(answer)
        else:
            work.fail(hand, answer.error())
        work.go_on(hand)

    def _replace(self, hand: Hand, work: Work, why: HandLost) -> None:
        work.lose(hand, why)
        hand.end()
        if self._is_over.is_set():
            return
        self._hands.remove(hand)
        if work.waiting:
            self._hands.append(self.engine.start())
            work.begin(self._hands[-1])
