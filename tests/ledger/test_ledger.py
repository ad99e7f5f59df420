from __future__ import annotations

import json
import multiprocessing
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event

from gate import Digest
from gate.commands.history import export_lines
from gate.errors import EvidenceError, StateUnavailable, StorageError
from gate.ledger import database
from gate.ledger.ledger import Ledger
from tests.ledger.rows import (
    Database,
    entry,
    lines,
    replace_lines,
    replace_rows,
    replace_text,
    rows,
)


def append_entries(state: Database, *reasons: str) -> Ledger:
    ledger = Ledger(state)
    for reason in reasons:
        ledger.append(entry(reason))
    return ledger


def test_appended_entries_are_read_back(ledger: Ledger) -> None:
    sha256 = Digest.from_bytes(b"model")
    written = [
        ledger.append(entry("one", version="1", sha256=sha256)),
        ledger.append(entry("zwei\nü", action="refused", previous_version="1")),
    ]
    assert list(ledger.entries()) == written
    assert written[0].parent is None
    stored = lines(ledger.state)
    assert written[1].parent == Digest.from_bytes(stored[0])
    assert json.loads(stored[0])["sha256"] == str(sha256)


@pytest.mark.parametrize(
    ("tamper", "number"),
    [
        (lambda lines: [lines[0].replace(b"one", b"ONE"), *lines[1:]], 2),
        (lambda lines: lines[1:], 1),
        (lambda lines: [lines[0], lines[2]], 2),
        (lambda lines: [lines[1], lines[0], lines[2]], 1),
        (lambda lines: [lines[0], b"{}", *lines[1:]], 2),
        (lambda lines: [lines[0], lines[1][:20], lines[2]], 2),
        (lambda lines: [lines[0].replace(b",", b",\n"), *lines[1:]], 1),
    ],
    ids=["edited", "first gone", "middle gone", "swapped", "foreign", "cut", "two lines"],
)
def test_changed_entry_is_reported_with_its_number(ledger: Ledger, tamper, number: int) -> None:
    append_entries(ledger.state, "one", "two", "three")
    before = tamper(lines(ledger.state))
    replace_lines(ledger.state, before)
    for use in (ledger.entries, lambda: ledger.append(entry())):
        with pytest.raises(EvidenceError, match=rf"ledger\.db:{number}: .*Restore"):
            use()
    assert lines(ledger.state) == before


@pytest.mark.parametrize("numbers", [[2, 3], [1, 3], [1, 2, 7]])
def test_removed_row_and_changed_number_are_reported(ledger: Ledger, numbers: list[int]) -> None:
    append_entries(ledger.state, "one", "two", "three")
    stored = rows(ledger.state)
    kept = [stored[min(number, 3) - 1]._replace(number=number) for number in numbers]
    replace_rows(ledger.state, kept)
    first_wrong = next(n for n, number in enumerate(numbers, start=1) if n != number)
    with pytest.raises(EvidenceError, match=rf"ledger\.db:{first_wrong}: the chain is broken"):
        ledger.entries()


@pytest.mark.parametrize(
    "statement",
    ["UPDATE gate_ledger SET line = 'x'", "UPDATE gate_ledger SET signature = 'x'",
     "DELETE FROM gate_ledger", "TRUNCATE gate_ledger"],
)  # fmt: skip
def test_the_database_refuses_to_change_a_row(database_ledger: Ledger, statement: str) -> None:
    append_entries(database_ledger.state, "one")
    if "TRUNCATE" in statement and "postgresql" not in database_ledger.location:
        return
    with (
        pytest.raises(StateUnavailable, match="append-only"),
        database_ledger.state.writing() as connection,
    ):
        connection.exec_driver_sql(statement)
    assert [e.reason for e in database_ledger.entries()] == ["one"]


@pytest.mark.parametrize("kind", ["folder", "text"])
def test_invalid_database_file_is_reported(ledger: Ledger, kind: str) -> None:
    path = Path(ledger.location)
    path.parent.mkdir()
    path.mkdir() if kind == "folder" else path.write_text("no database, but quite some text\n" * 99)
    for use in (ledger.entries, lambda: ledger.append(entry())):
        with pytest.raises(StateUnavailable, match=re.escape(f"the database {path} can't be used")):
            use()


