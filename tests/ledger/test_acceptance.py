"""A person says that a shorter past is meant: it leaves a line, and then all goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gate.errors import EvidenceError, PastChanged, StateUnavailable
from gate.ledger import maintenance
from gate.ledger.entry import LedgerEntry, actor
from gate.ledger.ledger import Ledger, StoredHead
from gate.ledger.maintenance import accept_rewrite
from tests.ledger.rows import put, replace, rows
from tests.ledger.test_head import CHANGED, Away, older_copy


@pytest.fixture
def head(tmp_path: Path) -> StoredHead:
    return StoredHead(tmp_path / "store" / "head.json", place="the store")


@pytest.fixture
def kept_ledger(ledger: Ledger, head: StoredHead) -> Ledger:
    made = Ledger(ledger.state, stored_head=head)
    for reason in ("one", "two", "three"):
        line = LedgerEntry(action="promoted", registry="here", model="digits", reason=reason)
        made.append(line)
    return made


@pytest.mark.parametrize("spoil", CHANGED)
def test_what_is_accepted_leaves_a_line_and_goes_on(
    kept_ledger: Ledger, head: StoredHead, spoil
) -> None:
    spoil(kept_ledger.state)
    lost = accept_rewrite(Ledger(Path(kept_ledger.location)), head, reason="the disk died")
    assert "the store saw 3 lines" in lost[0]
    line = kept_ledger.entries()[-1]
    assert (line.action, line.actor) == ("ledger_accepted", actor())
    assert "the disk died" in line.reason
    assert lost[0] in line.reason
    assert len(Ledger(kept_ledger.state, stored_head=head).entries()) == len(kept_ledger.entries())
    assert accept_rewrite(Ledger(kept_ledger.state), head, reason="again") == ()


def test_where_all_agree_nothing_is_written(kept_ledger: Ledger, head: StoredHead) -> None:
    before = rows(kept_ledger.state)
    assert accept_rewrite(Ledger(kept_ledger.state), head, reason="to be sure") == ()
    assert rows(kept_ledger.state) == before


def test_a_damaged_head_is_accepted_too(kept_ledger: Ledger, head: StoredHead) -> None:
    head.path.write_text("{")
    (lost,) = accept_rewrite(Ledger(kept_ledger.state), head, reason="a bad disk")
    assert "is damaged" in lost
    assert len(kept_ledger.entries()) == 4


def test_a_broken_chain_is_not_accepted(kept_ledger: Ledger, head: StoredHead) -> None:
    good = rows(kept_ledger.state)
    replace(kept_ledger.state, b'"one"', b'"eno"')
    with pytest.raises(EvidenceError, match="the chain is broken"):
        accept_rewrite(Ledger(kept_ledger.state), head, reason="never mind")
    put(kept_ledger.state, good)
    assert len(kept_ledger.entries()) == 3


def test_a_stored_head_that_is_away_is_not_passed_over(
    kept_ledger: Ledger, head: StoredHead
) -> None:
    before = rows(kept_ledger.state)
    away = Away(head.path, place="the inbox")
    with pytest.raises(StateUnavailable):
        accept_rewrite(Ledger(kept_ledger.state), away, reason="never mind")
    assert rows(kept_ledger.state) == before


def test_what_is_lost_after_an_acceptance_is_seen_again(
    kept_ledger: Ledger, head: StoredHead
) -> None:
    good = rows(kept_ledger.state)
    older_copy(kept_ledger.state)
    accept_rewrite(Ledger(kept_ledger.state), head, reason="the disk died")
    put(kept_ledger.state, good)
    with pytest.raises(PastChanged):
        kept_ledger.verify()


class TestBesideAHealthyService:
    """It adds lines while a person waits: nothing was lost."""

    @pytest.fixture
    def added(self, kept_ledger: Ledger) -> LedgerEntry:
        return LedgerEntry(action="deployed", registry="here", model="digits", reason="a look")

    def test_a_line_while_the_lock_is_waited_for(
        self,
        kept_ledger: Ledger,
        head: StoredHead,
        added: LedgerEntry,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        real = maintenance.promotion_lock

        @contextmanager
        def late(ledger: Ledger, **given: Any) -> Iterator[None]:
            kept_ledger.append(added)
            with real(ledger, **given):
                yield

        monkeypatch.setattr(maintenance, "promotion_lock", late)
        assert accept_rewrite(Ledger(kept_ledger.state), head, reason="to be sure") == ()
        assert [line.reason for line in kept_ledger.entries()][3:] == ["a look"]

    def test_a_line_that_needs_no_lock(
        self,
        kept_ledger: Ledger,
        head: StoredHead,
        added: LedgerEntry,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Somebody else's conflict, whose head the service keeps."""
        answer = head.head

        def overtaken() -> object:
            monkeypatch.setattr(head, "head", answer)
            kept_ledger.append(added)
            return answer()

        monkeypatch.setattr(head, "head", overtaken)
        assert accept_rewrite(Ledger(kept_ledger.state), head, reason="to be sure") == ()
        assert [line.reason for line in kept_ledger.entries()][3:] == ["a look"]
