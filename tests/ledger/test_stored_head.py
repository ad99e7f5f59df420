"""A ledger that is shorter than the stored head or does not contain it is refused."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gate import Digest
from gate.errors import EvidenceError, PastChanged, StateUnavailable, StorageError
from gate.ledger.database import StateDatabase
from gate.ledger.entry import actor
from gate.ledger.ledger import Ledger, LedgerHead, StoredHead
from gate.ledger.maintenance import accept_rewrite
from tests.ledger.rows import Database, entry, lines, replace_rows, replace_text, rows
from tests.registry.simulator import Crash


def head(lines: int, text: str = "") -> LedgerHead:
    return LedgerHead(
        lines=lines, sha256=Digest.from_bytes(text.encode()), at="2026-01-01T00:00:00+00:00"
    )


@pytest.fixture
def file(tmp_path: Path) -> StoredHead:
    return StoredHead(tmp_path / "store" / "head.json", location="the store")


@pytest.fixture
def recorded_ledger(ledger: Ledger, file: StoredHead) -> Ledger:
    """A ledger with three entries, whose head is in the store."""
    created = Ledger(ledger.state, stored_head=file)
    for reason in ("one", "two", "three"):
        created.append(entry(reason))
    stored = file.head()
    assert stored is not None
    assert (stored.lines, stored.sha256) == (3, ledger_digest(ledger.state, 3))
    return created


def ledger_digest(database: Database, number: int) -> Digest:
    return Digest.from_bytes(lines(database)[number - 1])


def restore_older_copy(database: Database) -> None:
    replace_rows(database, rows(database)[:2])


def edit_last_line(database: Database) -> None:
    replace_text(database, b'"three"', b'"eerht"')


def remove_file(database: Database) -> None:
    state = database if isinstance(database, StateDatabase) else StateDatabase(database)
    Path(state.location).unlink()


def write_another_ledger(database: Database) -> None:
    replace_rows(database, [])
    for number in range(9):
        Ledger(database).append(entry(str(number)))


CHANGED = {
    restore_older_copy: "ends at entry 2; on 2",
    edit_last_line: ":3: this entry has digest",
    remove_file: "is empty",
    write_another_ledger: ":3: this entry has digest",
}


@pytest.mark.parametrize("reopened", [True, False], ids=["at start", "while it runs"])
@pytest.mark.parametrize("change", CHANGED)
def test_changed_past_is_refused(
    recorded_ledger: Ledger, file: StoredHead, change, reopened: bool
) -> None:
    original_rows = rows(recorded_ledger.state)
    change(recorded_ledger.state)
    changed_rows = rows(recorded_ledger.state)
    path = Path(recorded_ledger.location)
    ledger = Ledger(path, stored_head=file) if reopened else recorded_ledger
    uses: list[Callable[[], object]] = [
        ledger.entries, ledger.verify, ledger.entries, lambda: ledger.append(entry("more")),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(PastChanged, match=re.escape(CHANGED[change])) as caught:
            use()
        assert "the store recorded 3 entries" in str(caught.value)
        assert "gate accept-ledger" in str(caught.value)
    assert rows(recorded_ledger.state) == changed_rows
    replace_rows(path, original_rows)
    assert [e.reason for e in ledger.entries()] == ["one", "two", "three"]


def test_new_head_is_stored_before_entries_are_used(
    recorded_ledger: Ledger, ledger: Ledger, file: StoredHead
) -> None:
    ledger.append(entry("four"))
    assert len(recorded_ledger.entries()) == 4
    stored = file.head()
    assert stored is not None
    assert stored.lines == 4
    path = Path(recorded_ledger.location)
    path.rename(moved := path.with_name("moved"))
    assert len(Ledger(moved, stored_head=file).entries()) == 4


def test_first_head_is_accepted(ledger: Ledger, file: StoredHead) -> None:
    ledger.append(entry("one"))
    created = Ledger(ledger.state, stored_head=file)
    created.verify()
    assert file.head() is None  # verify() only reads the stored head
    created.entries()
    assert file.head() is not None


def test_constantly_growing_ledger_is_not_a_changed_past(
    recorded_ledger: Ledger, ledger: Ledger, file: StoredHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another replica adds an entry before each read of the stored head."""
    second, read_head = Ledger(ledger.state, stored_head=file), file.head

    def append_before_answer() -> LedgerHead | None:
        with monkeypatch.context() as quiet:
            quiet.setattr(file, "head", read_head)
            second.append(entry("more"))
        return read_head()

    replica = Ledger(ledger.state, stored_head=file)
    with monkeypatch.context() as busy:
        busy.setattr(file, "head", append_before_answer)
        for _ in range(3):
            replica.verify()
    assert len(replica.entries()) == 6
    restore_older_copy(ledger.state)
    with pytest.raises(PastChanged):
        replica.verify()


def test_only_a_longer_head_replaces_the_stored_one(file: StoredHead) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda lines: file.store(head(lines)), [5, 31, 7, 30, 2, 31, 1, 12]))
    assert file.head() == head(31)
    file.replace(head(4))
    assert file.head() == head(4)
    file.replace(None)
    assert file.head() is None


@pytest.mark.parametrize("text", ["", "{", "{}", '{"lines": 3}', "[]"])
def test_damaged_head_is_refused_until_replaced(
    recorded_ledger: Ledger, file: StoredHead, text: str
) -> None:
    file.path.write_text(text)
    for ledger in (recorded_ledger, Ledger(recorded_ledger.state, stored_head=file)):
        with pytest.raises(EvidenceError, match=r"is damaged.*gate accept-ledger"):
            ledger.verify()
    file.replace(head(3))
    assert file.head() == head(3)


