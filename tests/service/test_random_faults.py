"""The service converges without help after random events, faults, kills and edits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gate import Digest, GateError
from gate.deploy.store import EXACT, ModelStore
from gate.errors import ArtifactMissing, RegistryUnavailable
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.promotion import rollback
from gate.registry.registered_model import MismatchMemory, Reading
from gate.registry.reviews import ReviewSettings
from gate.registry.version_page import REJECTED_VERDICT, VersionStatus
from gate.service.monitoring import StepResult
from gate.service.reconciler import Reconciler
from tests.registry.promoting import promote
from tests.registry.releases import NAME
from tests.registry.simulator import Crash, Simulator
from tests.service.registry_setup import AUTOMATIC, RegistrySetup

_PAGE = b"<!doctype html><title>502 Bad Gateway</title>"
_DOWNLOAD_FAULTS = ("flipped", "page", "truncated", "missing")
"""Faults of downloads."""
_CALL_FAULTS = ("unavailable", "lost", "killed before", "killed after")
"""Faults of any call."""


PAUSE_S = 60.0
_PASSED_ACTIONS = ("passed", "promoted")


@dataclass
class Fault:
    """A fault of call number `at`, or of all calls after it."""

    kind: str
    at: int
    lasts: bool
    calls: int = 0

    def is_due(self) -> bool:
        """Count a call and return whether it fails."""
        self.calls += 1
        return self.calls > self.at if self.lasts else self.calls == self.at + 1


@dataclass
class FaultyRegistry:
    """A registry with injected faults that records each change of `champion`."""

    inner: Simulator
    fault: Fault | None = None
    moves: list[tuple[str | None, str | None]] = field(default_factory=list)
    damaged_downloads: int = 0
    """Number of damaged downloads; each one is damaged at another position."""

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.inner, name)
        if not callable(member):
            return member

        def call(*arguments: Any, **options: Any) -> Any:
            due = self._due_fault(fetches=name == "download")
            if due in ("unavailable", "missing"):
                raise (ArtifactMissing if due == "missing" else RegistryUnavailable)(
                    "injected fault"
                )
            if due == "killed before":
                raise Crash
            champion = self.inner.aliases.get(CHAMPION)
            result = member(*arguments, **options)
            if self.inner.aliases.get(CHAMPION) != champion:
                self.moves.append((champion, self.inner.aliases.get(CHAMPION)))
            if due == "lost":
                raise RegistryUnavailable("the answer was lost")
            if due == "killed after":
                raise Crash
            if due is not None:
                self.damaged_downloads += 1
                result.write_bytes(damage(due, result.read_bytes(), self.damaged_downloads))
            return result

        return call

    def _due_fault(self, *, fetches: bool) -> str | None:
        fault = self.fault
        if fault is None or (fault.kind in _DOWNLOAD_FAULTS and not fetches):
            return None
        return fault.kind if fault.is_due() else None


def damage(kind: str, data: bytes, number: int) -> bytes:
    if kind == "page":
        return _PAGE
    position = 7 * number % len(data)
    if kind == "truncated":
        return data[:position]
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


class FaultyLedger(Ledger):
    """A ledger whose writer is killed before or after an entry."""

    fault: Fault | None = None

    def append(self, entry: LedgerEntry) -> LedgerEntry:
        due = self.fault is not None and self.fault.is_due()
        if due and self.fault is not None and self.fault.kind == "killed before":
            raise Crash
        line = super().append(entry)
        if due:
            raise Crash
        return line


class SimulatedSystem:
    """A model with its editors, the service, and injected faults."""

    def __init__(self, folder: Path) -> None:
        self.setup = RegistrySetup(folder, AUTOMATIC)
        self.setup.ledger = self.ledger = FaultyLedger(folder / "ledger.db")
        self.registry = FaultyRegistry(self.setup.registry)
        self.store = ModelStore(folder / "store")
        self.overwritten: set[str] = set()
        """Versions whose bytes an editor replaced."""
        self.rejected: set[str] = set()
        """Versions that a reviewer rejected."""
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        reading = Reading(mismatches=MismatchMemory(PAUSE_S, wait=None, clock=lambda: self.now))
        self.reconcile = Reconciler(
            self.registry, self.ledger, AUTOMATIC, store=self.store, reading=reading
        )

    def set_fault(self, kind: str | None, at: int = 0, lasts: bool = False) -> None:
        """Set the fault for the calls of the next action."""
        self.registry.fault = self.ledger.fault = None
        if kind is not None and kind.startswith("line "):
            self.ledger.fault = Fault(kind.removeprefix("line "), at, lasts)
        elif kind is not None:
            self.registry.fault = Fault(kind, at, lasts)

    def do(self, action: str, number: str) -> None:
        """Run one action; a killed process is restarted."""
        try:
            self._do(action, number)
        except GateError:
            pass
        except Crash:
            self.restart()

    def _do(self, action: str, number: str) -> None:
        setup = self.setup
        self.now += PAUSE_S
        if action == "look":
            self.reconcile(NAME, cause="timer")
        elif action == "restart":
            self.restart()
        elif action == "promote":
            release = setup.release(int(number))
            promote(self.registry, release, policy=AUTOMATIC, ledger=self.ledger)
        elif action == "rollback":
            rollback(self.registry, NAME, ledger=self.ledger, reason="worse")
        elif action == "unalias":
            setup.registry.aliases.pop(CHAMPION, None)
        elif action == "forge":
            setup.move_champion(setup.register_by_hand(9))
        elif int(number) <= len(setup.registry.versions):
            self._edit(action, number)

    def _edit(self, action: str, number: str) -> None:
        setup = self.setup
        if action == "point":
            setup.move_champion(number)
        elif action == "untag":
            setup.stored(number).tags.clear()
            if ("rejected", number) not in setup.lines():
                self.rejected.discard(
                    number
                )  # the rejection was withdrawn before the service read it
        elif action == "reject":
            self.rejected.add(number)
            setup.tag(number, "rejected")
        else:
            self.overwritten.add(number)
            setup.stored(number).data += b"\0"

    def eligible(self) -> set[str]:
        """Return the versions that were champion and were not overwritten, rejected or rolled back."""
        history = self.setup.model().history()
        return {
            number
            for number in history.served
            if number not in self.overwritten | self.rejected
            and history.rollback_of(number) is None
        }

    def live(self) -> Digest | None:
        """Return the digest of the deployed file."""
        live = self.store.live(NAME)
        return None if live is None else live.slots[EXACT].sha256

    def assert_pages(self) -> None:
        """Assert that the pages of the versions in the last ledger entries agree with the ledger."""
        history = self.setup.model().history()
        recent = [line.version for line in history.entries[-10:] if line.version]
        for number in {*recent, *filter(None, (history.serving,))}:
            status, page = VersionStatus.from_history(history, number), self.setup.stored(number)
            assert status is None or page.description.startswith(
                status.status_line(ReviewSettings())
            )
            if status is not None and status.kind == "rejected":
                assert page.tags[Tag.VERDICT] == REJECTED_VERDICT
                assert self.setup.registry.aliases.get(CANDIDATE) != number

    def passed(self) -> set[Digest | None]:
        """Return the digests of all versions that passed the gate."""
        return {entry.sha256 for entry in self.ledger.entries() if entry.action in _PASSED_ACTIONS}


ACTIONS = st.sampled_from(
    ["promote 1", "promote 2", "promote 3", "point 1", "point 2", "point 3", "forge", "spoil 1",
     "spoil 2", "reject 2", "reject 3", "untag 1", "untag 2", "rollback", "unalias", "restart",
     "look", "look", "look"]
)  # fmt: skip
FAULTS = st.one_of(
    st.none(),
    st.tuples(
        st.sampled_from(
            (*_DOWNLOAD_FAULTS, *_CALL_FAULTS, "line killed before", "line killed after")
        ),
        st.integers(0, 9),
        st.booleans(),
    ),
)


FIRST_ACTIONS = (("promote 1", None), ("look", None))


@given(st.lists(st.tuples(ACTIONS, FAULTS), max_size=12))
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
def test_service_converges_after_random_events_and_faults(tmp_path_factory, steps):
    system = SimulatedSystem(tmp_path_factory.mktemp("system"))
    for step, fault in (*FIRST_ACTIONS, *steps):
        action, _, number = step.partition(" ")
        system.set_fault(*(fault or (None,)))
        system.do(action, number)
        assert system.live() in {None, *system.passed()}
    system.set_fault(None)
    system.restart()
    # An overwritten version needs a second download and then one more pass.
    for _ in range(4 if system.overwritten else 2):
        system.do("look", "")
    final_lines = system.setup.lines()
    assert not [
        item for item in system.reconcile(NAME, cause="timer") if isinstance(item, StepResult)
    ]
    assert system.setup.lines() == final_lines
    champion = system.setup.champion
    if champion is None:
        assert not system.eligible()
    elif champion in system.overwritten:
        assert len(system.overwritten) > 1  # the store counts as unavailable
        assert champion == system.setup.model().history().serving
    else:
        assert champion in system.eligible()
        assert system.live() == Digest.from_bytes(system.setup.stored(champion).data)
    system.assert_pages()
    entries = system.ledger.entries()
    conflicts = sum(e.action == "conflict" for e in entries)
    moves = [e for e in entries if e.operation and e.action != "conflict"]
    recorded_moves = [(e.previous_version, e.version) for e in moves]
    assert len({e.operation for e in moves}) == len(recorded_moves)
    assert (Counter(system.registry.moves) - Counter(recorded_moves)).total() <= conflicts
    assert not Counter(recorded_moves) - Counter(system.registry.moves)
