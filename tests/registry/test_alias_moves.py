"""Moves of the champion alias: atomic, exactly once, one ledger entry each."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from gate.errors import PromotionConflict, RegistryError, RegistryUnavailable, ServiceError
from gate.ledger.database import LOCKS
from gate.ledger.ledger import Ledger, promotion_lock
from gate.ledger.maintenance import declare_addresses
from gate.registry import alias as registry_alias
from gate.registry.interface import CHAMPION, PREVIOUS, Tag
from gate.registry.registered_model import RegisteredModel
from gate.signing.keys import SigningKey
from gate.signing.trust import TrustedKey
from tests.ledger.rows import pending_in, put_pending
from tests.registry.releases import NAME
from tests.registry.signed import trust_in
from tests.registry.simulator import APPROVED, Crash, CrashingLedger, Simulator, Stored, Watched


def model_of(ledger: Ledger, registry=None) -> RegisteredModel:
    registry = registry or Simulator(aliases={CHAMPION: "1"})
    registry.versions[:] = [Stored(b"", {}, "run", "") for _ in range(3)]
    return RegisteredModel(registry, ledger, "digits", cause="timer")


def move(model: RegisteredModel, to: str | None = "2") -> None:
    entry = model.entry("promoted", "because", version=to, previous="1")
    registry_alias.move_alias(model, entry)


def ledger_actions(ledger: Ledger) -> list[tuple[str, str | None]]:
    return [(entry.action, entry.version) for entry in ledger.entries()]


def pending(model: RegisteredModel) -> bool:
    return bool(pending_in(model.ledger.state))


@pytest.mark.parametrize("to", ["2", None])
def test_move_after_a_lost_lock_is_undone(ledger, to):
    """As of a process that was stopped just before it moved the alias, for longer than its lease."""
    registry = Watched(Simulator(aliases={CHAMPION: "1"}))
    model = model_of(ledger, registry)
    second = RegisteredModel(registry.inner, Ledger(ledger.state), "digits", cause="another host")

    def overtake(call: str, _: int) -> None:
        if call in ("set_alias champion", "delete_alias") and second.history().serving == to:
            with ledger.state.writing() as connection:  # its lease is over
                connection.execute(sa.update(LOCKS).values(leased_until=0.0))
            with registry_alias.model_lock(second):
                assert second.alias(CHAMPION) == to
                registry_alias.move_alias(
                    second, second.entry("promoted", "because", version="3", previous=to)
                )

    with pytest.raises(PromotionConflict, match="was lost"), registry_alias.model_lock(model):
        registry.before = overtake
        move(model, to)
    assert model.alias(CHAMPION) == "3"
    assert ledger_actions(ledger) == [("promoted", to), ("promoted", "3")]
    assert not pending(model)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_crash_at_the_ledger_entry_leaves_a_complete_move_or_none(ledger, moment):
    model = model_of(CrashingLedger(ledger.state, moment))
    with pytest.raises(Crash):
        move(model)
    assert pending(model) == (moment == "after")
    again = RegisteredModel(model.registry, ledger, "digits")
    with registry_alias.model_lock(again):
        assert ledger_actions(ledger) == [("promoted", "2")][: moment == "after"]
    assert model.alias(CHAMPION) == ("2" if moment == "after" else "1")
    assert not pending(model)


def test_pending_move_is_dropped_when_another_host_moved_the_alias(ledger):
    model = model_of(CrashingLedger(ledger.state, "after"))
    with pytest.raises(Crash):
        move(model)
    model.registry.aliases[CHAMPION] = "3"
    with registry_alias.model_lock(RegisteredModel(model.registry, ledger, "digits")) as finished:
        assert finished is None
    assert model.alias(CHAMPION) == "3"
    assert not pending(model)


def test_move_that_lost_a_race_is_not_pending(ledger):
    registry = Watched(Simulator(aliases={CHAMPION: "1"}))
    model = model_of(ledger, registry)

    def interfere(call: str, _: int) -> None:
        if call == "set_alias champion":
            registry.inner.aliases[CHAMPION] = "3"

    registry.after = interfere
    with pytest.raises(PromotionConflict):
        move(model)
    assert not pending(model)
    assert ledger_actions(ledger) == [("promoted", "2"), ("conflict", "3")]


def test_unavailable_registry_leaves_the_move_pending(ledger):
    registry = Watched(Simulator(aliases={CHAMPION: "1"}))
    model = model_of(ledger, registry)

    def break_off(call: str, _: int) -> None:
        if call == "set_alias champion":
            raise RegistryUnavailable("no answer")

    registry.after = break_off
    with pytest.raises(RegistryUnavailable):
        move(model)
    registry.after = lambda *_: None
    with registry_alias.model_lock(model):
        assert ledger_actions(ledger) == [("promoted", "2")]


def crashed(model: RegisteredModel, to: str, *, action: str = "promoted") -> str:
    """A move to a version crashes after its entry; gives its id."""
    ledger = CrashingLedger(model.ledger.state, "after")
    ledger.key, ledger.trust = model.ledger.key, model.ledger.trust
    with pytest.raises(Crash):
        registry_alias.move_alias(
            replace(model, ledger=ledger), move_entry(model, action, model.alias(CHAMPION), to)
        )
    return pending_in(model.ledger.state)


def finished_then_moved_again(model: RegisteredModel) -> str:
    """Once more it would take `previous` back, too."""
    operation = crashed(model, "4", action="rolled_back")
    with registry_alias.model_lock(model):
        registry_alias.move_alias(model, move_entry(model, "promoted", "4", "1"))
    return operation


def moved_by_hand(model: RegisteredModel) -> str:
    """The guard accepts a move by hand without an operation."""
    operation = crashed(model, "4", action="rolled_back")
    with registry_alias.model_lock(model):
        model.registry.set_alias(NAME, CHAMPION, "1")
        model.registry.set_alias(NAME, PREVIOUS, "4")
        model.write("promoted", "by hand", version="1", previous="4")
    return operation


def moved_at_another_address(model: RegisteredModel) -> str:
    """Later moves are those under the registry's new name."""
    operation = crashed(model, "4", action="rolled_back")
    declare_addresses(model.ledger, "http://mlflow", ["simulator"])
    there = replace(
        model, registry=Simulator("http://mlflow", model.registry.versions, model.registry.aliases)
    )
    with registry_alias.model_lock(there):
        registry_alias.move_alias(there, move_entry(there, "promoted", "4", "1"))
    return operation


