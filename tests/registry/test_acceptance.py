"""A person says that a shorter past is meant: it leaves a line, and then all goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.errors import EvidenceError, InboxUnavailable, PastChanged
from gate.registry.acceptance import accept
from gate.registry.head import HeadFile
from gate.registry.ledger import Ledger, LedgerEntry, actor
from tests.registry.test_head import CHANGED, Away, torn_last_line


@pytest.fixture
def witnesses(tmp_path: Path) -> list[HeadFile]:
    return [HeadFile(tmp_path / name / "head.json", place=f"the {name}") for name in ("a", "b")]


@pytest.fixture
def witnessed(ledger: Ledger, witnesses: list[HeadFile]) -> Ledger:
    made = Ledger(ledger.path, witnesses=witnesses)
    for reason in ("one", "two", "three"):
        line = LedgerEntry(action="promoted", registry="here", model="digits", reason=reason)
        made.append(line)
    return made


@pytest.mark.parametrize("spoil", CHANGED)
def test_what_is_accepted_leaves_a_line_and_goes_on(witnessed: Ledger, witnesses, spoil) -> None:
    spoil(witnessed.path)
    lost = accept(witnessed.path, witnesses, reason="the disk died")
    assert ["the a saw 3 lines" in lost[0], "the b saw 3 lines" in lost[1]] == [True, True]
    line = witnessed.entries()[-1]
    assert (line.action, line.actor) == ("ledger_accepted", actor())
    assert "the disk died" in line.reason
    assert lost[0] in line.reason
    assert len(Ledger(witnessed.path, witnesses=witnesses).entries()) == len(witnessed.entries())
    assert accept(witnessed.path, witnesses, reason="again") == ()
    assert spoil is not torn_last_line or list(witnessed.path.parent.glob("*.torn-*"))


def test_where_all_agree_nothing_is_written(witnessed: Ledger, witnesses) -> None:
    before = witnessed.path.read_bytes()
    assert accept(witnessed.path, witnesses, reason="to be sure") == ()
    assert witnessed.path.read_bytes() == before


def test_a_damaged_head_is_accepted_too(witnessed: Ledger, witnesses) -> None:
    witnesses[0].path.write_text("{")
    (lost,) = accept(witnessed.path, witnesses, reason="a bad disk")
    assert "is damaged" in lost
    assert len(witnessed.entries()) == 4


def test_a_broken_chain_is_not_accepted(witnessed: Ledger, witnesses) -> None:
    data = witnessed.path.read_bytes()
    witnessed.path.write_bytes(data.replace(b'"one"', b'"eno"'))
    with pytest.raises(EvidenceError, match="the chain is broken"):
        accept(witnessed.path, witnesses, reason="never mind")
    witnessed.path.write_bytes(data)
    assert len(witnessed.entries()) == 3


def test_a_witness_that_is_away_is_not_passed_over(witnessed: Ledger, witnesses) -> None:
    before = witnessed.path.read_bytes()
    away = [*witnesses, Away(witnesses[0].path, place="the inbox")]
    with pytest.raises(InboxUnavailable):
        accept(witnessed.path, away, reason="never mind")
    assert witnessed.path.read_bytes() == before


def test_what_is_lost_after_an_acceptance_is_seen_again(witnessed: Ledger, witnesses) -> None:
    data = witnessed.path.read_bytes()
    witnessed.path.write_bytes(b"".join(data.splitlines(keepends=True)[:2]))
    accept(witnessed.path, witnesses, reason="the disk died")
    witnessed.path.write_bytes(data)
    with pytest.raises(PastChanged):
        witnessed.verify()
