"""What serves is moved in one place: whole, exactly once, and told in one line."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from gate.errors import PromotionConflict, RegistryError, RegistryUnavailable, ServiceError
from gate.ledger.database import LOCKS, NOTES
from gate.ledger.journal import Journal
from gate.ledger.ledger import Ledger, promotion_lock
from gate.ledger.maintenance import declare_addresses
from gate.ledger.notes import Notes
from gate.registry import alias as registry_alias
from gate.registry.interface import CHAMPION, PREVIOUS, Tag
from gate.registry.registered_model import RegisteredModel
from gate.signing.keys import SigningKey
from gate.signing.trust import TrustedKey
from gate.storage.digest import Digest
from tests.ledger.rows import notes, put, rows, spoil_note
from tests.registry.releases import NAME
from tests.registry.signed import trust_in
from tests.registry.simulator import Crash, CrashingLedger, Simulator, Stored, Watched


def model_of(ledger: Ledger, registry=None) -> RegisteredModel:
    registry = registry or Simulator(aliases={CHAMPION: "1"})
    registry.versions[:] = [Stored(b"", {}, "run", "") for _ in range(3)]
    return RegisteredModel(registry, ledger, "digits", cause="timer")


def move(model: RegisteredModel, to: str | None = "2") -> None:
    entry = model.entry("promoted", "because", version=to, previous="1")
    registry_alias.move_alias(model, entry)


def lines(ledger: Ledger) -> list[tuple[str, str | None]]:
    return [(entry.action, entry.version) for entry in ledger.entries()]


def _journal(model: RegisteredModel) -> Journal:
    return Journal(model.ledger, model=model.name, registry=model.registry.identity)


def pending(model: RegisteredModel) -> bool:
    return _journal(model).pending() is not None


def test_a_move_is_one_line_with_its_operation(ledger):
    model = model_of(ledger)
    move(model)
    (line,) = ledger.entries()
    assert line.operation is not None
    assert line.cause == "timer"
    assert model.alias(CHAMPION) == "2"
    assert not pending(model)


def test_champion_can_be_taken_away(ledger):
    model = model_of(ledger)
    move(model, None)
    assert model.alias(CHAMPION) is None
    assert lines(ledger) == [("promoted", None)]


@pytest.mark.rows(5)
@pytest.mark.parametrize("to", ["2", None])
@pytest.mark.parametrize("call", range(6))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_at_any_call_leaves_one_line_for_a_move_that_happened(ledger, to, call, moment):
    registry = Watched(Simulator(aliases={CHAMPION: "1"}))

    def crash(_: str, at: int) -> None:
        if at == call:
            raise Crash

    setattr(registry, moment, crash)
    model = model_of(ledger, registry)
    with contextlib.suppress(Crash):
        move(model, to)
    moved = registry.inner.aliases.get(CHAMPION) == to
    setattr(registry, moment, lambda *_: None)
    dropped = [("conflict", "1")] if pending(model) else []
    for _ in range(2):
        with registry_alias.model_lock(model):
            assert lines(ledger) == ([("promoted", to)] if moved else dropped)
            assert not pending(model)


@pytest.mark.parametrize("to", ["2", None])
def test_a_move_that_comes_when_the_lock_was_lost_is_taken_back(ledger, to):
    """As of a process that was stopped just before it moved the alias, for longer than its lease."""
    registry = Watched(Simulator(aliases={CHAMPION: "1"}))
    model = model_of(ledger, registry)
    other = RegisteredModel(registry.inner, Ledger(ledger.state), "digits", cause="another host")

    def overtake(call: str, _: int) -> None:
        if call in ("set_alias champion", "delete_alias") and not other.history().serving:
            with ledger.state.writing() as connection:  # its lease is over
                connection.execute(sa.update(LOCKS).values(leased_until=0.0))
            with registry_alias.model_lock(other):
                move(other, "3")

    with pytest.raises(PromotionConflict, match="was lost"), registry_alias.model_lock(model):
        registry.before = overtake
        move(model, to)
    assert model.alias(CHAMPION) == "3"
    assert lines(ledger) == [("conflict", "1"), ("promoted", "3"), ("conflict", to)]
    assert not pending(model)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_at_the_line_leaves_one_line(ledger, moment):
    model = model_of(CrashingLedger(ledger.state, moment))
    with pytest.raises(Crash):
        move(model)
    assert pending(model)
    again = RegisteredModel(model.registry, ledger, "digits")
    with registry_alias.model_lock(again):
        assert lines(ledger) == [("promoted", "2")]
    assert not pending(model)


def test_nobody_claims_a_move_that_nobody_knows_of(ledger):
    model = model_of(CrashingLedger(ledger.state, "before"))
    with pytest.raises(Crash):
        move(model)
    model.registry.aliases[CHAMPION] = "3"  # somebody else, in the meantime
    with registry_alias.model_lock(RegisteredModel(model.registry, ledger, "digits")):
        pass
    (line,) = ledger.entries()
    assert (line.action, line.version) == ("conflict", "3")
    assert "nobody knows" in line.reason


def test_a_move_that_lost_a_race_is_over(ledger):
    registry = Watched(Simulator(aliases={CHAMPION: "1"}))
    model = model_of(ledger, registry)

    def interfere(call: str, _: int) -> None:
        if call == "set_alias champion":
            registry.inner.aliases[CHAMPION] = "3"

    registry.after = interfere
    with pytest.raises(PromotionConflict):
        move(model)
    assert not pending(model)
    assert lines(ledger) == [("conflict", "3")]


def test_a_server_that_broke_off_leaves_the_move_open(ledger):
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
        assert lines(ledger) == [("promoted", "2")]


def _kept(ledger: Ledger) -> Callable[[], None]:
    """What somebody does who kept the notes as they are now: he puts them back, signatures and
    all."""
    with ledger.state.reading() as connection:
        rows = [row._asdict() for row in connection.execute(sa.select(NOTES))]
    assert rows

    def put_back() -> None:
        with ledger.state.writing() as connection:
            connection.execute(sa.delete(NOTES))
            connection.execute(sa.insert(NOTES), rows)

    return put_back


def crashed(
    model: RegisteredModel, to: str, *, moment: str = "before", action: str = "promoted"
) -> Callable[[], None]:
    """A move to a version crashes before, or after, its line; gives what puts its note back."""
    ledger = CrashingLedger(model.ledger.state, moment)
    ledger.key, ledger.trust = model.ledger.key, model.ledger.trust
    with pytest.raises(Crash):
        registry_alias.move_alias(
            replace(model, ledger=ledger), line(model, action, model.alias(CHAMPION), to)
        )
    return _kept(model.ledger)


def finished_and_moved_on(model: RegisteredModel) -> Callable[[], None]:
    """Once more it would take `previous` back, too."""
    put_back = crashed(model, "4", moment="after", action="rolled_back")
    with registry_alias.model_lock(model):
        registry_alias.move_alias(model, line(model, "promoted", "4", "1"))
    return put_back


def finished_late_and_moved_on(model: RegisteredModel) -> Callable[[], None]:
    put_back = crashed(model, "4", action="rolled_back")
    with registry_alias.model_lock(model):
        registry_alias.move_alias(model, line(model, "promoted", "4", "1"))
    return put_back


def moved_on_by_hand(model: RegisteredModel) -> Callable[[], None]:
    """The guard takes a move by hand without a journal."""
    put_back = crashed(model, "4", action="rolled_back")
    with registry_alias.model_lock(model):
        model.registry.set_alias(NAME, CHAMPION, "1")
        model.registry.set_alias(NAME, PREVIOUS, "4")
        model.write("promoted", "by hand", version="1", previous="4")
    return put_back


def dropped(model: RegisteredModel) -> Callable[[], None]:
    put_back = crashed(model, "4")
    model.registry.set_alias(NAME, CHAMPION, "3")
    with registry_alias.model_lock(model):
        pass
    return put_back


def dropped_by_a_race(model: RegisteredModel) -> Callable[[], None]:
    registry, puts = Watched(model.registry), []

    def interfere(call: str, _: int) -> None:
        if call == "set_alias champion":
            puts.append(_kept(model.ledger))
            registry.inner.set_alias(NAME, CHAMPION, "1")

    registry.after = interfere
    with pytest.raises(PromotionConflict):
        registry_alias.move_alias(
            replace(model, registry=registry), line(model, "promoted", "3", "4")
        )
    return puts[0]


def set_aside(model: RegisteredModel) -> Callable[[], None]:
    put_back = crashed(model, "4")
    model.registry.set_alias(NAME, CHAMPION, "3")
    spoil_note(model.ledger.state, _journal(model).name, "{")
    with registry_alias.model_lock(model):
        pass
    return put_back


def kept_out(model: RegisteredModel) -> Callable[[], None]:
    """The note is taken away before anybody finishes the move, and comes back after a no."""
    put_back = crashed(model, "4")
    with model.ledger.state.writing() as connection:
        connection.execute(sa.delete(NOTES))
    model.registry.set_alias(NAME, CHAMPION, "3")
    model.write("rejected", "a reviewer's no", version="4")
    return put_back


def under_the_other_address(model: RegisteredModel) -> Callable[[], None]:
    """Later moves are those under the registry's new name."""
    put_back = crashed(model, "4", moment="after", action="rolled_back")
    declare_addresses(model.ledger, "http://mlflow", ["simulator"])
    there = replace(
        model, registry=Simulator("http://mlflow", model.registry.versions, model.registry.aliases)
    )
    with registry_alias.model_lock(there):
        registry_alias.move_alias(there, line(there, "promoted", "4", "1"))
    return put_back


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    "end",
    [
        finished_and_moved_on, finished_late_and_moved_on, moved_on_by_hand, dropped,
        dropped_by_a_race, set_aside, kept_out, under_the_other_address,
    ],
)  # fmt: skip
@pytest.mark.parametrize("old", [False, True])
def test_a_note_that_is_put_back_finishes_nothing(ledger, tmp_path, end, old):
    """Whoever may write the database does that, and then has `champion` pointed where it tells.
    An older version's note has the same signature, and says nothing of the ledger's end."""
    key = SigningKey.make(tmp_path / "ci.pem")
    ledger.key = key
    ledger.trust = trust_in(key, writers=(TrustedKey(**key.public.to_plain()),))
    model = vouched(ledger)
    put_back = end(model)
    before, previous = model.history(), model.alias(PREVIOUS)
    for _ in range(2):
        put_back()
        if old:
            _as_of_an_older_version(model)
        model.registry.set_alias(NAME, CHAMPION, "4")
        with registry_alias.model_lock(model) as finished:
            assert finished is None
        assert not pending(model)
        since = model.history().entries[len(before.entries) :]
        assert {entry.action for entry in since} <= {"conflict"}
        assert model.alias(PREVIOUS) == previous