def never_written(_model: RegisteredModel) -> str:
    return "forged"


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    "end", [finished_then_moved_again, moved_by_hand, moved_at_another_address, never_written]
)
def test_restored_operation_id_of_a_finished_move_has_no_effect(ledger, tmp_path, end):
    """Whoever may write the database does that, and then has `champion` pointed where it tells."""
    key = SigningKey.make(tmp_path / "ci.pem")
    ledger.key = key
    ledger.trust = trust_in(key, writers=(TrustedKey(**key.public.to_plain()),))
    model = model_with_history(ledger)
    operation = end(model)
    before, previous = model.history(), model.alias(PREVIOUS)
    for _ in range(2):
        put_pending(ledger.state, operation)
        model.registry.set_alias(NAME, CHAMPION, "4")
        with registry_alias.model_lock(model) as finished:
            assert finished is None
        assert not pending(model)
        assert model.history().entries == before.entries
        assert aliases(model) == ("4", previous)


def test_entries_of_other_models_do_not_end_a_pending_move(ledger):
    """Other models, the same model elsewhere, and whoever waited for the lock in vain."""
    model = model_with_history(ledger)
    crashed(model, "4")
    for of in (replace(model, name="letters"), replace(model, registry=Simulator("elsewhere"))):
        of.write("promoted", "another one", version="7")
    model.write("conflict", "another promotion or rollback is running")
    declare_addresses(ledger, "http://mlflow", ["simulator"])
    with registry_alias.model_lock(model) as finished:
        assert finished is not None
    assert finished.version == "4"


@pytest.mark.parametrize(
    "other", [{"name": "letters"}, {"registry": Simulator("elsewhere", aliases={CHAMPION: "1"})}]
)
def test_pending_move_is_finished_only_for_its_own_model(ledger, other):
    model = model_of(CrashingLedger(ledger.state, "after"))
    with pytest.raises(Crash):
        move(model)
    there = replace(model, ledger=ledger, **other)
    there.registry.versions[:] = model.registry.versions
    with registry_alias.model_lock(there) as finished:
        assert finished is None
        registry_alias.move_alias(
            there, there.entry("promoted", "because", version="3", previous="1")
        )
    there.registry.aliases[CHAMPION] = "1"
    with registry_alias.model_lock(replace(model, ledger=ledger)) as finished:
        assert finished is not None
    assert model.alias(CHAMPION) == "2"
    assert not pending(model)


