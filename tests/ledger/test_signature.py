"""Changes of a signed ledger are detected, even if the attacker can write all rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gate import Digest
from gate.errors import EvidenceError, KeyUnusable, PastChanged, Untrusted
from gate.ledger.entry import Row
from gate.ledger.ledger import Ledger, StoredHead, require_writable, sign
from gate.ledger.maintenance import Checkpoint, accept_rewrite, audit_ledger, checkpoint_signers
from gate.signing.statement import SignedStatement
from gate.storage.digest import canonical_json
from tests.ledger.keys import Writers
from tests.ledger.rows import entry, replace_rows, replace_text, rows


@pytest.fixture
def writers(tmp_path: Path) -> Writers:
    return Writers(tmp_path)


@pytest.fixture
def signed_ledger(database_ledger: Ledger, writers: Writers) -> Ledger:
    """A ledger with three entries of a trusted writer."""
    created = Ledger(database_ledger.state, key=writers.key("ci"), trust=writers.trusting("ci"))
    for reason in ("one", "two", "three"):
        created.append(entry(reason))
    return created


def rebuild_chain(stored: list[Row], *, key=None) -> list[Row]:
    """Set the parents of the rows to match, as a forger does."""
    created: list[Row] = []
    for row in stored:
        plain = json.loads(row.line)
        plain["parent"] = str(Digest.from_bytes(created[-1].line)) if created else None
        line = canonical_json(plain)
        created.append(Row(len(created) + 1, line, sign(line, key) if key else row.signature))
    return created


def rewrite_first_entry(stored: list[Row]) -> list[Row]:
    first = stored[0]._replace(line=stored[0].line.replace(b'"one"', b'"eno"'))
    return rebuild_chain([first, *stored[1:]])


def change_last(**fields: Any) -> Callable[[list[Row]], list[Row]]:
    return lambda stored: [*stored[:2], stored[2]._replace(**fields)]


FORGED: dict[str, tuple[Callable[[list[Row]], list[Row]], str]] = {
    "first entry rewritten": (rewrite_first_entry, "by ci .* does not verify"),
    "second entry removed": (
        lambda stored: rebuild_chain([stored[0], stored[2]]), "by ci .* does not verify"),
    "entries reordered": (
        lambda stored: rebuild_chain([stored[1], stored[0], stored[2]]), "by ci .* does not verify"),
    "last entry edited": (
        lambda stored: change_last(line=stored[2].line.replace(b'"three"', b'"eerht"'))(stored),
        "by ci .* does not verify"),
    "signature removed": (change_last(signature=None), "has no signature"),
    "signature of another entry": (
        lambda stored: change_last(signature=stored[1].signature)(stored), "by ci .* does not verify"),
    "invalid signature": (change_last(signature="[]"), "can't be read"),
    "unsigned entry added": (
        lambda stored: rebuild_chain([*stored, Row(4, stored[2].line.replace(b'"three"', b'"four"'))]),
        "has no signature"),
}  # fmt: skip


@pytest.mark.rows(5)
@pytest.mark.parametrize("anew", [True, False], ids=["at start", "while it runs"])
@pytest.mark.parametrize("kind", FORGED)
def test_forged_ledger_is_untrusted(signed_ledger: Ledger, writers: Writers, kind, anew) -> None:
    forge, reason = FORGED[kind]
    replace_rows(signed_ledger.state, forge(rows(signed_ledger.state)))
    key, trust = writers.key("ci"), writers.trusting("ci")
    ledger = Ledger(signed_ledger.state, key=key, trust=trust) if anew else signed_ledger
    for use in (ledger.entries, ledger.verify, lambda: ledger.append(entry("more"))):
        with pytest.raises(Untrusted, match=reason) as caught:
            use()
        assert "gate accept-ledger" in str(caught.value)
    assert len(Ledger(signed_ledger.state).entries()) == len(rows(signed_ledger.state))  # no trust


@pytest.mark.parametrize(
    ("trust", "reason"),
    [
        ({"names": ("ci",), "revoked": ("ci",)}, "is revoked"),
        ({"names": ("ci",), "valid_until": "2026-01-01T00:00:00Z"}, "was valid until"),
        ({"names": ("ci",), "valid_from": "2099-01-01T00:00:00Z"}, "is valid from"),
        ({"names": ("other",)}, "not trusted as a writer"),
    ],
    ids=["revoked", "too old", "too young", "other"],
)
def test_changed_trust_applies_at_the_next_read(
    signed_ledger: Ledger, writers: Writers, trust, reason: str
) -> None:
    signed_ledger.entries()
    signed_ledger.trust = writers.trusting(**trust)
    with pytest.raises(Untrusted, match=reason):
        signed_ledger.entries()


def test_rotated_key_is_valid_for_its_period(database_ledger: Ledger, writers: Writers) -> None:
    old = Ledger(database_ledger.state, key=writers.key("old"), trust=writers.trusting("old"))
    old.append(entry("one", at="2026-01-01T00:00:00+00:00"))
    rotated = writers.trusting(("old", "new"), valid_until="2026-02-01T00:00:00Z")
    new = Ledger(database_ledger.state, key=writers.key("new"), trust=rotated)
    assert [e.reason for e in new.entries()] == ["one"]
    new.append(entry("two"))
    old.trust = rotated
    with pytest.raises(Untrusted, match="not a trusted writer now"):
        old.append(entry("three"))
    assert len(new.entries()) == 2


def test_writer_must_be_trusted_by_its_own_trust(signed_ledger: Ledger, writers: Writers) -> None:
    for key in (None, writers.key("stranger")):
        with pytest.raises(Untrusted, match="there is no key|not a trusted writer"):
            Ledger(signed_ledger.state, key=key, trust=signed_ledger.trust).append(entry("four"))
    assert len(signed_ledger.entries()) == 3
    stored = rebuild_chain(rows(signed_ledger.state), key=writers.key("stranger"))
    replace_rows(signed_ledger.state, stored)
    with pytest.raises(Untrusted, match="not trusted as a writer"):
        signed_ledger.entries()


def test_failing_key_writes_nothing(signed_ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATE_SIGNING_PIN", "hunter-22")

    def refuse(_data: bytes) -> None:
        raise RuntimeError("no session with PIN hunter-22")

    monkeypatch.setattr(signed_ledger.key.signer, "sign", refuse)
    with pytest.raises(KeyUnusable, match="can't sign now") as caught:
        signed_ledger.append(entry("four"))
    assert "hunter-22" not in str(caught.value)
    assert len(signed_ledger.entries()) == 3


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_signed_ledger_requires_a_key(database_ledger: Ledger, tmp_path: Path) -> None:
    writers = Writers(tmp_path)
    require_writable(database_ledger)
    database_ledger.append(entry("without a signature"))
    require_writable(database_ledger)
    database_ledger.key = writers.key("ci")
    database_ledger.append(entry("signed"))
    require_writable(database_ledger)
    require_writable(Ledger(database_ledger.state, key=writers.key("other")))
    with pytest.raises(KeyUnusable, match="--key or GATE_SIGNING_KEY"):
        require_writable(Ledger(database_ledger.state))


def test_key_without_writer_trust_is_refused(database_ledger: Ledger, tmp_path: Path) -> None:
    writers = Writers(tmp_path)
    trust = writers.trusting("service")
    require_writable(Ledger(database_ledger.state, key=writers.key("service"), trust=trust))
    for key in (None, writers.key("ci")):
        with pytest.raises(Untrusted, match="trusted as a writer"):
            require_writable(Ledger(database_ledger.state, key=key, trust=trust))


@pytest.fixture
def checkpoint_data(database_ledger: Ledger, writers: Writers) -> bytes:
    """A signed checkpoint of two entries."""
    for reason in ("one", "two"):
        database_ledger.append(entry(reason))
    return Checkpoint.from_ledger(database_ledger).sign(writers.key("ci")).data


def test_checkpoint_accepts_a_ledger_that_only_grew(
    database_ledger: Ledger, checkpoint_data: bytes, writers
) -> None:
    signed_ledger = SignedStatement.from_bytes(checkpoint_data)
    (signer,) = checkpoint_signers(signed_ledger, trust=writers.trusting("ci"))
    assert signer.name == "ci"
    checkpoint = Checkpoint.from_statement(signed_ledger)
    assert checkpoint.verify(database_ledger) == 0
    database_ledger.append(entry("three"))
    assert checkpoint.verify(database_ledger) == 1


@pytest.mark.parametrize(
    ("tamper", "what"),
    [
        (lambda stored: stored[:1], "ends at entry 1: entries were removed"),
        (lambda stored: [], "ends at entry 0: entries were removed"),
        (lambda stored: rebuild_chain([stored[1], stored[2]]), "rewritten or removed"),
        (lambda stored: rebuild_chain([stored[1], stored[0], stored[2]]), "rewritten or removed"),
        (lambda stored: rebuild_chain([stored[0]._replace(line=stored[0].line.replace(b"one", b"ONE")),
                                *stored[1:]]), "rewritten or removed"),
    ],
    ids=["end cut off", "emptied", "first gone", "swapped", "edited"],
)  # fmt: skip
def test_checkpoint_detects_a_changed_past(
    database_ledger: Ledger, checkpoint_data: bytes, tamper, what: str
) -> None:
    database_ledger.append(entry("three"))
    replace_rows(database_ledger.state, tamper(rows(database_ledger.state)))
    with pytest.raises(PastChanged, match=what) as caught:
        Checkpoint.from_statement(SignedStatement.from_bytes(checkpoint_data)).verify(
            database_ledger
        )
    assert "had 2 entries" in str(caught.value)


@pytest.mark.parametrize(
    "trust",
    [{"names": ("other",)}, {"names": ("ci",), "revoked": ("ci",)},
     {"names": ("ci",), "valid_until": "2026-01-01T00:00:00Z"}, {"names": ()}],
    ids=["other", "revoked", "before", "nobody"],
)  # fmt: skip
def test_checkpoint_must_be_signed_by_a_trusted_writer(
    checkpoint_data: bytes, writers, trust
) -> None:
    with pytest.raises(Untrusted, match="was trusted as a writer"):
        checkpoint_signers(
            SignedStatement.from_bytes(checkpoint_data), trust=writers.trusting(**trust)
        )


def test_empty_ledger_has_no_checkpoint(database_ledger: Ledger) -> None:
    with pytest.raises(EvidenceError, match="is empty"):
        Checkpoint.from_ledger(database_ledger)


@pytest.fixture
def store(tmp_path: Path) -> StoredHead:
    return StoredHead(tmp_path / "store" / "head.json", location="the store")


def test_audit_counts_entries_by_key(signed_ledger: Ledger, writers: Writers) -> None:
    result = audit_ledger(signed_ledger)
    assert (result.lines, result.head) == (3, signed_ledger.digest(3))
    assert result.by_key == {writers.key("ci").public.key_id: 3}
    assert result.accepted == ()


def test_audit_without_trust_verifies_the_chain_only(database_ledger: Ledger) -> None:
    assert audit_ledger(database_ledger).lines == 0
    database_ledger.append(entry("one"))
    database_ledger.append(entry("two"))
    assert (audit_ledger(database_ledger).lines, audit_ledger(database_ledger).by_key) == (2, {})
    replace_text(database_ledger.state, b'"one"', b'"eno"')
    database_ledger.entries()  # the last line is unchanged
    with pytest.raises(EvidenceError, match=":2: the chain is broken"):
        audit_ledger(database_ledger)


@pytest.mark.parametrize("spoiled", [None, "[]", "{}"])
def test_audit_detects_a_lost_signature_until_it_is_accepted(
    signed_ledger: Ledger,
    spoiled: str | None,
) -> None:
    first, second, third = rows(signed_ledger.state)
    replace_rows(signed_ledger.state, [first, second._replace(signature=spoiled), third])
    assert len(signed_ledger.entries()) == 3  # the last signature covers all
    with pytest.raises(Untrusted, match=r":2: this entry has .*signature"):
        audit_ledger(signed_ledger)
    signed_ledger.append(entry("looked at", action="ledger_accepted"))
    assert audit_ledger(signed_ledger).accepted == (2,)


def test_entries_of_a_revoked_key_need_acceptance(
    signed_ledger: Ledger,
    writers: Writers,
    store: StoredHead,
) -> None:
    trust = writers.trusting(("ci", "new"), revoked=("ci",))
    now = Ledger(signed_ledger.state, key=writers.key("new"), trust=trust)
    for use in (now.entries, lambda: audit_ledger(now), lambda: now.append(entry("four"))):
        with pytest.raises(Untrusted, match="is revoked"):
            use()
    (reason,) = accept_rewrite(now, store, reason="all lines were compared with last week's copy")
    assert "is revoked" in reason
    assert [e.action for e in now.entries()][3:] == ["ledger_accepted"]
    result = audit_ledger(now)
    assert result.accepted == (1, 2, 3)
    assert result.by_key == {writers.key("new").public.key_id: 1}
    assert accept_rewrite(now, store, reason="again") == ()


def test_untrusted_key_cannot_accept_a_rewrite(
    signed_ledger: Ledger,
    writers: Writers,
    store: StoredHead,
) -> None:
    trust = writers.trusting(("ci", "new"), revoked=("ci",))
    for key in (None, writers.key("ci"), writers.key("stranger")):
        with pytest.raises(Untrusted, match="no entry can be added"):
            accept_rewrite(
                Ledger(signed_ledger.state, key=key, trust=trust), store, reason="never mind"
            )
    assert len(rows(signed_ledger.state)) == 3


def test_audit_checks_the_stored_head(database_ledger: Ledger, store: StoredHead) -> None:
    ledger = Ledger(database_ledger.state, stored_head=store)
    for reason in ("one", "two"):
        ledger.append(entry(reason))
    replace_rows(database_ledger.state, rows(database_ledger.state)[:1])
    with pytest.raises(PastChanged):
        audit_ledger(ledger)
