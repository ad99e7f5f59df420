"""A chain is read as it grows, and says whatever one that reads all of it anew says."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gate.errors import EvidenceError
from gate.registry import chain as chain_module
from gate.registry.chain import Chain
from gate.registry.ledger import Ledger, LedgerEntry
from gate.storage.digest import Digest


def entry(reason: str) -> LedgerEntry:
    return LedgerEntry(action="promoted", registry="here", model="digits", reason=reason)


class Reader:
    """A chain, and the numbers of the lines that were parsed."""

    def __init__(self, path: Path) -> None:
        self.parsed: list[int] = []
        self.reasons: list[str] = []
        self.chain = Chain(path, self._parse)

    def _parse(self, line: bytes, number: int) -> LedgerEntry:
        self.parsed.append(number)
        try:
            return LedgerEntry.model_validate_json(line)
        except ValueError as error:
            raise EvidenceError(str(error)) from error

    def read(self) -> list[int]:
        """The numbers of the lines that were parsed for it."""
        self.parsed.clear()
        anew, links = self.chain.read()
        self.reasons = ([] if anew else self.reasons) + [link.reason for link in links]
        return list(self.parsed)


@pytest.fixture
def reader(ledger: Ledger) -> Reader:
    """Three lines that were read."""
    for reason in ("one", "two", "three"):
        ledger.append(entry(reason))
    made = Reader(ledger.path)
    assert made.read() == [1, 2, 3]
    return made


def test_nothing_new_is_not_read(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader.chain, "_proven", lambda _: pytest.fail("it was read"))
    monkeypatch.setattr(reader.chain, "_take", lambda _: pytest.fail("it was read"))
    assert reader.read() == []


def test_only_what_came_since_is_read(
    reader: Reader, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader.chain, "_proven", lambda _: pytest.fail("all of it was read"))
    for number in (4, 5):
        ledger.append(entry(str(number)))
        assert reader.read() == [number]
    assert reader.reasons == ["one", "two", "three", "4", "5"]
    lines = ledger.path.read_bytes().splitlines()
    assert [reader.chain.digest(n) for n in range(7)] == [
        None, *(Digest.of_bytes(line) for line in lines), None,
    ]  # fmt: skip
    assert reader.chain.size == ledger.path.stat().st_size


def test_a_line_in_the_middle_of_being_written_is_read_when_it_is_whole(
    reader: Reader, ledger: Ledger
) -> None:
    ledger.append(entry("four"))
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole[:-20])
    assert reader.read() == []
    assert reader.chain.tail
    ledger.path.write_bytes(whole)
    assert reader.read() == [4]
    assert not reader.chain.tail


def test_a_moved_copy_is_hashed_and_not_parsed_again(reader: Reader, ledger: Ledger) -> None:
    copy = ledger.path.with_name("copy")
    copy.write_bytes(ledger.path.read_bytes())
    copy.replace(ledger.path)
    assert reader.read() == []


def test_an_edit_that_kept_size_and_time_is_found_after_a_while(
    reader: Reader, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = reader.chain._status
    monkeypatch.setattr(chain_module, "_status", lambda _: status)
    ledger.path.write_bytes(ledger.path.read_bytes().replace(b'"one"', b'"eno"'))
    assert reader.read() == []
    monkeypatch.setattr(chain_module, "_REHASH_S", -1.0)
    for _ in range(2):
        with pytest.raises(EvidenceError, match=":2: the chain is broken"):
            reader.read()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "append", "read", "read", "cut", "flip", "back", "swap", "away"]
        ),
        st.integers(0, 1 << 20),
    ),
    max_size=12,
)


def change(ledger: Ledger, kind: str, number: int, copies: list[bytes]) -> None:
    """Do something to the file; its time goes on, as a clock of nanoseconds would have it."""
    path = ledger.path
    data = path.read_bytes() if path.exists() else b""
    if kind == "append":
        try:
            Ledger(path).append(entry(str(number)))
        except EvidenceError:
            return
        copies.append(path.read_bytes())
    elif kind == "cut" and data:
        path.write_bytes(data[: number % len(data)])
    elif kind == "flip" and data:
        place = number % len(data)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    elif kind == "back" and copies:
        path.write_bytes(copies[number % len(copies)])
    elif kind == "swap" and data:
        path.with_name("copy").write_bytes(data)
        path.with_name("copy").replace(path)
    elif kind == "away":
        path.unlink(missing_ok=True)


@settings(max_examples=60, deadline=None)
@given(STEPS)
@example([("read", 0), ("append", 0), ("flip", 30)])
def test_it_says_what_one_says_that_reads_all_of_it(tmp_path_factory, steps) -> None:
    path = tmp_path_factory.mktemp("chain") / "ledger.jsonl"
    reader, copies = Reader(path), [b""]
    for time, (kind, number) in enumerate([("append", 0), *steps, ("read", 0)], start=1):
        change(Ledger(path), kind, number, copies)
        if kind != "read":
            if path.exists():
                os.utime(path, ns=(time, time))
            continue
        fresh = Reader(path)
        try:
            fresh.read()
        except EvidenceError:
            with pytest.raises(EvidenceError):
                reader.read()
                # An old line that was edited while the file grew is seen when all is hashed again.
                reader.chain._hashed_at = -math.inf
                reader.read()
            continue
        reader.read()
        assert reader.reasons == fresh.reasons
        assert reader.chain.digest(reader.chain.lines) == fresh.chain.digest(fresh.chain.lines)
        assert (reader.chain.size, reader.chain.tail) == (fresh.chain.size, fresh.chain.tail)


def test_a_ledger_that_grows_at_every_look_is_hashed_again_all_the_same(
    reader: Reader, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ledger.path.read_bytes()
    added = entry("four").model_copy(update={"parent": Digest.of_bytes(data.splitlines()[-1])})
    edited = data.replace(b'"one"', b'"eno"') + added.to_json().encode() + b"\n"
    ledger.path.write_bytes(edited)
    monkeypatch.setattr(chain_module, "_REHASH_S", -1.0)
    with pytest.raises(EvidenceError, match=":2: the chain is broken"):
        reader.read()
