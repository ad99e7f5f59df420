"""What a crew has still to do: units, who has which, and how often one ended its worker."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from gate.errors import EvidenceError, GateError
from gate.parity.units.unit import Unit
from gate.scale.worker import Answer

_TRIES = 3
"""Workers that may end over one unit."""


class HandLost(Exception):
    """A worker ended without an answer; the text says what is to be heard of it."""


class Hand(Protocol):
    """One worker, wherever it is."""

    unit: Unit | None
    """That it has now."""
    opening: bool
    """Nobody knows yet when it will be there: it gets no unit before it says so, by an answer of
    None."""

    def begin(self, lead: bytes) -> None:
        """Give it the lead, by which it judges. One that has ended says so by `answer`."""

    def give(self, unit: Unit, *, again: bool) -> None:
        """Give it a unit to measure, as `begin`; `again`: only what the reference answers."""

    def answer(self) -> Answer | None:
        """What it said, once it has; None: it is there. Raises HandLost."""

    def end(self) -> None:
        """End it, whatever it does."""


@dataclass
class Work:
    """What is still to do."""

    lead: bytes
    waiting: deque[Unit]
    left: int
    """Units that nobody has answered for."""
    kept: set[int] = field(default_factory=set)
    """Those of which an earlier check left the part: the reference is asked again."""
    failure: GateError | None = None
    """Of the first unit, by index, that can't be measured."""
    _failed: int | None = None
    _lost: dict[int, int] = field(default_factory=dict)

    def begin(self, hand: Hand) -> None:
        """Give a new worker the lead, and its first unit."""
        hand.begin(self.lead)
        self._give(hand)

    def go_on(self, hand: Hand) -> None:
        """It has answered."""
        if hand.unit is not None:
            hand.unit = None
            self.left -= 1
        self._give(hand)

    def repeat(self, hand: Hand) -> None:
        """What the reference answered is not what the kept part was measured on."""
        if hand.unit is not None:
            self.kept.discard(hand.unit.index)
            hand.give(hand.unit, again=False)

    def lose(self, hand: Hand, why: HandLost) -> None:
        """It ended: its unit goes to another one."""
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
                f"workers, the last with {why}. Look at the memory and the logs of the machines "
                "where they run, or measure with one job."
            ),
        )

    def fail(self, hand: Hand, error: GateError) -> None:
        """It can't measure its unit; what it can't open, nobody can."""
        self._note(-1 if hand.unit is None else hand.unit.index, error)

    def _note(self, index: int, error: GateError) -> None:
        if self._failed is None or index < self._failed:
            self._failed, self.failure = index, error
        while self.waiting and self.waiting[-1].index > self._failed:
            self.waiting.pop()
            self.left -= 1

    def _give(self, hand: Hand) -> None:
        if self.waiting:
            hand.unit = self.waiting.popleft()
            hand.give(hand.unit, again=hand.unit.index in self.kept)
