"""StoredHead: a shorter or rewritten ledger is refused."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gate.errors import EvidenceError, PastChanged, StateUnavailable, StorageError
from gate.ledger import maintenance
from gate.ledger.database import StateDatabase
from gate.ledger.entry import LedgerEntry, actor
from gate.ledger.ledger import Ledger, LedgerHead, StoredHead
from gate.ledger.maintenance import accept_rewrite
from gate.storage.digest import Digest
from tests.ledger.rows import Place, lines, put, replace, rows
from tests.registry.simulator import Crash


def entry(reason: str) -> LedgerEntry:
    return LedgerEntry(action="promoted", registry="here", model="digits", reason=reason)


def head(lines: int, text: str = "") -> LedgerHead:
    return LedgerHead(
        lines=lines, sha256=Digest.from_bytes(text.encode()), at="2026-01-01T00:00:00+00:00"
    )


@pytest.fixture
def file(tmp_path: Path) -> StoredHead:
    return StoredHead(tmp_path / "store" / "head.json", location="the store")


@pytest.fixture
def recorded_ledger(ledger: Ledger, file: StoredHead) -> Ledger:
    """Three lines that the store saw."""
    created = Ledger(ledger.state, stored_head=file)
    for reason in ("one", "two", "three"):
        created.append(entry(reason))
    kept = file.head()
    assert kept is not None
    assert (kept.lines, kept.sha256) == (3, ledger_digest(ledger.state, 3))
    return created


def ledger_digest(place: Place, number: int) -> Digest:
    return Digest.from_bytes(lines(place)[number - 1])


def older_copy(place: Place) -> None:
    put(place, rows(place)[:2])


def older_copy_with_new_entries(place: Place) -> None:
    older_copy(place)
    for reason in ("other", "others"):
        Ledger(place).append(entry(reason))


def edited_last_line(place: Place) -> None:
    replace(place, b'"three"', b'"eerht"')


def file_removed(place: Place) -> None:
    state = place if isinstance(place, StateDatabase) else StateDatabase(place)
    Path(state.location).unlink()


def all_rows_removed(place: Place) -> None:
    put(place, [])


def another_ledger(place: Place) -> None:
    put(place, [])
    for number in range(9):
        Ledger(place).append(entry(str(number)))


CHANGED = {
    older_copy: "ends at entry 2; on 2",
    older_copy_with_new_entries: ":3: this entry has digest",
    edited_last_line: ":3: this entry has digest",
    file_removed: "is empty",
    all_rows_removed: "is empty",
    another_ledger: ":3: this entry has digest",
}


@pytest.mark.parametrize("reopened", [True, False], ids=["at start", "while it runs"])
@pytest.mark.parametrize("change", CHANGED)
def test_changed_past_is_refused(
    recorded_ledger: Ledger, file: StoredHead, change, reopened: bool
) -> None:
    good = rows(recorded_ledger.state)
    change(recorded_ledger.state)
    spoiled = rows(recorded_ledger.state)
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
    assert rows(recorded_ledger.state) == spoiled
    put(path, good)
    assert [e.reason for e in ledger.entries()] == ["one", "two", "three"]


def test_new_head_is_stored_before_entries_are_used(
    recorded_ledger: Ledger, ledger: Ledger, file: StoredHead
) -> None:
    ledger.append(entry("four"))
    assert len(recorded_ledger.entries()) == 4
    kept = file.head()
    assert kept is not None
    assert kept.lines == 4
    path = Path(recorded_ledger.location)
    path.rename(moved := path.with_name("moved"))
    assert len(Ledger(moved, stored_head=file).entries()) == 4


def test_first_head_is_accepted(ledger: Ledger, file: StoredHead) -> None:
    ledger.append(entry("one"))
    created = Ledger(ledger.state, stored_head=file)
    created.verify()
    assert file.head() is None  # only looked at
    created.entries()
    assert file.head() is not None


def test_entry_added_during_a_read_is_read_again(
    recorded_ledger: Ledger, ledger: Ledger, file: StoredHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another replica adds a line, and shows it, between our reading and our asking."""
    second = Ledger(ledger.state, stored_head=file)
    answer = file.head

    def overtaken() -> LedgerHead | None:
        monkeypatch.setattr(file, "head", answer)
        second.append(entry("four"))
        return answer()

    monkeypatch.setattr(file, "head", overtaken)
    ours = Ledger(ledger.state, stored_head=file)
    assert len(ours.entries()) == 4


