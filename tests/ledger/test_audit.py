"""Each line is vouched for: by its own signature, or by a person who said so later."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.errors import EvidenceError, PastChanged, Untrusted
from gate.ledger.ledger import Ledger, StoredHead
from gate.ledger.maintenance import accept_rewrite, audit_ledger
from tests.ledger.keys import Writers
from tests.ledger.rows import put, replace, rows
from tests.ledger.test_signature import entry, signed, writers  # noqa: F401


@pytest.fixture
def store(tmp_path: Path) -> StoredHead:
    return StoredHead(tmp_path / "store" / "head.json", place="the store")


def test_all_lines_of_a_trusted_writer(signed: Ledger, writers: Writers) -> None:  # noqa: F811
    found = audit_ledger(signed)
    assert (found.lines, found.head) == (3, signed.digest(3))
    assert found.by_key == {writers.key("ci").public.key_id: 3}
    assert found.accepted == ()


def test_where_nobody_is_trusted_only_the_chain_is_proven(both: Ledger) -> None:
    assert audit_ledger(both).lines == 0
    both.append(entry("one"))
    both.append(entry("two"))
    assert (audit_ledger(both).lines, audit_ledger(both).by_key) == (2, {})
    replace(both.state, b'"one"', b'"eno"')
    both.entries()  # its last line is as it was
    with pytest.raises(EvidenceError, match=":2: the chain is broken"):
        audit_ledger(both)


@pytest.mark.parametrize("spoiled", [None, "[]", "{}"])
def test_a_signature_that_was_lost_inside_is_seen_and_can_be_accepted(
    signed: Ledger,  # noqa: F811
    spoiled: str | None,
) -> None:
    first, second, third = rows(signed.state)
    put(signed.state, [first, second._replace(signature=spoiled), third])
    assert len(signed.entries()) == 3  # the last signature vouches for what it says
    with pytest.raises(Untrusted, match=r":2: this line has .*signature"):
        audit_ledger(signed)
    signed.append(entry("looked at", action="ledger_accepted"))
    assert audit_ledger(signed).accepted == (2,)


def test_what_a_revoked_key_signed_is_refused_until_a_trusted_writer_vouches(
    signed: Ledger,  # noqa: F811
    writers: Writers,  # noqa: F811
    store: StoredHead,
) -> None:
    trust = writers.trusting(("ci", "new"), revoked=("ci",))
    now = Ledger(signed.state, key=writers.key("new"), trust=trust)
    for use in (now.entries, lambda: audit_ledger(now), lambda: now.append(entry("four"))):
        with pytest.raises(Untrusted, match="is revoked"):
            use()
    (why,) = accept_rewrite(now, store, reason="all lines were compared with last week's copy")
    assert "is revoked" in why
    assert [e.action for e in now.entries()][3:] == ["ledger_accepted"]
    found = audit_ledger(now)
    assert found.accepted == (1, 2, 3)
    assert found.by_key == {writers.key("new").public.key_id: 1}
    assert accept_rewrite(now, store, reason="again") == ()


def test_who_is_not_trusted_accepts_nothing(
    signed: Ledger,  # noqa: F811
    writers: Writers,  # noqa: F811
    store: StoredHead,
) -> None:
    trust = writers.trusting(("ci", "new"), revoked=("ci",))
    for key in (None, writers.key("ci"), writers.key("stranger")):
        with pytest.raises(Untrusted, match="nothing is written"):
            accept_rewrite(Ledger(signed.state, key=key, trust=trust), store, reason="never mind")
    assert len(rows(signed.state)) == 3


def test_another_past_is_seen_too(both: Ledger, store: StoredHead) -> None:
    ledger = Ledger(both.state, stored_head=store)
    for reason in ("one", "two"):
        ledger.append(entry(reason))
    put(both.state, rows(both.state)[:1])
    with pytest.raises(PastChanged):
        audit_ledger(ledger)
