"""All interleavings of two promotions with a crash or a lost lease at each step.

After one reconcile the ledger and the alias agree, and nothing is pending.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gate.errors import PromotionConflict
from gate.ledger.database import LOCKS
from gate.ledger.ledger import Ledger
from gate.ledger.lock import FencingToken
from gate.registry.alias import model_lock, move_alias
from gate.registry.interface import CHAMPION
from gate.registry.registered_model import RegisteredModel
from gate.service.champion_guard import guard_champion
from tests import builders
from tests.ledger.rows import pending_moves
from tests.registry.releases import NAME
from tests.registry.simulator import APPROVED, Crash, Simulator, Stored, Watched

STEPS = 15
"""Number of steps of one promotion: registry calls, the ledger entry, and the end of the move."""


class Promoter:
    """A process that moves `champion` to a version. `at` is called before each step."""

    def __init__(self, registry: Simulator, state_path: Path, version: str) -> None:
        self.version, self.at, self.steps = version, no_hook, 0
        watched = Watched(registry)
        watched.before = lambda call, _: self.step(call)
        self.model = RegisteredModel(watched, Ledger(state_path), NAME, cause="promoter " + version)

    def step(self, label: str) -> None:
        number, self.steps = self.steps, self.steps + 1
        self.at(number, label)

    def run(self) -> None:
        with model_lock(self.model):
            old = self.model.alias(CHAMPION)
            approving_entry = self.model.history().approving_entry(self.version)
            move_alias(
                self.model,
                self.model.entry(
                    "promoted", "passed", version=self.version, previous=old, about=approving_entry
                ),
            )


def no_hook(_number: int, _label: str) -> None:
    """Do nothing before a step."""


@pytest.fixture
def step_promoters(monkeypatch: pytest.MonkeyPatch) -> list[Promoter]:
    """Promoters whose ledger entries and ends of moves also count as steps."""
    promoters: list[Promoter] = []
    append, clear = Ledger.append, FencingToken.clear_pending

    def watched_append(self: Ledger, entry: Any) -> Any:
        for promoter in promoters:
            if promoter.model.ledger is self:
                promoter.step("append")
        return append(self, entry)

    def watched_clear(self: FencingToken, operation: str) -> None:
        for promoter in promoters:
            if promoter.model.ledger.lease is self:
                promoter.step("clear_pending")
        clear(self, operation)

    monkeypatch.setattr(Ledger, "append", watched_append)
    monkeypatch.setattr(FencingToken, "clear_pending", watched_clear)
    return promoters


def create_registry(state_path: Path) -> Simulator:
    """Create a registry in which versions 1 to 4 were deployed and version 3 serves."""
    registry = Simulator(versions=[Stored(b"", {}, "run", "") for _ in range(4)])
    model = RegisteredModel(registry, Ledger(state_path), NAME)
    for version in ("4", "1", "2", "3"):
        for action in ("promoted", "deployed"):
            model.write(action, "passed", version=version, about=APPROVED)
    registry.aliases |= {"champion": "3", "previous": "2"}
    return registry


@pytest.fixture(scope="module")
def initial_state(tmp_path_factory: pytest.TempPathFactory) -> tuple[Simulator, bytes]:
    path = tmp_path_factory.mktemp("begun") / "state.db"
    registry = create_registry(path)
    return registry, path.read_bytes()


@contextlib.contextmanager
def suppress_crash() -> Iterator[None]:
    with contextlib.suppress(Crash, PromotionConflict):
        yield


def crash_at(step: int | None) -> Callable[[int, str], None]:
    def at(number: int, _label: str) -> None:
        if number == step:
            raise Crash

    return at


def check(
    registry: Simulator, state_path: Path, first: Promoter, second: Promoter, *, was_lost: bool
) -> None:
    """Assert the state after one reconcile, and that a second reconcile changes nothing."""
    model = RegisteredModel(registry, Ledger(state_path), NAME)
    for look in range(2):
        with model_lock(model):
            result = guard_champion(model, builders.policy(), thoroughly=False)
        # Only an alias that a process moved after losing its lease needs the guard.
        assert result == [] or (look == 0 and was_lost)
        assert model.alias(CHAMPION) == model.history().serving
        assert pending_moves(state_path) == ""
    for promoter in (first, second):
        moves = [e for e in model.history().entries if e.cause == promoter.model.cause]
        assert len([e for e in moves if e.action == "promoted"]) <= 1


@pytest.mark.further
@pytest.mark.rows(40)
@pytest.mark.parametrize("lost_at", [None, *range(STEPS)])
@pytest.mark.parametrize("second_dies_at", [None, *range(STEPS)])
def test_ledger_and_alias_agree_after_one_reconcile(
    tmp_path: Path,
    initial_state: tuple[Simulator, bytes],
    step_promoters: list[Promoter],
    lost_at: int | None,
    second_dies_at: int | None,
) -> None:
    """At step `lost_at` the first promoter loses its lease, and the second one runs until it
    crashes or ends. The first promoter crashes at each later step, or never."""
    for dies_at in (None, *range(0 if lost_at is None else lost_at, STEPS)):
        path = tmp_path / f"{dies_at}.db"
        path.write_bytes(initial_state[1])
        registry = replace(
            initial_state[0],
            versions=[replace(v, tags=dict(v.tags)) for v in initial_state[0].versions],
            aliases=dict(initial_state[0].aliases),
        )
        first, second = Promoter(registry, path, "4"), Promoter(registry, path, "1")
        second.at = crash_at(second_dies_at)
        first.at = lose_lease_at(lost_at, first, second, then=crash_at(dies_at))
        step_promoters[:] = [first, second]
        with suppress_crash():
            first.run()
        step_promoters.clear()
        check(registry, path, first, second, was_lost=lost_at is not None)
        if lost_at is None and dies_at is None:
            assert registry.aliases[CHAMPION] == "4"
            assert first.steps <= STEPS


def lose_lease_at(
    step: int | None, first: Promoter, second: Promoter, *, then: Callable[[int, str], None]
) -> Callable[[int, str], None]:
    def at(number: int, label: str) -> None:
        if number == step:
            with first.model.ledger.state.writing() as connection:
                connection.execute(sa.update(LOCKS).values(leased_until=0.0))
            with suppress_crash():
                second.run()
        then(number, label)

    return at


def move_champion(registry: Any, state_path: Path, version: str) -> None:
    """Move `champion` from version 3 to another version."""
    model = RegisteredModel(registry, Ledger(state_path), NAME)
    approving_entry = model.history().approving_entry(version)
    with model_lock(model):
        move_alias(
            model,
            model.entry("promoted", "x", version=version, previous="3", about=approving_entry),
        )


def test_conflict_on_previous_keeps_champion(tmp_path: Path) -> None:
    registry = create_registry(tmp_path / "state.db")
    watched = Watched(registry)

    def other_client(call: str, _: int) -> None:
        if call == "alias previous" and registry.aliases["previous"] == "3":
            registry.aliases["previous"] = "1"

    watched.before = other_client
    with pytest.raises(PromotionConflict):
        move_champion(watched, tmp_path / "state.db", "4")
    model = RegisteredModel(registry, Ledger(tmp_path / "state.db"), NAME)
    assert model.alias(CHAMPION) == model.history().serving == "4"


def test_deployed_move_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process died before it cleared the pending id; then a user moved `champion` back."""
    registry, location = create_registry(tmp_path / "state.db"), tmp_path / "state.db"
    with monkeypatch.context() as patched, contextlib.suppress(Crash):

        def die(*_: object) -> None:
            raise Crash

        patched.setattr(FencingToken, "clear_pending", die)
        move_champion(registry, location, "4")
    assert pending_moves(location) != ""
    model = RegisteredModel(registry, Ledger(location), NAME)
    model.write("deployed", "passed", version="4", about=APPROVED)
    registry.aliases["champion"] = "3"
    with model_lock(model) as finished:
        assert finished is None
    assert registry.aliases["champion"] == "3"
    assert pending_moves(location) == ""
