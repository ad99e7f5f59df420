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
def keepers(tmp_path: Path) -> list[HeadFile]:
    return [HeadFile(tmp_path / name / "head.json", place=f"the {name}") for name in ("a", "b")]


@pytest.fixture
def kept_ledger(ledger: Ledger, keepers: list[HeadFile]) -> Ledger:
    made = Ledger(ledger.path, keepers=keepers)
    for reason in ("one", "two", "three"):
        line = LedgerEntry(action="promoted", registry="here", model="digits", reason=reason)
        made.append(line)
    return made


@pytest.mark.parametrize("spoil", CHANGED)
def test_what_is_accepted_leaves_a_line_and_goes_on(kept_ledger: Ledger, keepers, spoil) -> None:
    spoil(kept_ledger.path)
    lost = accept(kept_ledger.path, keepers, reason="the disk died")
    assert ["the a saw 3 lines" in lost[0], "the b saw 3 lines" in lost[1]] == [True, True]
    line = kept_ledger.entries()[-1]
    assert (line.action, line.actor) == ("ledger_accepted", actor())
    assert "the disk died" in line.reason
    assert lost[0] in line.reason
    assert len(Ledger(kept_ledger.path, keepers=keepers).entries()) == len(kept_ledger.entries())
    assert accept(kept_ledger.path, keepers, reason="again") == ()
    assert spoil is not torn_last_line or list(kept_ledger.path.parent.glob("*.torn-*"))


def test_where_all_agree_nothing_is_written(kept_ledger: Ledger, keepers) -> None:
    before = kept_ledger.path.read_bytes()
    assert accept(kept_ledger.path, keepers, reason="to be sure") == ()
    assert kept_ledger.path.read_bytes() == before


def test_a_damaged_head_is_accepted_too(kept_ledger: Ledger, keepers) -> None:
    keepers[0].path.write_text("{")
    (lost,) = accept(kept_ledger.path, keepers, reason="a bad disk")
    assert "is damaged" in lost
    assert len(kept_ledger.entries()) == 4


def test_a_broken_chain_is_not_accepted(kept_ledger: Ledger, keepers) -> None:
    data = kept_ledger.path.read_bytes()
    kept_ledger.path.write_bytes(data.replace(b'"one"', b'"eno"'))
    with pytest.raises(EvidenceError, match="the chain is broken"):
        accept(kept_ledger.path, keepers, reason="never mind")
    kept_ledger.path.write_bytes(data)
    assert len(kept_ledger.entries()) == 3


def test_a_keeper_that_is_away_is_not_passed_over(kept_ledger: Ledger, keepers) -> None:
    before = kept_ledger.path.read_bytes()
    away = [*keepers, Away(keepers[0].path, place="the inbox")]
    with pytest.raises(InboxUnavailable):
        accept(kept_ledger.path, away, reason="never mind")
    assert kept_ledger.path.read_bytes() == before


def test_what_is_lost_after_an_acceptance_is_seen_again(kept_ledger: Ledger, keepers) -> None:
    data = kept_ledger.path.read_bytes()
    kept_ledger.path.write_bytes(b"".join(data.splitlines(keepends=True)[:2]))
    accept(kept_ledger.path, keepers, reason="the disk died")
    kept_ledger.path.write_bytes(data)
    with pytest.raises(PastChanged):
        kept_ledger.verify()
