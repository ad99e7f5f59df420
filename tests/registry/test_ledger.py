from __future__ import annotations

import json
import logging
import multiprocessing
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gate.errors import EvidenceError, StorageError
from gate.registry import ledger as ledger_module
from gate.registry.ledger import Ledger, LedgerEntry
from gate.storage.digest import Digest
from gate.storage.lock import private_lock


def entry(reason: str = "PASS on ort-cpu", **fields: object) -> LedgerEntry:
    return LedgerEntry.model_validate(
        {"action": "promoted", "registry": "sqlite:///x", "model": "digits", "reason": reason}
        | fields
    )


def fill(path: Path, *reasons: str) -> Ledger:
    ledger = Ledger(path)
    for reason in reasons:
        ledger.append(entry(reason))
    return ledger


def test_what_is_appended_is_read_back(ledger: Ledger) -> None:
    sha256 = Digest.of_bytes(b"model")
    written = [
        ledger.append(entry("one", version="1", sha256=sha256)),
        ledger.append(entry("zwei\nü", action="refused", previous_version="1")),
    ]
    assert list(ledger.entries()) == written
    assert written[0].parent is None
    lines = ledger.path.read_bytes().splitlines()
    assert written[1].parent == Digest.of_bytes(lines[0])
    assert json.loads(lines[0])["sha256"] == str(sha256)


def test_an_entry_says_who_and_when() -> None:
    made = entry()
    assert "@" in made.actor
    assert made.at.endswith("+00:00")


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(ledger_module.getpass, "getuser", nameless)
    assert ledger_module.actor().startswith("uid")


def test_no_ledger_is_an_empty_one(ledger: Ledger) -> None:
    assert ledger.entries() == ()
    assert not ledger.is_torn()


@pytest.mark.parametrize(
    ("spoil", "number"),
    [
        (lambda lines: [lines[0].replace(b"one", b"ONE"), *lines[1:]], 2),
        (lambda lines: lines[1:], 1),
        (lambda lines: [lines[0], lines[2]], 2),
        (lambda lines: [lines[1], lines[0], lines[2]], 1),
        (lambda lines: [lines[0], lines[0], *lines[1:]], 2),
        (lambda lines: [lines[0], b"", *lines[1:]], 2),
        (lambda lines: [lines[0], b"{}", *lines[1:]], 2),
        (lambda lines: [lines[0], lines[1][:20], lines[2]], 2),
    ],
    ids=["edited", "first gone", "middle gone", "swapped", "twice", "blank", "foreign", "cut"],
)
def test_a_changed_ledger_is_seen_at_its_line(ledger: Ledger, spoil, number: int) -> None:
    fill(ledger.path, "one", "two", "three")
    before = spoil(ledger.path.read_bytes().splitlines())
    ledger.path.write_bytes(b"\n".join(before) + b"\n")
    for use in (ledger.entries, lambda: ledger.append(entry())):
        with pytest.raises(EvidenceError, match=rf"ledger\.jsonl:{number}: .*Restore") as caught:
            use()
        assert str(caught.value)
    assert ledger.path.read_bytes().splitlines() == before


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_torn_last_line_is_moved_aside(ledger: Ledger, caplog, kept: int) -> None:
    fill(ledger.path, "one", "two")
    whole = ledger.path.read_bytes()
    first = whole.splitlines(keepends=True)[0]
    torn = whole[len(first) :][:kept]
    ledger.path.write_bytes(first + torn)

    assert [e.reason for e in ledger.entries()] == ["one"]
    assert ledger.is_torn()
    with caplog.at_level(logging.WARNING):
        ledger.append(entry("three"))
    assert "cut off by a crash" in caplog.text
    assert [e.reason for e in ledger.entries()] == ["one", "three"]
    assert not ledger.is_torn()
    (aside,) = ledger.path.parent.glob("*.torn-*")
    assert aside.read_bytes() == torn


