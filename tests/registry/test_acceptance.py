"""A person says that a shorter past is meant: it leaves a line, and then all goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gate.errors import EvidenceError, InboxUnavailable, PastChanged
from gate.registry import acceptance
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


class TestBesideAHealthyService:
    """It adds lines while a person waits: nothing was lost."""

    @pytest.fixture
    def added(self, kept_ledger: Ledger) -> LedgerEntry:
        return LedgerEntry(action="deployed", registry="here", model="digits", reason="a look")

    def test_a_line_while_the_lock_is_waited_for(
        self, kept_ledger: Ledger, keepers, added: LedgerEntry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = acceptance.promotion_lock

        @contextmanager
        def late(ledger: Ledger, **given: Any) -> Iterator[None]:
            kept_ledger.append(added)
            with real(ledger, **given):
                yield

        monkeypatch.setattr(acceptance, "promotion_lock", late)
        assert accept(kept_ledger.path, keepers, reason="to be sure") == ()
        assert [line.reason for line in kept_ledger.entries()][3:] == ["a look"]

    def test_a_line_that_needs_no_lock(
        self, kept_ledger: Ledger, keepers, added: LedgerEntry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody else's conflict, which the service shows the keepers."""
        answer = keepers[1].head

        def overtaken() -> object:
            monkeypatch.setattr(keepers[1], "head", answer)
            kept_ledger.append(added)
            return answer()

        monkeypatch.setattr(keepers[1], "head", overtaken)
        assert accept(kept_ledger.path, keepers, reason="to be sure") == ()
        assert [line.reason for line in kept_ledger.entries()][3:] == ["a look"]