def _as_of_an_older_version(model: RegisteredModel) -> None:
    """What it wrote, a minute ago."""
    name, state = _journal(model).name, model.ledger.state
    fields = json.loads(notes(state)[name])
    for later in ("lines", "head"):
        fields.pop(later, None)
    fields["entry"]["at"] = (datetime.now(UTC) - timedelta(minutes=1)).isoformat()
    Notes(model.ledger).write(name, json.dumps(fields))


@pytest.mark.parametrize("lines_after", [0, 2, 5])
def test_a_note_of_another_ledger_finishes_nothing(ledger, tmp_path, lines_after):
    """Signed by the same key: of another ledger, or of the same before it was made shorter."""
    model = vouched(ledger)
    put_back = crashed(model, "4")
    kept = rows(ledger.state)
    put(ledger.state, [])
    for number in range(lines_after):
        model.write("refused", f"another past {number}", version="9")
    put_back()
    with registry_alias.model_lock(model) as finished:
        assert finished is None
    (*_, last) = ledger.entries()
    assert last.action == "conflict"
    assert f"the ledger ended at line {len(kept)} with digest" in last.reason
    assert "promoted" not in [entry.action for entry in ledger.entries()]


def test_what_others_write_meanwhile_ends_no_move(ledger):
    """Other models, the same model elsewhere, and whoever waited for the lock in vain."""
    model = vouched(ledger)
    crashed(model, "4")
    for of in (replace(model, name="letters"), replace(model, registry=Simulator("elsewhere"))):
        of.write("promoted", "another one", version="7")
    model.write("conflict", "another promotion is under way")
    declare_addresses(ledger, "http://mlflow", ["simulator"])
    with registry_alias.model_lock(model) as finished:
        assert finished is not None
    assert finished.version == "4"