@pytest.mark.parametrize("quietly", [True, False])
def test_quiet_lock_attempt_writes_no_conflict_entry(ledger, monkeypatch, quietly):
    monkeypatch.setattr("gate.registry.alias.LOCK_TIMEOUT_S", 0.0)
    model = model_of(ledger)
    with (
        promotion_lock(ledger),
        pytest.raises(PromotionConflict),
        registry_alias.model_lock(model, quietly=quietly),
    ):
        pass
    assert ledger_actions(ledger) == ([] if quietly else [("conflict", None)])


def test_briefly_held_lock_is_waited_for(ledger, monkeypatch):
    monkeypatch.setattr("gate.registry.alias.LOCK_TIMEOUT_S", 300.0)
    model = model_of(ledger)
    lock = promotion_lock(ledger)
    lock.__enter__()
    threading.Timer(0.3, lock.__exit__, (None, None, None)).start()
    with registry_alias.model_lock(model):
        assert ledger_actions(ledger) == []


def test_pending_move_is_finished_at_another_registry_address(ledger):
    model = model_of(CrashingLedger(ledger.state, "after"))
    with pytest.raises(Crash):
        move(model)
    there = Simulator("http://mlflow", model.registry.versions, model.registry.aliases)
    declare_addresses(ledger, "http://mlflow", ["simulator"])
    with registry_alias.model_lock(RegisteredModel(there, ledger, "digits")):
        assert ledger_actions(ledger) == [("promoted", "2"), ("same_registry", None)]
    assert model.alias(CHAMPION) == "2"
    assert not pending(model)


def model_with_history(ledger: Ledger, registry=None, *, champion: str = "3") -> RegisteredModel:
    """Versions 1 to 4 served one after the other; `champion` serves, 2 served before."""
    model = model_of(ledger, registry or Simulator())
    model.registry.versions.append(Stored(b"", {}, "run", ""))
    for version in ("4", "1", "2", "3"):
        model.write("promoted", "passed", version=version, about=APPROVED)
    for alias, version in ((CHAMPION, champion), (PREVIOUS, "2")):
        model.registry.set_alias(NAME, alias, version)
    return model


def move_entry(model: RegisteredModel, action: str, old: str | None, new: str | None):
    vouching = model.history().approving_entry(new) if new else None
    return model.entry(action, "because", version=new, previous=old, about=vouching)


def aliases(model: RegisteredModel) -> tuple[str | None, str | None]:
    return model.alias(CHAMPION), model.alias(PREVIOUS)


MOVES = {
    "a promotion": ("promoted", "3", "4", "3"),
    "of what a rollback would go to": ("promoted", "3", "2", "3"),
    "a rollback": ("rolled_back", "3", "2", "3"),
    "a revert to another": ("reverted", "3", "1", "2"),
    "a revert to what a rollback would go to": ("reverted", "3", "2", "1"),
    "a revert to nothing": ("reverted", "3", None, "2"),
    "to where it is": ("promoted", "3", "3", "2"),
}
"""The line's action, from where, to where; where `previous` is afterwards."""


@pytest.mark.parametrize(("action", "old", "new", "previous"), MOVES.values(), ids=list(MOVES))
def test_previous_points_at_the_next_rollback_target(ledger, action, old, new, previous):
    model = model_with_history(ledger)
    written = registry_alias.move_alias(model, move_entry(model, action, old, new))
    assert aliases(model) == (new, previous)
    assert ledger.entries()[-1] == written
    assert (written.version, written.previous_version, written.cause) == (new, old, "timer")
    assert written.operation is not None
    assert not pending(model)


def nothing_against_it(model: RegisteredModel) -> None:
    """Said against version 3."""


def rejected_by_tag(model: RegisteredModel) -> None:
    model.registry.set_tag(NAME, "3", key=Tag.REVIEW, value="rejected")


def rolled_back(model: RegisteredModel) -> None:
    """The line alone, without the tag."""
    model.write("rolled_back", "wrong", version="2", previous="3")


