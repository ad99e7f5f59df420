"""Random sequences of events, faults, kills and edits: whatever happened, it ends well by itself.

What is deployed was vouched for, nothing is condemned that is whole, a good champion comes back
without anybody's help, and every move of `champion` is told once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gate.deploy.store import EXACT, ModelStore
from gate.errors import ArtifactMissing, GateError, RegistryUnavailable
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.promotion import rollback
from gate.registry.registered_model import MismatchMemory, Reading
from gate.registry.reviews import ReviewSettings
from gate.registry.version_page import REJECTED_VERDICT, VersionStatus
from gate.service.monitoring import StepResult
from gate.service.reconciler import Reconciler
from gate.storage.digest import Digest
from tests.exhaustive import exhaustive
from tests.registry.promoting import promote
from tests.registry.releases import NAME
from tests.registry.simulator import Crash, Simulator
from tests.service.places import AUTOMATIC, Place

_PAGE = b"<!doctype html><title>502 Bad Gateway</title>"
_FETCHED = ("flipped", "page", "truncated", "missing")
"""What weather makes of a download."""
_CALLED = ("unavailable", "lost", "killed before", "killed after")
"""What it makes of any call."""


PAUSE_S = 60.0
_PASSED = ("passed", "promoted")


@dataclass
class Storm:
    """What becomes of a call: of the one of this number from now on, or of all that follow it."""

    kind: str
    at: int
    lasts: bool
    calls: int = 0

    def strikes(self) -> bool:
        """Count a call; whether it is struck."""
        self.calls += 1
        return self.calls > self.at if self.lasts else self.calls == self.at + 1


@dataclass
class Stormy:
    """A registry in the weather; keeps each change of `champion` that came through it."""

    inner: Simulator
    storm: Storm | None = None
    moves: list[tuple[str | None, str | None]] = field(default_factory=list)
    spoiled: int = 0
    """Downloads, on their way: each in its own place."""

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.inner, name)
        if not callable(member):
            return member

        def call(*arguments: Any, **options: Any) -> Any:
            struck = self._struck(fetches=name == "download")
            if struck in ("unavailable", "missing"):
                raise (ArtifactMissing if struck == "missing" else RegistryUnavailable)(
                    "bad weather"
                )
            if struck == "killed before":
                raise Crash
            champion = self.inner.aliases.get(CHAMPION)
            result = member(*arguments, **options)
            if self.inner.aliases.get(CHAMPION) != champion:
                self.moves.append((champion, self.inner.aliases.get(CHAMPION)))
            if struck == "lost":
                raise RegistryUnavailable("the answer was lost")
            if struck == "killed after":
                raise Crash
            if struck is not None:
                self.spoiled += 1
                result.write_bytes(_on_the_way(struck, result.read_bytes(), self.spoiled))
            return result

        return call

    def _struck(self, *, fetches: bool) -> str | None:
        storm = self.storm
        if storm is None or (storm.kind in _FETCHED and not fetches):
            return None
        return storm.kind if storm.strikes() else None


def _on_the_way(kind: str, data: bytes, number: int) -> bytes:
    if kind == "page":
        return _PAGE
    place = 7 * number % len(data)
    if kind == "truncated":
        return data[:place]
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


class StormyLedger(Ledger):
    """Its writer is killed before or after a line."""

    storm: Storm | None = None

    def append(self, entry: LedgerEntry) -> LedgerEntry:
        struck = self.storm is not None and self.storm.strikes()
        if struck and self.storm is not None and self.storm.kind == "killed before":
            raise Crash
        line = super().append(entry)
        if struck:
            raise Crash
        return line


class World:
    """A model, its editors, the service, and the weather between them."""

    def __init__(self, folder: Path) -> None:
        self.place = Place(folder, AUTOMATIC)
        self.place.ledger = self.ledger = StormyLedger(folder / "ledger.db")
        self.registry = Stormy(self.place.registry)
        self.store = ModelStore(folder / "store")
        self.overwritten: set[str] = set()
        """Versions whose bytes an editor exchanged."""
        self.rejected: set[str] = set()
        """By a reviewer."""
        self.taken = False
        """Whether an editor took `champion` away, and nothing moved it since."""
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        reading = Reading(mismatches=MismatchMemory(PAUSE_S, wait=None, clock=lambda: self.now))
        self.reconcile = Reconciler(
            self.registry, self.ledger, AUTOMATIC, store=self.store, reading=reading
        )

    def weather(self, kind: str | None, at: int = 0, lasts: bool = False) -> None:
        """What becomes of the calls of the next thing that is done."""
        self.registry.storm = self.ledger.storm = None
        if kind is not None and kind.startswith("line "):
            self.ledger.storm = Storm(kind.removeprefix("line "), at, lasts)
        elif kind is not None:
            self.registry.storm = Storm(kind, at, lasts)

    def do(self, what: str, number: str) -> None:
        """One thing that is done; a process that is killed is started again."""
        before = self.place.champion
        try:
            self._do(what, number)
        except GateError:
            pass
        except Crash:
            self.restart()
        if self.place.champion != before:
            self.taken = what == "unalias"

    def _do(self, what: str, number: str) -> None:
        place = self.place
        self.now += PAUSE_S
        if what == "look":
            self.reconcile(NAME, cause="timer")
        elif what == "restart":
            self.restart()
        elif what == "promote":
            handed = place.release(int(number))
            promote(self.registry, handed, policy=AUTOMATIC, ledger=self.ledger)
        elif what == "rollback":
            rollback(self.registry, NAME, ledger=self.ledger, reason="worse")
        elif what == "unalias":
            place.registry.aliases.pop(CHAMPION, None)
        elif what == "forge":
            place.point(place.hand_made(9))
        elif int(number) <= len(place.registry.versions):
            self._edit(what, number)

    def _edit(self, what: str, number: str) -> None:
        place = self.place
        if what == "point":
            place.point(number)
        elif what == "untag":
            place.stored(number).tags.clear()
            if ("rejected", number) not in place.lines():
                self.rejected.discard(number)  # it was taken back before anybody looked
        elif what == "reject":
            self.rejected.add(number)
            place.tag(number, "rejected")
        else:
            self.overwritten.add(number)
            place.stored(number).data += b"\0"

    def good(self) -> set[str]:
        """The versions that served rightly, are whole, and were taken out of service by nobody."""
        history = self.place.model().history()
        return {
            number
            for number in history.served
            if number not in self.overwritten | self.rejected
            and history.rollback_of(number) is None
        }

    def live(self) -> Digest | None:
        """Of what is deployed."""
        live = self.store.live(NAME)
        return None if live is None else live.slots[EXACT].sha256

    def assert_pages(self) -> None:
        """What people read of the versions that were told of last is what the ledger says."""
        history = self.place.model().history()
        lasts = [line.version for line in history.entries[-10:] if line.version]
        for number in {*lasts, *filter(None, (history.serving,))}:
            fate, page = VersionStatus.from_history(history, number), self.place.stored(number)
            assert fate is None or page.description.startswith(fate.status_line(ReviewSettings()))
            if fate is not None and fate.kind == "rejected":
                assert page.tags[Tag.VERDICT] == REJECTED_VERDICT
                assert self.place.registry.aliases.get(CANDIDATE) != number

    def passed(self) -> set[Digest | None]:
        """All that the gate ever vouched for."""
        return {entry.sha256 for entry in self.ledger.entries() if entry.action in _PASSED}


DONE = st.sampled_from(
    ["promote 1", "promote 2", "promote 3", "point 1", "point 2", "point 3", "forge", "spoil 1",
     "spoil 2", "reject 2", "reject 3", "untag 1", "untag 2", "rollback", "unalias", "restart",
     "look", "look", "look"]
)  # fmt: skip
WEATHER = st.one_of(
    st.none(),
    st.tuples(
        st.sampled_from((*_FETCHED, *_CALLED, "line killed before", "line killed after")),
        st.integers(0, 9),
        st.booleans(),
    ),
)


ONE_SERVES = (("promote 1", None), ("look", None))


@exhaustive
@given(st.lists(st.tuples(DONE, WEATHER), max_size=12))
@example([("promote 2", None), ("look", ("flipped", 0, True)), ("look", ("flipped", 0, True))])
@example([("promote 2", None), ("restart", None), ("look", ("page", 0, True))])
@example([("promote 2", None), ("restart", None), ("look", ("flipped", 0, False))])
@example(
    [("forge", None), ("look", ("unavailable", 4, True)), ("look", ("killed after", 6, False))]
)
@example([("promote 2", ("lost", 7, False)), ("rollback", ("killed after", 9, False))])
@example([("promote 2", None), ("reject 2", None), ("untag 2", None)])
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@pytest.mark.proof
def test_whatever_happened_it_ends_well_by_itself(tmp_path_factory, steps):
    world = World(tmp_path_factory.mktemp("world"))
    for step, weather in (*ONE_SERVES, *steps):
        what, _, number = step.partition(" ")
        world.weather(*(weather or (None,)))
        world.do(what, number)
        assert world.live() in {None, *world.passed()}
    world.weather(None)
    world.restart()
    # What somebody wrote over takes a second download, and then one more look.
    for _ in range(4 if world.overwritten else 2):
        world.do("look", "")
    ended = world.place.lines()
    assert not [one for one in world.reconcile(NAME, cause="timer") if isinstance(one, StepResult)]
    assert world.place.lines() == ended
    champion = world.place.champion
    if champion is None:
        assert world.taken or not world.good()
    elif champion in world.overwritten:
        assert len(world.overwritten) > 1  # the store counts as unavailable, and nothing moves
        assert champion == world.place.model().history().serving
    else:
        assert champion in world.good()
        assert world.live() == Digest.from_bytes(world.place.stored(champion).data)
    world.assert_pages()
    entries = world.ledger.entries()
    conflicts = sum(e.action == "conflict" for e in entries)
    moves = [e for e in entries if e.operation and e.action != "conflict"]
    told = [(e.previous_version, e.version) for e in moves]
    assert len({e.operation for e in moves}) == len(told)
    assert (Counter(world.registry.moves) - Counter(told)).total() <= conflicts
    assert not Counter(told) - Counter(world.registry.moves)