def test_symlink_as_head_is_refused(
    recorded_ledger: Ledger, file: StoredHead, tmp_path: Path
) -> None:
    file.path.rename(tmp_path / "elsewhere")
    file.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EvidenceError, match="is damaged"):
        recorded_ledger.verify()


def test_unavailable_head_blocks_reading_and_acceptance(
    recorded_ledger: Ledger, file: StoredHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_unavailable() -> None:
        raise StateUnavailable("the disk is away")

    before = rows(recorded_ledger.state)
    monkeypatch.setattr(file, "head", raise_unavailable)
    with pytest.raises(StateUnavailable):
        Ledger(recorded_ledger.state, stored_head=file).entries()
    with pytest.raises(StateUnavailable):
        accept_rewrite(Ledger(recorded_ledger.state), file, reason="never mind")
    assert rows(recorded_ledger.state) == before


def test_head_that_cannot_be_stored_blocks_reading(
    recorded_ledger: Ledger, ledger: Ledger, file: StoredHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.append(entry("four"))
    with monkeypatch.context() as full:
        full.setattr("gate.ledger.ledger.write_text", _raise_disk_full)
        with pytest.raises(StorageError):
            recorded_ledger.entries()
    assert len(recorded_ledger.entries()) == 4
    stored = file.head()
    assert stored is not None
    assert stored.lines == 4


def _raise_disk_full(*_: object) -> None:
    raise StorageError("no room")


def test_entry_is_written_once_when_the_head_cannot_be_stored(
    recorded_ledger: Ledger, file: StoredHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry is on disk, so that append() must not raise an error."""
    with monkeypatch.context() as full:
        full.setattr("gate.ledger.ledger.write_text", _raise_disk_full)
        recorded_ledger.append(entry("four"))
    assert [e.reason for e in recorded_ledger.entries()][3:] == ["four"]
    stored = file.head()
    assert stored is not None
    assert stored.lines == 4


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_crash_leaves_a_head_that_matches_the_ledger(
    ledger: Ledger, file: StoredHead, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A head that was not stored because of a crash is stored by the next reader."""
    created = Ledger(ledger.state, stored_head=file)
    created.append(entry("one"))
    original, crashed = getattr(os, step), 0
    for at in range(20):
        calls = iter(range(99))

        def crash(
            *arguments: object, at: int = at, calls: Iterator[int] = calls, **options: object
        ):
            if next(calls) == at:
                raise Crash
            return original(*arguments, **options)

        with monkeypatch.context() as dying:
            dying.setattr(os, step, crash)
            with contextlib.suppress(Crash):
                Ledger(ledger.state, stored_head=file).append(entry(str(at)))
        crashed += next(calls) > at
        lines = Ledger(ledger.state, stored_head=file).entries()
        stored = file.head()
        assert stored is not None
        assert (stored.lines, stored.sha256) == (
            len(lines),
            ledger_digest(ledger.state, len(lines)),
        )
    assert crashed >= (2 if step == "fsync" else 1)


@pytest.mark.parametrize("change", CHANGED)
def test_accepted_rewrite_is_recorded(recorded_ledger: Ledger, file: StoredHead, change) -> None:
    change(recorded_ledger.state)
    problems = accept_rewrite(Ledger(Path(recorded_ledger.location)), file, reason="the disk died")
    assert "the store recorded 3 entries" in problems[0]
    line = recorded_ledger.entries()[-1]
    assert (line.action, line.actor) == ("ledger_accepted", actor())
    assert "the disk died" in line.reason
    assert problems[0] in line.reason
    assert len(Ledger(recorded_ledger.state, stored_head=file).entries()) == len(
        recorded_ledger.entries()
    )
    assert accept_rewrite(Ledger(recorded_ledger.state), file, reason="again") == ()


def test_damaged_head_can_be_accepted(recorded_ledger: Ledger, file: StoredHead) -> None:
    file.path.write_text("{")
    (problem,) = accept_rewrite(Ledger(recorded_ledger.state), file, reason="a bad disk")
    assert "is damaged" in problem
    assert len(recorded_ledger.entries()) == 4


def test_broken_chain_cannot_be_accepted(recorded_ledger: Ledger, file: StoredHead) -> None:
    original_rows = rows(recorded_ledger.state)
    replace_text(recorded_ledger.state, b'"one"', b'"eno"')
    with pytest.raises(EvidenceError, match="the chain is broken"):
        accept_rewrite(Ledger(recorded_ledger.state), file, reason="never mind")
    replace_rows(recorded_ledger.state, original_rows)
    assert len(recorded_ledger.entries()) == 3


def test_change_after_an_acceptance_is_detected(recorded_ledger: Ledger, file: StoredHead) -> None:
    original_rows = rows(recorded_ledger.state)
    restore_older_copy(recorded_ledger.state)
    accept_rewrite(Ledger(recorded_ledger.state), file, reason="the disk died")
    replace_rows(recorded_ledger.state, original_rows)
    with pytest.raises(PastChanged):
        recorded_ledger.verify()


def test_entry_added_during_an_acceptance_is_not_lost(
    recorded_ledger: Ledger, file: StoredHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service adds a conflict entry, without the lock, and stores its head."""
    read_head = file.head

    def append_before_answer() -> object:
        monkeypatch.setattr(file, "head", read_head)
        recorded_ledger.append(entry("added", action="conflict"))
        return read_head()

    monkeypatch.setattr(file, "head", append_before_answer)
    assert accept_rewrite(Ledger(recorded_ledger.state), file, reason="to be sure") == ()
    assert [line.reason for line in recorded_ledger.entries()][3:] == ["added"]