def not_in_ledger(model: RegisteredModel) -> None:
    """The ledger knows nothing of version 5, which serves."""
    model.registry.versions.append(Stored(b"", {}, "run", ""))
    model.registry.set_alias(NAME, CHAMPION, "5")


def rollback_tag_only(model: RegisteredModel) -> None:
    """The tag alone, without the line."""
    model.registry.set_tag(NAME, "3", key=Tag.ROLLED_BACK, value="2026: wrong")


@pytest.mark.parametrize(
    ("tamper", "kept"),
    [
        (nothing_against_it, True),
        (rejected_by_tag, False),
        (rolled_back, False),
        (rollback_tag_only, True),
        (not_in_ledger, False),
    ],
)
def test_ineligible_old_champion_is_not_kept_as_previous(ledger, tamper, kept):
    model = model_with_history(ledger)
    tamper(model)
    registry_alias.move_alias(model, move_entry(model, "promoted", model.alias(CHAMPION), "4"))
    assert aliases(model) == ("4", "3" if kept else "2")


def test_previous_skips_a_rejected_version_after_a_revert(ledger):
    model = model_with_history(ledger)
    model.write("rejected", "a reviewer's no", version="1")
    registry_alias.move_alias(model, move_entry(model, "reverted", "3", "2"))
    assert aliases(model) == ("2", "4")


def test_alias_that_is_already_right_is_not_set_again(ledger):
    """Setting it again would fire an event that tells of nothing."""
    registry = Watched(Simulator())
    model = model_with_history(ledger, registry, champion="4")
    registry.inner.aliases[PREVIOUS] = "3"
    registry.calls.clear()
    registry_alias.move_alias(model, move_entry(model, "promoted", "4", "4"))
    registry_alias.move_alias(model, move_entry(model, "rolled_back", "4", "4"))
    assert not [call for call in registry.calls if call.startswith(("set_alias", "delete_"))]


@pytest.mark.rows(7)
@pytest.mark.parametrize("moment", ["after", pytest.param("before", marks=pytest.mark.proof)])
@pytest.mark.parametrize("call", range(18))
@pytest.mark.parametrize("kind", MOVES)
def test_crash_leaves_the_old_champion_or_a_move_that_is_finished_once(ledger, kind, call, moment):
    action, old, new, previous = MOVES[kind]
    registry = Watched(Simulator())
    model = model_with_history(ledger, registry)
    entry, before = move_entry(model, action, old, new), len(ledger.entries())
    registry.calls.clear()

    def crash(_: str, at: int) -> None:
        if at == call:
            raise Crash

    setattr(registry, moment, crash)
    with contextlib.suppress(Crash):
        registry_alias.move_alias(model, entry)
    written = len(ledger.entries()) - before
    setattr(registry, moment, lambda *_: None)
    for _ in range(2):
        with registry_alias.model_lock(model):
            pass
        assert not pending(model)
        assert len(ledger.entries()) == before + written
        assert aliases(model) == ((new, previous) if written else (old, "2"))
    if not written:  # it is simply done again
        registry_alias.move_alias(model, entry)
        assert aliases(model) == (new, previous)
        assert len(ledger.entries()) == before + 1


def test_failure_to_move_previous_does_not_block_later_moves(ledger):
    """The registry refuses for good: that is said once. While it is away, it is tried again."""
    registry = Watched(Simulator())
    model = model_with_history(ledger, registry)
    trouble: list[RegistryError] = [RegistryUnavailable("away"), RegistryError("it was deleted")]

    def refuse(call: str, _: int) -> None:
        if call == "set_alias previous" and trouble:
            raise trouble[0]

    registry.before = refuse
    with pytest.raises(RegistryUnavailable):
        registry_alias.move_alias(model, move_entry(model, "reverted", "3", "2"))
    for expected in (RegistryUnavailable, RegistryError):
        with pytest.raises(expected), registry_alias.model_lock(model):
            pass
        trouble.pop(0)
    with registry_alias.model_lock(model) as finished:
        assert finished is None
    assert aliases(model) == ("3", "2")  # as if somebody had moved it back


def test_uncreatable_database_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ServiceError, match="cannot create the database"),
        promotion_lock(Ledger(tmp_path / "file" / "ledger.db")),
    ):
        pass
