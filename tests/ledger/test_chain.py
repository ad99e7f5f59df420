"""HashChain reads incrementally with the same result as reading everything again."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gate import Digest
from gate.errors import EvidenceError
from gate.ledger import entry as chain_module
from gate.ledger.entry import HashChain
from gate.ledger.ledger import Ledger
from tests.exhaustive import EXHAUSTIVE
from tests.ledger.rows import (
    Database,
    entry,
    lines,
    record_parsed_lines,
    replace_lines,
    replace_rows,
    replace_text,
    rows,
)


class Reader:
    """A chain that records the rows it fetches and the reasons of its entries."""

    def __init__(self, database: Database) -> None:
        self.fetched: list[int] = []
        self.reasons: list[str] = []
        self._ledger = Ledger(database)
        self.chain = HashChain(self._ledger.location)

    def _rows(self, first: int):
        result = self._ledger.rows(first)
        self.fetched += [row.number for row in result]
        return result

    def read(self) -> list[int]:
        """Return the numbers of the entries that were read."""
        self.fetched.clear()
        is_reset, entries = self.chain.read(self._rows)
        self.reasons = ([] if is_reset else self.reasons) + [entry.reason for entry in entries]
        last = self.chain.lines
        return list(range(last - len(entries) + 1, last + 1))


@pytest.fixture
def reader(database_ledger: Ledger) -> Reader:
    """A reader of three entries."""
    for reason in ("one", "two", "three"):
        database_ledger.append(entry(reason))
    created = Reader(database_ledger.state)
    assert created.read() == [1, 2, 3]
    return created


def test_unchanged_chain_fetches_only_the_last_entry(reader: Reader) -> None:
    assert reader.read() == []
    assert reader.fetched == [3]


def test_only_new_entries_are_fetched(reader: Reader, database_ledger: Ledger) -> None:
    for number in (4, 5):
        database_ledger.append(entry(str(number)))
        assert reader.read() == [number]
        assert reader.fetched == [number - 1, number]
    assert reader.reasons == ["one", "two", "three", "4", "5"]
    assert [reader.chain.digest(n) for n in range(7)] == [
        None, *(Digest.from_bytes(line) for line in lines(database_ledger.state)), None,
    ]  # fmt: skip


def test_signature_of_the_last_entry_is_reread(reader: Reader, database_ledger: Ledger) -> None:
    replace_rows(
        database_ledger.state,
        [row._replace(signature="new") for row in rows(database_ledger.state)],
    )
    assert reader.read() == []
    assert reader.chain.last is not None
    assert reader.chain.last.signature == "new"


@pytest.mark.parametrize("old", ["one", "two", "three"])
def test_edit_is_detected_immediately_at_the_end_and_later_elsewhere(
    reader: Reader, database_ledger: Ledger, monkeypatch: pytest.MonkeyPatch, old: str
) -> None:
    replace_text(database_ledger.state, f'"{old}"'.encode(), b'"edited"')
    if old == "three":  # no entry follows that contains its digest
        assert reader.read() == [1, 2, 3]
        assert reader.reasons == ["one", "two", "edited"]
        return
    assert reader.read() == []
    monkeypatch.setattr(chain_module, "_REHASH_S", -1.0)
    for _ in range(2):
        with pytest.raises(EvidenceError, match=r"[23]: the chain is broken"):
            reader.read()


def test_rehashed_entries_are_not_parsed_again(
    reader: Reader, database_ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_module, "_REHASH_S", -1.0)
    parsed = record_parsed_lines(monkeypatch)
    assert reader.read() == []
    assert reader.fetched == [1, 2, 3]
    assert parsed == []
    database_ledger.append(entry("four"))
    parsed.clear()
    assert reader.read() == [4]
    assert parsed == [4]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "read", "read", "cut", "flip", "back", "out", "away"]),
        st.integers(0, 1 << 20),
    ),
    max_size=12,
)


def change(ledger: Ledger, kind: str, number: int, copies: list[list[bytes]]) -> None:
    """Make one change to the rows."""
    stored = lines(ledger.state)
    if kind == "append":
        try:
            Ledger(ledger.state).append(entry(str(number)))
        except EvidenceError:
            return
        copies.append(lines(ledger.state))
    elif kind == "cut" and stored:
        replace_lines(ledger.state, stored[: number % len(stored)])
    elif kind == "flip" and stored:
        line = stored[number % len(stored)].decode()
        index = number % len(line)
        flipped = line[:index] + chr(ord(line[index]) ^ 1) + line[index + 1 :]
        stored[number % len(stored)] = flipped.encode()
        replace_lines(ledger.state, stored)
    elif kind == "back" and copies:
        replace_lines(ledger.state, copies[number % len(copies)])
    elif kind == "out" and stored:
        removed = 1 + number % len(stored)
        replace_rows(ledger.state, [row for row in rows(ledger.state) if row.number != removed])
    elif kind == "away":
        replace_rows(ledger.state, [])


@settings(max_examples=60 if EXHAUSTIVE else 15)
@given(STEPS)
@example([("read", 0), ("append", 0), ("flip", 30)])
@pytest.mark.proof
def test_incremental_reading_equals_full_reading(tmp_path_factory, steps) -> None:
    ledger = Ledger(tmp_path_factory.mktemp("chain") / "ledger.db")
    reader, copies = Reader(ledger.state), [[]]
    for kind, number in [("append", 0), *steps, ("read", 0)]:
        change(ledger, kind, number, copies)
        if kind != "read":
            continue
        fresh = Reader(ledger.state)
        try:
            fresh.read()
        except EvidenceError:
            with pytest.raises(EvidenceError):
                reader.read()
                # The edit of an older line is detected when all lines are hashed again.
                reader.chain._hashed_at = -math.inf
                reader.read()
            continue
        reader.read()
        assert reader.reasons == fresh.reasons
        assert reader.chain.digest(reader.chain.lines) == fresh.chain.digest(fresh.chain.lines)
        assert reader.chain.last == fresh.chain.last