def test_constantly_growing_ledger_is_not_a_changed_past(
    recorded_ledger: Ledger, ledger: Ledger, file: StoredHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other replica never rests: each answer tells of a line more than was read before."""
    second, asks = Ledger(ledger.state, stored_head=file), file.head

    def overtaken() -> LedgerHead | None:
        with monkeypatch.context() as quiet:
            quiet.setattr(file, "head", asks)
            second.append(entry("more"))
        return asks()

    ours = Ledger(ledger.state, stored_head=file)
    with monkeypatch.context() as busy:
        busy.setattr(file, "head", overtaken)
        for _ in range(3):
            ours.verify()
    assert len(ours.entries()) == 6
    older_copy(ledger.state)
    with pytest.raises(PastChanged):
        ours.verify()


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


class UnavailableHead(StoredHead):
    """A stored head that can't be read."""

    def head(self) -> LedgerHead | None:
        raise StateUnavailable("the database is away")


def test_unavailable_head_blocks_reading(recorded_ledger: Ledger, file: StoredHead) -> None:
    unavailable = UnavailableHead(file.path, location="the inbox")
    with pytest.raises(StateUnavailable):
        Ledger(recorded_ledger.state, stored_head=unavailable).entries()


def test_head_that_cannot_be_stored_blocks_reading(
    recorded_ledger: Ledger, ledger: Ledger, file: StoredHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.append(entry("four"))
    with monkeypatch.context() as full:
        full.setattr("gate.ledger.ledger.write_text", _no_room)
        with pytest.raises(StorageError):
            recorded_ledger.entries()
    assert len(recorded_ledger.entries()) == 4
    kept = file.head()
    assert kept is not None
    assert kept.lines == 4


def _no_room(*_: object) -> None:
    raise StorageError("no room")


def test_entry_is_written_once_when_the_head_cannot_be_stored(
    recorded_ledger: Ledger, file: StoredHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is on disk: that must not look as if it were not."""
    with monkeypatch.context() as full:
        full.setattr("gate.ledger.ledger.write_text", _no_room)
        recorded_ledger.append(entry("four"))
    assert [e.reason for e in recorded_ledger.entries()][3:] == ["four"]
    kept = file.head()
    assert kept is not None
    assert kept.lines == 4


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_crash_leaves_a_head_that_matches_the_ledger(
    ledger: Ledger, file: StoredHead, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """And one that was crashed before it was kept is kept by whoever reads next."""
    created = Ledger(ledger.state, stored_head=file)
    created.append(entry("one"))
    real, crashed = getattr(os, step), 0
    for at in range(20):
        calls = iter(range(99))

        def crash(*arguments: object, at: int = at, calls: Iterator[int] = calls, **of: object):
            if next(calls) == at:
                raise Crash
            return real(*arguments, **of)

        with monkeypatch.context() as dying:
            dying.setattr(os, step, crash)
            with contextlib.suppress(Crash):
                Ledger(ledger.state, stored_head=file).append(entry(str(at)))
        crashed += next(calls) > at
        lines = Ledger(ledger.state, stored_head=file).entries()
        kept = file.head()
        assert kept is not None
        assert (kept.lines, kept.sha256) == (len(lines), ledger_digest(ledger.state, len(lines)))
    assert crashed >= (2 if step == "fsync" else 1)


@pytest.mark.parametrize("change", CHANGED)
def test_accepted_rewrite_is_recorded(recorded_ledger: Ledger, file: StoredHead, change) -> None:
    change(recorded_ledger.state)
    lost = accept_rewrite(Ledger(Path(recorded_ledger.location)), file, reason="the disk died")
    assert "the store recorded 3 entries" in lost[0]
    line = recorded_ledger.entries()[-1]
    assert (line.action, line.actor) == ("ledger_accepted", actor())
    assert "the disk died" in line.reason
    assert lost[0] in line.reason
    assert len(Ledger(recorded_ledger.state, stored_head=file).entries()) == len(
        recorded_ledger.entries()
    )
    assert accept_rewrite(Ledger(recorded_ledger.state), file, reason="again") == ()


def test_accept_without_changes_writes_nothing(recorded_ledger: Ledger, file: StoredHead) -> None:
    before = rows(recorded_ledger.state)
    assert accept_rewrite(Ledger(recorded_ledger.state), file, reason="to be sure") == ()
    assert rows(recorded_ledger.state) == before


def test_damaged_head_can_be_accepted(recorded_ledger: Ledger, file: StoredHead) -> None:
    file.path.write_text("{")
    (lost,) = accept_rewrite(Ledger(recorded_ledger.state), file, reason="a bad disk")
    assert "is damaged" in lost
    assert len(recorded_ledger.entries()) == 4


def test_broken_chain_cannot_be_accepted(recorded_ledger: Ledger, file: StoredHead) -> None:
    good = rows(recorded_ledger.state)
    replace(recorded_ledger.state, b'"one"', b'"eno"')
    with pytest.raises(EvidenceError, match="the chain is broken"):
        accept_rewrite(Ledger(recorded_ledger.state), file, reason="never mind")
    put(recorded_ledger.state, good)
    assert len(recorded_ledger.entries()) == 3


def test_unavailable_head_blocks_acceptance(recorded_ledger: Ledger, file: StoredHead) -> None:
    before = rows(recorded_ledger.state)
    unavailable = UnavailableHead(file.path, location="the inbox")
    with pytest.raises(StateUnavailable):
        accept_rewrite(Ledger(recorded_ledger.state), unavailable, reason="never mind")
    assert rows(recorded_ledger.state) == before


def test_change_after_an_acceptance_is_detected(recorded_ledger: Ledger, file: StoredHead) -> None:
    good = rows(recorded_ledger.state)
    older_copy(recorded_ledger.state)
    accept_rewrite(Ledger(recorded_ledger.state), file, reason="the disk died")
    put(recorded_ledger.state, good)
    with pytest.raises(PastChanged):
        recorded_ledger.verify()


class TestAcceptWhileTheServiceWrites:
    """It adds lines while a person waits: nothing was lost."""

    @pytest.fixture
    def added(self, recorded_ledger: Ledger) -> LedgerEntry:
        return LedgerEntry(action="deployed", registry="here", model="digits", reason="a look")

    def test_entry_added_while_waiting_for_the_lock(
        self,
        recorded_ledger: Ledger,
        file: StoredHead,
        added: LedgerEntry,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        real = maintenance.promotion_lock

        @contextmanager
        def late(ledger: Ledger, **given: Any) -> Iterator[None]:
            recorded_ledger.append(added)
            with real(ledger, **given):
                yield

        monkeypatch.setattr(maintenance, "promotion_lock", late)
        assert accept_rewrite(Ledger(recorded_ledger.state), file, reason="to be sure") == ()
        assert [line.reason for line in recorded_ledger.entries()][3:] == ["a look"]

    def test_entry_added_without_the_lock(
        self,
        recorded_ledger: Ledger,
        file: StoredHead,
        added: LedgerEntry,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Somebody else's conflict, whose head the service keeps."""
        answer = file.head

        def overtaken() -> object:
            monkeypatch.setattr(file, "head", answer)
            recorded_ledger.append(added)
            return answer()

        monkeypatch.setattr(file, "head", overtaken)
        assert accept_rewrite(Ledger(recorded_ledger.state), file, reason="to be sure") == ()
        assert [line.reason for line in recorded_ledger.entries()][3:] == ["a look"]