def test_a_full_disk_leaves_the_ledger_as_it_was(ledger: Ledger, monkeypatch) -> None:
    fill(ledger.path, "one")
    before = ledger.path.read_bytes()
    real = ledger_module.os.write
    monkeypatch.setattr(ledger_module.os, "write", lambda fd, data: real(fd, data[:7]))
    with pytest.raises(StorageError, match="disk full"):
        ledger.append(entry("two"))
    assert ledger.path.read_bytes() == before


def test_a_folder_in_its_place_is_a_clear_error(ledger: Ledger) -> None:
    ledger.path.mkdir(parents=True)
    with pytest.raises(StorageError, match="ledger"):
        ledger.append(entry())


def test_a_ledger_locked_for_long_is_a_clear_error(ledger: Ledger, monkeypatch) -> None:
    fill(ledger.path, "one")
    monkeypatch.setattr(ledger_module, "_APPEND_TIMEOUT_S", 0.0)
    with (
        private_lock(ledger_module.locks(ledger.path) / "append.lock", timeout_s=1.0),
        pytest.raises(StorageError, match="locked"),
    ):
        ledger.append(entry("two"))


def test_many_processes_append_at_once(ledger: Ledger) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=fill, args=(ledger.path, *(f"{w}-{i}" for i in range(10))))
        for w in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(e.reason for e in ledger.entries()) == sorted(
        f"{w}-{i}" for w in range(3) for i in range(10)
    )


@settings(max_examples=25, deadline=None)
@given(reasons=st.lists(st.text(max_size=30), min_size=2, max_size=4), place=st.integers(0))
def test_no_byte_before_the_last_line_can_change_unseen(tmp_path_factory, reasons, place) -> None:
    ledger = fill(tmp_path_factory.mktemp("chain") / "ledger.jsonl", *reasons)
    data = bytearray(ledger.path.read_bytes())
    last = len(data[:-1]) - data[:-1][::-1].index(b"\n") if b"\n" in data[:-1] else 0
    data[place % last] ^= 0x01
    ledger.path.write_bytes(bytes(data))
    with pytest.raises(EvidenceError):
        ledger.entries()


def test_what_was_read_is_not_parsed_again_and_an_edit_is_seen(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    parse = Ledger._parse
    monkeypatch.setattr(
        Ledger, "_parse", lambda self, line, n: parsed.append(n) or parse(self, line, n)
    )
    fill(ledger.path, "one", "two")
    reading = Ledger(ledger.path)
    assert len(reading.entries()) == 2
    other = Ledger(ledger.path)
    other.append(entry("three"))
    parsed.clear()
    assert [e.reason for e in reading.entries()] == ["one", "two", "three"]
    assert parsed == [3]
    parsed.clear()
    reading.append(entry("four"))
    assert len(reading.entries()) == 4
    assert parsed == [4]
    ledger.path.write_bytes(ledger.path.read_bytes().replace(b'"one"', b'"eno"'))
    with pytest.raises(EvidenceError, match="the chain is broken"):
        reading.entries()
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(lines[0])
    assert [e.reason for e in reading.entries()] == ["eno"]


def test_who_only_verifies_keeps_no_entries(ledger: Ledger) -> None:
    fill(ledger.path, "one", "two")
    ledger = Ledger(ledger.path)
    ledger.verify()
    assert ledger._entries is None
    assert [e.reason for e in ledger.entries()] == ["one", "two"]
    Ledger(ledger.path).append(entry("three"))
    ledger.verify()
    assert [e.reason for e in ledger.entries()] == ["one", "two", "three"]


def test_locks_that_can_not_be_made_are_a_clear_error(ledger: Ledger) -> None:
    fill(ledger.path, "one")
    shutil.rmtree(ledger_module.locks(ledger.path))
    ledger_module.locks(ledger.path).write_text("")
    with pytest.raises(StorageError, match=r"ledger\.jsonl\.locks"):
        ledger.append(entry("two"))
    assert len(ledger.entries()) == 1
