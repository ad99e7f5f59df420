"""Moves of the champion alias are atomic and write exactly one ledger entry."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import pytest
import sqlalchemy as sa

from gate.errors import PromotionConflict, RegistryError, RegistryUnavailable
from gate.ledger.database import LOCKS
from gate.ledger.ledger import Ledger, promotion_lock
from gate.ledger.maintenance import declare_addresses
from gate.registry import alias as registry_alias
from gate.registry.interface import CHAMPION, PREVIOUS, Tag
from gate.registry.registered_model import RegisteredModel
from gate.signing.keys import SigningKey
from gate.signing.trust import TrustedKey
from tests.ledger.rows import pending_moves, store_pending
from tests.registry.releases import NAME
from tests.registry.signed import trust_in
from tests.registry.simulator import APPROVED, Crash, CrashingLedger, Simulator, Stored, Watched


def make_model(ledger: Ledger, registry=None) -> RegisteredModel:
    registry = registry or Simulator(aliases={CHAMPION: "1"})
    registry.versions[:] = [Stored(b"", {}, "run", "") for _ in range(3)]
    return RegisteredModel(registry, ledger, "digits", cause="timer")


def move(model: RegisteredModel, to: str | None = "2") -> None:
    entry = model.entry("promoted", "because", version=to, previous="1")
    registry_alias.move_alias(model, entry)


def ledger_actions(ledger: Ledger) -> list[tuple[str, str | None]]:
    return [(entry.action, entry.version) for entry in ledger.entries()]


def has_pending_move(model: RegisteredModel) -> bool:
    return bool(pending_moves(model.ledger.state))


@pytest.mark.parametrize("to", ["2", None])
def test_move_after_a_lost_lock_is_undone(ledger, to):
    """A process that stopped before it moved the alias loses its lease to another process."""
    registry = Watched(Simulator(aliases={CHAMPION: "1"}))
    model = make_model(ledger, registry)
    second = RegisteredModel(registry.inner, Ledger(ledger.state), "digits", cause="another host")

    def overtake(call: str, _: int) -> None:
        if call in ("set_alias champion", "delete_alias") and second.history().serving == to:
            with ledger.state.writing() as connection:  # the lease has expired
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
    assert not has_pending_move(model)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_crash_at_the_ledger_entry_leaves_a_complete_move_or_none(ledger, moment):
    model = make_model(CrashingLedger(ledger.state, moment))
    with pytest.raises(Crash):
        move(model)
    assert has_pending_move(model) == (moment == "after")
    again = RegisteredModel(model.registry, ledger, "digits")
    with registry_alias.model_lock(again):
        assert ledger_actions(ledger) == [("promoted", "2")][: moment == "after"]
    assert model.alias(CHAMPION) == ("2" if moment == "after" else "1")
    assert not has_pending_move(model)


def test_pending_move_is_dropped_when_another_host_moved_the_alias(ledger):
    model = make_model(CrashingLedger(ledger.state, "after"))
    with pytest.raises(Crash):
        move(model)
    model.registry.aliases[CHAMPION] = "3"
    with registry_alias.model_lock(RegisteredModel(model.registry, ledger, "digits")) as finished:
        assert finished is None
    assert model.alias(CHAMPION) == "3"
    assert not has_pending_move(model)


def test_move_that_lost_a_race_is_not_pending(ledger):
    registry = Watched(Simulator(aliases={CHAMPION: "1"}))
    model = make_model(ledger, registry)

    def interfere(call: str, _: int) -> None:
        if call == "set_alias champion":
            registry.inner.aliases[CHAMPION] = "3"

    registry.after = interfere
    with pytest.raises(PromotionConflict):
        move(model)
    assert not has_pending_move(model)
    assert ledger_actions(ledger) == [("promoted", "2"), ("conflict", "3")]


def test_unavailable_registry_leaves_the_move_pending(ledger):
    registry = Watched(Simulator(aliases={CHAMPION: "1"}))
    model = make_model(ledger, registry)

    def break_off(call: str, _: int) -> None:
        if call == "set_alias champion":
            raise RegistryUnavailable("no answer")

    registry.after = break_off
    with pytest.raises(RegistryUnavailable):
        move(model)
    registry.after = lambda *_: None
    with registry_alias.model_lock(model):
        assert ledger_actions(ledger) == [("promoted", "2")]


def crash_after_entry(model: RegisteredModel, to: str, *, action: str = "promoted") -> str:
    """Crash a move to a version after its ledger entry, and return the id of the move."""
    ledger = CrashingLedger(model.ledger.state, "after")
    ledger.key, ledger.trust = model.ledger.key, model.ledger.trust
    with pytest.raises(Crash):
        registry_alias.move_alias(
            replace(model, ledger=ledger), move_entry(model, action, model.alias(CHAMPION), to)
        )
    return pending_moves(model.ledger.state)


def finish_and_move_again(model: RegisteredModel) -> str:
    """Finish the move and move the alias again; a second finish would move `previous` back, too."""
    operation = crash_after_entry(model, "4", action="rolled_back")
    with registry_alias.model_lock(model):
        registry_alias.move_alias(model, move_entry(model, "promoted", "4", "1"))
    return operation


def finish_and_move_by_hand(model: RegisteredModel) -> str:
    """Finish the move, then move the alias by hand, which the guard accepts without an operation."""
    operation = crash_after_entry(model, "4", action="rolled_back")
    with registry_alias.model_lock(model):
        model.registry.set_alias(NAME, CHAMPION, "1")
        model.registry.set_alias(NAME, PREVIOUS, "4")
        model.write("promoted", "by hand", version="1", previous="4")
    return operation


def finish_and_move_at_another_address(model: RegisteredModel) -> str:
    """Finish the move, then move the alias at another address of the registry."""
    operation = crash_after_entry(model, "4", action="rolled_back")
    declare_addresses(model.ledger, "http://mlflow", ["simulator"])
    model_at_new_address = replace(
        model, registry=Simulator("http://mlflow", model.registry.versions, model.registry.aliases)
    )
    with registry_alias.model_lock(model_at_new_address):
        registry_alias.move_alias(
            model_at_new_address, move_entry(model_at_new_address, "promoted", "4", "1")
        )
    return operation


def return_unknown_id(_model: RegisteredModel) -> str:
    return "forged"


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    "end",
    [
        finish_and_move_again,
        finish_and_move_by_hand,
        finish_and_move_at_another_address,
        return_unknown_id,
    ],
)
def test_restored_operation_id_of_a_finished_move_has_no_effect(ledger, tmp_path, end):
    """An attacker with write access to the database could otherwise redirect `champion`."""
    key = SigningKey.make(tmp_path / "ci.pem")
    ledger.key = key
    ledger.trust = trust_in(key, writers=(TrustedKey(**key.public.to_plain()),))
    model = model_with_history(ledger)
    operation = end(model)
    before, previous = model.history(), model.alias(PREVIOUS)
    for _ in range(2):
        store_pending(ledger.state, operation)
        model.registry.set_alias(NAME, CHAMPION, "4")
        with registry_alias.model_lock(model) as finished:
            assert finished is None
        assert not has_pending_move(model)
        assert model.history().entries == before.entries
        assert aliases(model) == ("4", previous)


def test_entries_of_other_models_do_not_end_a_pending_move(ledger):
    """Later entries of another model, another registry or a failed lock attempt are ignored."""
    model = model_with_history(ledger)
    crash_after_entry(model, "4")
    for other_model in (
        replace(model, name="letters"),
        replace(model, registry=Simulator("elsewhere")),
    ):
        other_model.write("promoted", "another one", version="7")
    model.write("conflict", "another promotion or rollback is running")
    declare_addresses(ledger, "http://mlflow", ["simulator"])
    with registry_alias.model_lock(model) as finished:
        assert finished is not None
    assert finished.version == "4"


@pytest.mark.parametrize(
    "other", [{"name": "letters"}, {"registry": Simulator("elsewhere", aliases={CHAMPION: "1"})}]
)
def test_pending_move_is_finished_only_for_its_own_model(ledger, other):
    model = make_model(CrashingLedger(ledger.state, "after"))
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
    assert not has_pending_move(model)


@pytest.mark.parametrize("quietly", [True, False])
def test_quiet_lock_attempt_writes_no_conflict_entry(ledger, monkeypatch, quietly):
    monkeypatch.setattr("gate.registry.alias.LOCK_TIMEOUT_S", 0.0)
    model = make_model(ledger)
    with (
        promotion_lock(ledger),
        pytest.raises(PromotionConflict),
        registry_alias.model_lock(model, quietly=quietly),
    ):
        pass
    assert ledger_actions(ledger) == ([] if quietly else [("conflict", None)])


def test_briefly_held_lock_is_waited_for(ledger, monkeypatch):
    monkeypatch.setattr("gate.registry.alias.LOCK_TIMEOUT_S", 300.0)
    model = make_model(ledger)
    lock = promotion_lock(ledger)
    lock.__enter__()
    threading.Timer(0.3, lock.__exit__, (None, None, None)).start()
    with registry_alias.model_lock(model):
        assert ledger_actions(ledger) == []


def test_pending_move_is_finished_at_another_registry_address(ledger):
    model = make_model(CrashingLedger(ledger.state, "after"))
    with pytest.raises(Crash):
        move(model)
    there = Simulator("http://mlflow", model.registry.versions, model.registry.aliases)
    declare_addresses(ledger, "http://mlflow", ["simulator"])
    with registry_alias.model_lock(RegisteredModel(there, ledger, "digits")):
        assert ledger_actions(ledger) == [("promoted", "2"), ("same_registry", None)]
    assert model.alias(CHAMPION) == "2"
    assert not has_pending_move(model)


def model_with_history(ledger: Ledger, registry=None, *, champion: str = "3") -> RegisteredModel:
    """Make a model whose versions 4, 1, 2 and 3 were promoted in this order.

    `champion` is the current champion and version 2 the previous one.
    """
    model = make_model(ledger, registry or Simulator())
    model.registry.versions.append(Stored(b"", {}, "run", ""))
    for version in ("4", "1", "2", "3"):
        model.write("promoted", "passed", version=version, about=APPROVED)
    for alias, version in ((CHAMPION, champion), (PREVIOUS, "2")):
        model.registry.set_alias(NAME, alias, version)
    return model


def move_entry(model: RegisteredModel, action: str, old: str | None, new: str | None):
    approving_entry = model.history().approving_entry(new) if new else None
    return model.entry(action, "because", version=new, previous=old, about=approving_entry)


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
"""Action of the entry, old champion, new champion, and `previous` afterwards."""


@pytest.mark.parametrize(("action", "old", "new", "previous"), MOVES.values(), ids=list(MOVES))
def test_previous_points_at_the_next_rollback_target(ledger, action, old, new, previous):
    model = model_with_history(ledger)
    written = registry_alias.move_alias(model, move_entry(model, action, old, new))
    assert aliases(model) == (new, previous)
    assert ledger.entries()[-1] == written
    assert (written.version, written.previous_version, written.cause) == (new, old, "timer")
    assert written.operation is not None
    assert not has_pending_move(model)


def change_nothing(model: RegisteredModel) -> None:
    """Leave version 3 eligible."""


def reject_by_tag(model: RegisteredModel) -> None:
    model.registry.set_tag(NAME, "3", key=Tag.REVIEW, value="rejected")


def write_rollback_entry(model: RegisteredModel) -> None:
    """Write the ledger entry without the tag."""
    model.write("rolled_back", "wrong", version="2", previous="3")


def serve_version_without_entry(model: RegisteredModel) -> None:
    """Make version 5, which has no ledger entry, the champion."""
    model.registry.versions.append(Stored(b"", {}, "run", ""))
    model.registry.set_alias(NAME, CHAMPION, "5")


def set_rollback_tag(model: RegisteredModel) -> None:
    """Set the tag without the ledger entry."""
    model.registry.set_tag(NAME, "3", key=Tag.ROLLED_BACK, value="2026: wrong")


@pytest.mark.parametrize(
    ("tamper", "kept"),
    [
        (change_nothing, True),
        (reject_by_tag, False),
        (write_rollback_entry, False),
        (set_rollback_tag, True),
        (serve_version_without_entry, False),
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
    """Setting the alias again would send a webhook event without a change."""
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
        assert not has_pending_move(model)
        assert len(ledger.entries()) == before + written
        assert aliases(model) == ((new, previous) if written else (old, "2"))
    if not written:  # the crash came before the entry: the move can be repeated
        registry_alias.move_alias(model, entry)
        assert aliases(model) == (new, previous)
        assert len(ledger.entries()) == before + 1


def test_failure_to_move_previous_does_not_block_later_moves(ledger):
    """A permanent error is raised once and then dropped; an unavailable registry is retried."""
    registry = Watched(Simulator())
    model = model_with_history(ledger, registry)
    errors: list[RegistryError] = [RegistryUnavailable("away"), RegistryError("it was deleted")]

    def refuse(call: str, _: int) -> None:
        if call == "set_alias previous" and errors:
            raise errors[0]

    registry.before = refuse
    with pytest.raises(RegistryUnavailable):
        registry_alias.move_alias(model, move_entry(model, "reverted", "3", "2"))
    for expected in (RegistryUnavailable, RegistryError):
        with pytest.raises(expected), registry_alias.model_lock(model):
            pass
        errors.pop(0)
    with registry_alias.model_lock(model) as finished:
        assert finished is None
    assert aliases(model) == ("3", "2")  # as if the alias had been moved back by hand