def test_moves_of_other_models_are_others(ledger):
    model = model_of(CrashingLedger(ledger.state, "before"))
    with pytest.raises(Crash):
        move(model)
    with registry_alias.model_lock(RegisteredModel(model.registry, ledger, "letters")):
        assert lines(ledger) == []
    assert pending(model)


@pytest.mark.parametrize("quietly", [True, False])
def test_who_comes_again_writes_no_conflict(ledger, monkeypatch, quietly):
    monkeypatch.setattr("gate.registry.alias.PATIENCE_S", 0.0)
    model = model_of(ledger)
    with (
        promotion_lock(ledger),
        pytest.raises(PromotionConflict),
        registry_alias.model_lock(model, quietly=quietly),
    ):
        pass
    assert lines(ledger) == ([] if quietly else [("conflict", None)])


def test_a_short_look_of_another_process_is_waited_for(ledger):
    model = model_of(ledger)
    lock = promotion_lock(ledger)
    lock.__enter__()
    threading.Timer(0.3, lock.__exit__, (None, None, None)).start()
    with registry_alias.model_lock(model):
        assert lines(ledger) == []


def test_a_move_that_was_begun_under_another_address_is_finished(ledger):
    model = model_of(CrashingLedger(ledger.state, "before"))
    with pytest.raises(Crash):
        move(model)
    there = Simulator("http://mlflow", model.registry.versions, model.registry.aliases)
    declare_addresses(ledger, "http://mlflow", ["simulator"])
    with registry_alias.model_lock(RegisteredModel(there, ledger, "digits")):
        assert lines(ledger) == [("same_registry", None), ("promoted", "2")]
    assert not pending(model)