def test_full_disk_leaves_the_ledger_unchanged(ledger: Ledger) -> None:
    append_entries(ledger.state, "one")
    with ledger.state.reading() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()

    def limit_pages(connection: Any, _record: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages}")

    engine = ledger.state._opened()
    event.listen(engine, "connect", limit_pages)
    with pytest.raises(StorageError, match="full"):
        ledger.append(entry("two" * 10_000))
    event.remove(engine, "connect", limit_pages)
    assert [e.reason for e in ledger.entries()] == ["one"]
    assert [e.reason for e in append_entries(ledger.state, "two").entries()] == ["one", "two"]


def test_long_lock_is_reported(ledger: Ledger, monkeypatch) -> None:
    append_entries(ledger.state, "one")
    monkeypatch.setattr(database, "_TIMEOUT_S", 0.1)
    with (
        closing(sqlite3.connect(ledger.location, isolation_level=None)) as second,
        pytest.raises(StateUnavailable, match="locked.*nothing is damaged"),
    ):
        second.execute("BEGIN IMMEDIATE")
        Ledger(Path(ledger.location)).append(entry("two"))
    assert len(ledger.entries()) == 1


def test_removed_file_is_not_recreated(ledger: Ledger) -> None:
    append_entries(ledger.state, "one")
    Path(ledger.location).unlink()
    assert ledger.entries() == ()
    with pytest.raises(StateUnavailable, match="unable to open"):
        ledger.append(entry("two"))
    assert not Path(ledger.location).exists()


@pytest.mark.parametrize("after", [True, False], ids=["after the commit", "before it"])
def test_lost_connection_leaves_each_entry_once(ledger: Ledger, after: bool) -> None:
    """An entry that was committed before the connection broke is not written twice."""
    append_entries(ledger.state, "one")
    original = ledger.state.writing

    @contextmanager
    def lose_connection() -> Iterator[Connection]:
        with original() as connection:
            yield connection
            if not after:
                raise StateUnavailable("the server went away")
        raise StateUnavailable("the server went away")

    ledger.state.writing = lose_connection  # type: ignore[method-assign]
    if after:
        assert ledger.append(entry("two")) == ledger.entries()[-1]
    else:
        with pytest.raises(StateUnavailable):
            ledger.append(entry("two"))
    assert [e.reason for e in ledger.entries()] == ["one", "two"][: 1 + after]


@pytest.mark.proof
@pytest.mark.rows(2)
def test_concurrent_processes_append_to_one_chain(database_url: str) -> None:
    """The processes append to a database that does not exist yet."""
    ledger = Ledger(database_url)
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(
            target=append_entries, args=(database_url, *(f"{w}-{i}" for i in range(10)))
        )
        for w in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert sorted(e.reason for e in ledger.entries()) == sorted(
        f"{w}-{i}" for w in range(3) for i in range(10)
    )


@settings(max_examples=25)
@given(reasons=st.lists(st.text(max_size=30), min_size=2, max_size=4), position=st.integers(0))
def test_any_changed_character_before_the_last_entry_is_detected(
    tmp_path_factory, reasons, position
) -> None:
    ledger = append_entries(tmp_path_factory.mktemp("chain") / "ledger.db", *reasons)
    stored = lines(ledger.state)
    number = position % (len(stored) - 1)
    text = stored[number].decode()
    at = position % len(text)
    stored[number] = (text[:at] + chr(ord(text[at]) ^ 0x01) + text[at + 1 :]).encode()
    replace_lines(ledger.state, stored)
    with pytest.raises(EvidenceError):
        Ledger(ledger.state).entries()


def test_export_returns_the_exact_lines(database_ledger: Ledger, tmp_path: Path) -> None:
    for reason in ("one", "zwei\nü"):
        database_ledger.append(entry(reason))
    assert b"".join(export_lines(database_ledger)) == b"".join(
        line + b"\n" for line in lines(database_ledger.state)
    )
    assert len(lines(database_ledger.state)) == 2
    replace_text(database_ledger.state, b'"one"', b'"eno"')
    with pytest.raises(EvidenceError, match="the chain is broken"):
        export_lines(database_ledger)
