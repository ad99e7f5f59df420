from __future__ import annotations

import contextlib
import threading

import pytest

from gate.errors import EvidenceError, PromotionConflict, RegistryUnavailable
from gate.registry.addresses import declare
from gate.registry.journal import Journal
from gate.registry.ledger import Ledger
from gate.registry.lock import promotion_lock
from gate.registry.port import CHAMPION
from gate.registry.registered_model import Desk
from tests.registry.simulator import Crash, CrashingLedger, Simulator, Stored, Watched


def desk_of(ledger: Ledger, registry=None) -> Desk:
    registry = registry or Simulator(aliases={CHAMPION: "1"})
    registry.versions[:] = [Stored(b"", {}, "run", "") for _ in range(3)]
    return Desk(registry, ledger, "digits", cause="timer")


def move(desk: Desk, to: str | None = "2") -> None:
    entry = desk.entry("promoted", "because", version=to, previous="1")
    desk.move_champion(to, seen="1", entry=entry)


def lines(ledger: Ledger) -> list[tuple[str, str | None]]:
    return [(entry.action, entry.version) for entry in ledger.entries()]


def pending(desk: Desk) -> bool:
    return Journal(desk.ledger, desk.model, desk.registry.identity).pending() is not None


def test_a_move_is_one_line_with_its_operation(ledger):
    desk = desk_of(ledger)
    move(desk)
    (line,) = ledger.entries()
    assert line.operation is not None
    assert line.cause == "timer"
    assert desk.alias(CHAMPION) == "2"
    assert not pending(desk)


def test_champion_can_be_taken_away(ledger):
    desk = desk_of(ledger)
    move(desk, None)
    assert desk.alias(CHAMPION) is None
    assert lines(ledger) == [("promoted", None)]


@pytest.mark.parametrize("to", ["2", None])
@pytest.mark.parametrize("call", range(6))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_at_any_call_leaves_one_line_for_a_move_that_happened(ledger, to, call, moment):
    registry = Watched(Simulator(aliases={CHAMPION: "1"}))

    def crash(_: str, at: int) -> None:
        if at == call:
            raise Crash

    setattr(registry, moment, crash)
    desk = desk_of(ledger, registry)
    with contextlib.suppress(Crash):
        move(desk, to)
    moved = registry.inner.aliases.get(CHAMPION) == to
    setattr(registry, moment, lambda *_: None)
    for _ in range(2):
        with desk.alone():
            assert lines(ledger) == ([("promoted", to)] if moved else [])
            assert not pending(desk)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_at_the_line_leaves_one_line(ledger, moment):
    desk = desk_of(CrashingLedger(ledger.path, moment))
    with pytest.raises(Crash):
        move(desk)
    assert pending(desk)
    again = Desk(desk.registry, ledger, "digits")
    with again.alone():
        assert lines(ledger) == [("promoted", "2")]
    assert not pending(desk)


def test_nobody_claims_a_move_that_nobody_knows_of(ledger):
    desk = desk_of(CrashingLedger(ledger.path, "before"))
    with pytest.raises(Crash):
        move(desk)
    desk.registry.aliases[CHAMPION] = "3"  # somebody else, in the meantime
    with Desk(desk.registry, ledger, "digits").alone():
        pass
    (line,) = ledger.entries()
    assert (line.action, line.version) == ("conflict", "3")
    assert "nobody knows" in line.reason


def test_a_move_that_lost_a_race_is_over(ledger):
    registry = Watched(Simulator(aliases={CHAMPION: "1"}))
    desk = desk_of(ledger, registry)

    def interfere(call: str, _: int) -> None:
        if call == "set_alias champion":
            registry.inner.aliases[CHAMPION] = "3"

    registry.after = interfere
    with pytest.raises(PromotionConflict):
        move(desk)
    assert not pending(desk)
    assert lines(ledger) == [("conflict", "3")]


def test_a_server_that_broke_off_leaves_the_move_open(ledger):
    registry = Watched(Simulator(aliases={CHAMPION: "1"}))
    desk = desk_of(ledger, registry)

    def break_off(call: str, _: int) -> None:
        if call == "set_alias champion":
            raise RegistryUnavailable("no answer")

    registry.after = break_off
    with pytest.raises(RegistryUnavailable):
        move(desk)
    registry.after = lambda *_: None
    with desk.alone():
        assert lines(ledger) == [("promoted", "2")]


def test_moves_of_other_models_are_others(ledger):
    desk = desk_of(CrashingLedger(ledger.path, "before"))
    with pytest.raises(Crash):
        move(desk)
    with Desk(desk.registry, ledger, "letters").alone():
        assert lines(ledger) == []
    assert pending(desk)


def test_a_spoiled_journal_is_an_error(ledger):
    desk = desk_of(CrashingLedger(ledger.path, "before"))
    with pytest.raises(Crash):
        move(desk)
    Journal(ledger, "digits", desk.registry.identity).path.write_text("{")
    with pytest.raises(EvidenceError), Desk(desk.registry, ledger, "digits").alone():
        pass


@pytest.mark.parametrize("quietly", [True, False])
def test_who_comes_again_writes_no_conflict(ledger, monkeypatch, quietly):
    monkeypatch.setattr("gate.registry.registered_model.PATIENCE_S", 0.0)
    desk = desk_of(ledger)
    with promotion_lock(ledger), pytest.raises(PromotionConflict), desk.alone(quietly=quietly):
        pass
    assert lines(ledger) == ([] if quietly else [("conflict", None)])


def test_a_short_look_of_another_process_is_waited_for(ledger):
    desk = desk_of(ledger)
    lock = promotion_lock(ledger)
    lock.__enter__()
    threading.Timer(0.3, lock.__exit__, (None, None, None)).start()
    with desk.alone():
        assert lines(ledger) == []


def test_a_move_that_was_begun_under_another_address_is_finished(ledger):
    desk = desk_of(CrashingLedger(ledger.path, "before"))
    with pytest.raises(Crash):
        move(desk)
    there = Simulator(identity="http://mlflow", aliases=desk.registry.aliases)
    declare(ledger, "http://mlflow", ["simulator"])
    with Desk(there, ledger, "digits").alone():
        assert lines(ledger) == [("promoted", "2")]
    assert not pending(desk)