def vouched(ledger: Ledger, registry=None, *, champion: str = "3") -> RegisteredModel:
    """Versions 1 to 4 served one after the other; `champion` serves, 2 served before."""
    model = model_of(ledger, registry or Simulator())
    model.registry.versions.append(Stored(b"", {}, "run", ""))
    digest = Digest.of_bytes(b"")
    for version in ("4", "1", "2", "3"):
        model.write("promoted", "passed", version=version, about=digest)
    for alias, version in ((CHAMPION, champion), (PREVIOUS, "2")):
        model.registry.set_alias(NAME, alias, version)
    return model


def line(model: RegisteredModel, action: str, old: str | None, new: str | None):
    vouching = model.history().vouching_for(new) if new else None
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
def test_previous_goes_where_a_rollback_may_go(ledger, action, old, new, previous):
    model = vouched(ledger)
    written = registry_alias.move_alias(model, line(model, action, old, new))
    assert aliases(model) == (new, previous)
    assert ledger.entries()[-1] == written
    assert (written.version, written.previous_version) == (new, old)
    assert not pending(model)


def nothing(model: RegisteredModel) -> None:
    """Said against version 3."""


def rejected(model: RegisteredModel) -> None:
    model.registry.set_tag(NAME, "3", key=Tag.REVIEW, value="rejected")


def rolled_back(model: RegisteredModel) -> None:
    """The line alone, without the tag."""
    model.write("rolled_back", "wrong", version="2", previous="3")


def tagged(model: RegisteredModel) -> None:
    """The tag alone, without the line."""
    model.registry.set_tag(NAME, "3", key=Tag.ROLLED_BACK, value="2026: wrong")


def violated(model: RegisteredModel) -> None:
    model.write("violation", "other bytes", version="3")


@pytest.mark.parametrize(
    ("spoil", "kept"),
    [(nothing, True), (rejected, False), (rolled_back, False), (tagged, True), (violated, False)],
)
def test_an_old_champion_that_must_not_serve_is_not_kept_for_a_rollback(ledger, spoil, kept):
    model = vouched(ledger)
    spoil(model)
    registry_alias.move_alias(model, line(model, "promoted", "3", "4"))
    assert aliases(model) == ("4", "3" if kept else "2")


def test_an_old_champion_that_the_ledger_does_not_know_is_not_kept(ledger):
    model = vouched(ledger, champion="5")
    model.registry.versions.append(Stored(b"", {}, "run", ""))
    registry_alias.move_alias(model, line(model, "promoted", "5", "4"))
    assert aliases(model) == ("4", "2")


def test_after_a_revert_previous_is_none_that_must_not_serve(ledger):
    model = vouched(ledger)
    model.write("violation", "other bytes", version="1")
    registry_alias.move_alias(model, line(model, "reverted", "3", "2"))
    assert aliases(model) == ("2", "4")


def test_an_alias_that_is_there_already_is_left_alone(ledger):
    """Setting it again would fire an event that tells of nothing."""
    registry = Watched(Simulator())
    model = vouched(ledger, registry, champion="4")
    registry.inner.aliases[PREVIOUS] = "3"
    registry.calls.clear()
    registry_alias.move_alias(model, line(model, "promoted", "4", "4"))
    registry_alias.move_alias(model, line(model, "rolled_back", "4", "4"))
    assert not [call for call in registry.calls if call.startswith(("set_alias", "delete_"))]


@pytest.mark.rows(7)
@pytest.mark.parametrize("moment", ["after", pytest.param("before", marks=pytest.mark.proof)])
@pytest.mark.parametrize("call", range(18))
@pytest.mark.parametrize("kind", MOVES)
def test_a_crash_leaves_the_old_champion_or_a_move_that_is_finished_once(
    ledger, kind, call, moment
):
    action, old, new, previous = MOVES[kind]
    registry = Watched(Simulator())
    model = vouched(ledger, registry)
    entry, before = line(model, action, old, new), len(ledger.entries())
    registry.calls.clear()

    def crash(_: str, at: int) -> None:
        if at == call:
            raise Crash

    setattr(registry, moment, crash)
    with contextlib.suppress(Crash):
        registry_alias.move_alias(model, entry)
    moved = registry.inner.aliases.get(CHAMPION) == new
    assert moved or registry.inner.aliases[CHAMPION] == old
    setattr(registry, moment, lambda *_: None)
    dropped = not moved and pending(model)
    for _ in range(2):
        with registry_alias.model_lock(model):
            pass
        assert not pending(model)
        if old != new:
            assert len(ledger.entries()) == before + moved + dropped
        if moved:
            assert aliases(model) == (new, previous)
    if not moved:  # it is simply done again
        registry_alias.move_alias(model, entry)
        assert aliases(model)[0] == new
        assert len(ledger.entries()) == before + dropped + 1


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_at_the_line_of_a_revert_leaves_previous_right(ledger, moment):
    model = vouched(ledger)
    entry = line(model, "reverted", "3", "2")
    crashing = RegisteredModel(model.registry, CrashingLedger(ledger.state, moment), NAME)
    with pytest.raises(Crash):
        registry_alias.move_alias(crashing, entry)
    with registry_alias.model_lock(model) as finished:
        assert finished is not None
        assert finished.action == "reverted"
    assert aliases(model) == ("2", "1")
    with registry_alias.model_lock(model) as finished:
        assert finished is None


def test_who_can_not_move_previous_keeps_nobody_from_his_work(ledger):
    """The registry refuses for good: that is said once. While it is away, it is tried again."""
    registry = Watched(Simulator())
    model = vouched(ledger, registry)
    trouble: list[RegistryError] = [RegistryUnavailable("away"), RegistryError("it was deleted")]

    def refuse(call: str, _: int) -> None:
        if call == "set_alias previous" and trouble:
            raise trouble[0]

    registry.before = refuse
    with pytest.raises(RegistryUnavailable):
        registry_alias.move_alias(model, line(model, "reverted", "3", "2"))
    for expected in (RegistryUnavailable, RegistryError):
        with pytest.raises(expected), registry_alias.model_lock(model):
            pass
        trouble.pop(0)
    with registry_alias.model_lock(model) as finished:
        assert finished is None
    assert aliases(model) == ("2", "2")


def test_what_was_told_and_then_moved_by_somebody_else_is_over(ledger):
    model = vouched(ledger)
    crashing = RegisteredModel(model.registry, CrashingLedger(ledger.state, "after"), NAME)
    with pytest.raises(Crash):
        registry_alias.move_alias(crashing, line(model, "reverted", "3", "2"))
    model.registry.set_alias(NAME, CHAMPION, "4")
    with registry_alias.model_lock(model) as finished:
        assert finished is None
    assert aliases(model) == ("4", "2")


def _hold_and_die(path: Path) -> None:
    with promotion_lock(Ledger(path)):
        os._exit(9)


def test_a_second_holder_is_told_about_the_first(ledger: Ledger) -> None:
    with promotion_lock(ledger):
        with pytest.raises(PromotionConflict, match=f"process {os.getpid()} on ") as caught:
            promotion_lock(ledger).__enter__()
        assert "Nothing was changed" in str(caught.value)
    with promotion_lock(ledger):
        pass


def test_a_holder_that_died_holds_nothing(ledger: Ledger) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_hold_and_die, args=(Path(ledger.place),)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    with promotion_lock(ledger):
        pass


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ServiceError, match="cannot make the database"),
        promotion_lock(Ledger(tmp_path / "file" / "ledger.db")),
    ):
        pass
