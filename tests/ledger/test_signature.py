"""Signed ledgers: changes are detected even by someone who may write all rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gate.errors import EvidenceError, KeyUnusable, PastChanged, Untrusted
from gate.ledger.entry import LedgerEntry, Row
from gate.ledger.ledger import Ledger, StoredHead, require_writable, sign
from gate.ledger.maintenance import Checkpoint, accept_rewrite, audit_ledger, checkpoint_signers
from gate.signing.statement import SignedStatement
from gate.storage.digest import Digest, canonical_json
from tests.ledger.keys import Writers
from tests.ledger.rows import put, replace, rows


def entry(reason: str, **fields: object) -> LedgerEntry:
    arguments = {"action": "promoted", "registry": "here", "model": "digits", "reason": reason}
    return LedgerEntry.model_validate(arguments | fields)


@pytest.fixture
def writers(tmp_path: Path) -> Writers:
    return Writers(tmp_path)


@pytest.fixture
def signed(both: Ledger, writers: Writers) -> Ledger:
    """Three lines of a trusted writer."""
    created = Ledger(both.state, key=writers.key("ci"), trust=writers.trusting("ci"))
    for reason in ("one", "two", "three"):
        created.append(entry(reason))
    return created


def chained(checkpoint_data: list[Row], *, key=None) -> list[Row]:
    """With parents that fit, as a forger writes them."""
    created: list[Row] = []
    for row in checkpoint_data:
        plain = json.loads(row.line)
        plain["parent"] = str(Digest.from_bytes(created[-1].line)) if created else None
        line = canonical_json(plain)
        created.append(Row(len(created) + 1, line, sign(line, key) if key else row.signature))
    return created


def rewritten(checkpoint_data: list[Row]) -> list[Row]:
    first = checkpoint_data[0]._replace(line=checkpoint_data[0].line.replace(b'"one"', b'"eno"'))
    return chained([first, *checkpoint_data[1:]])


def removed(checkpoint_data: list[Row]) -> list[Row]:
    return chained([checkpoint_data[0], checkpoint_data[2]])


def reordered(checkpoint_data: list[Row]) -> list[Row]:
    return chained([checkpoint_data[1], checkpoint_data[0], checkpoint_data[2]])


def edited_end(checkpoint_data: list[Row]) -> list[Row]:
    return [
        *checkpoint_data[:2],
        checkpoint_data[2]._replace(line=checkpoint_data[2].line.replace(b'"three"', b'"eerht"')),
    ]


def signature_removed(checkpoint_data: list[Row]) -> list[Row]:
    return [*checkpoint_data[:2], checkpoint_data[2]._replace(signature=None)]


def signature_replaced(checkpoint_data: list[Row]) -> list[Row]:
    return [
        *checkpoint_data[:2],
        checkpoint_data[2]._replace(signature=checkpoint_data[1].signature),
    ]


def signature_not_an_object(checkpoint_data: list[Row]) -> list[Row]:
    return [*checkpoint_data[:2], checkpoint_data[2]._replace(signature="[]")]


def unsigned_entry_added(checkpoint_data: list[Row]) -> list[Row]:
    return chained(
        [*checkpoint_data, Row(4, checkpoint_data[2].line.replace(b'"three"', b'"four"'))]
    )


FORGED: dict[Callable[[list[Row]], list[Row]], str] = {
    rewritten: "by ci .* does not verify",
    removed: "by ci .* does not verify",
    reordered: "by ci .* does not verify",
    edited_end: "by ci .* does not verify",
    signature_removed: "has no signature",
    signature_replaced: "by ci .* does not verify",
    signature_not_an_object: "can't be read",
    unsigned_entry_added: "has no signature",
}


@pytest.mark.rows(5)
@pytest.mark.parametrize("anew", [True, False], ids=["at start", "while it runs"])
@pytest.mark.parametrize("forge", FORGED)
def test_forged_ledger_is_untrusted(signed: Ledger, writers: Writers, forge, anew) -> None:
    put(signed.state, forge(rows(signed.state)))
    key, trust = writers.key("ci"), writers.trusting("ci")
    ledger = Ledger(signed.state, key=key, trust=trust) if anew else signed
    for use in (ledger.entries, ledger.verify, lambda: ledger.append(entry("more"))):
        with pytest.raises(Untrusted, match=FORGED[forge]) as caught:
            use()
        assert "gate accept-ledger" in str(caught.value)
    assert len(Ledger(signed.state).entries()) == len(rows(signed.state))  # who trusts nobody


def test_ledger_signed_by_an_unknown_key_is_untrusted(signed: Ledger, writers: Writers) -> None:
    put(signed.state, chained(rows(signed.state), key=writers.key("stranger")))
    with pytest.raises(Untrusted, match="not trusted as a writer"):
        signed.entries()


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
    signed: Ledger, writers: Writers, trust, reason: str
) -> None:
    signed.entries()
    signed.trust = writers.trusting(**trust)
    with pytest.raises(Untrusted, match=reason):
        signed.entries()


def test_rotated_key_is_valid_for_its_period(both: Ledger, writers: Writers) -> None:
    old = Ledger(both.state, key=writers.key("old"), trust=writers.trusting("old"))
    old.append(entry("one", at="2026-01-01T00:00:00+00:00"))
    rotated = writers.trusting(("old", "new"), valid_until="2026-02-01T00:00:00Z")
    new = Ledger(both.state, key=writers.key("new"), trust=rotated)
    assert [e.reason for e in new.entries()] == ["one"]
    new.append(entry("two"))
    old.trust = rotated
    with pytest.raises(Untrusted, match="not a trusted writer now"):
        old.append(entry("three"))
    assert len(new.entries()) == 2


def test_writer_must_be_trusted_by_its_own_trust(signed: Ledger, writers: Writers) -> None:
    for key in (None, writers.key("stranger")):
        with pytest.raises(Untrusted, match="there is no key|not a trusted writer"):
            Ledger(signed.state, key=key, trust=signed.trust).append(entry("four"))
    assert len(signed.entries()) == 3


def test_failing_key_writes_nothing(signed: Ledger, monkeypatch) -> None:
    def away(_data: bytes) -> None:
        raise OSError("the vault is sealed")

    monkeypatch.setattr(signed.key.signer, "sign", away)
    with pytest.raises(KeyUnusable, match="the vault is sealed"):
        signed.append(entry("four"))
    assert len(signed.entries()) == 3


def test_pin_is_hidden_in_signing_errors(
    both: Ledger, writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = writers.key("ci")
    monkeypatch.setenv("GATE_SIGNING_PIN", "hunter-22")

    def refuse(_data: bytes) -> None:
        raise RuntimeError("no session with PIN hunter-22")

    monkeypatch.setattr(key.signer, "sign", refuse)
    with pytest.raises(KeyUnusable, match="can't sign now") as caught:
        Ledger(both.state, key=key).append(entry("one"))
    assert "hunter-22" not in str(caught.value)


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_signed_ledger_requires_a_key(both: Ledger, tmp_path: Path) -> None:
    writers = Writers(tmp_path)
    require_writable(both)
    both.append(entry("nobody signs yet"))
    require_writable(both)
    both.key = writers.key("ci")
    both.append(entry("signed"))
    require_writable(both)
    require_writable(Ledger(both.state, key=writers.key("other")))
    with pytest.raises(KeyUnusable, match="--key or GATE_SIGNING_KEY"):
        require_writable(Ledger(both.state))


def test_key_without_writer_trust_is_refused(both: Ledger, tmp_path: Path) -> None:
    writers = Writers(tmp_path)
    trust = writers.trusting("service")
    require_writable(Ledger(both.state, key=writers.key("service"), trust=trust))
    for key in (None, writers.key("ci")):
        with pytest.raises(Untrusted, match="trusted as a writer"):
            require_writable(Ledger(both.state, key=key, trust=trust))


@pytest.fixture
def checkpoint_data(both: Ledger, writers: Writers) -> bytes:
    """Of two lines, as it is on the auditor's disk."""
    for reason in ("one", "two"):
        both.append(entry(reason))
    return Checkpoint.from_ledger(both).sign(writers.key("ci")).data


def test_checkpoint_accepts_a_ledger_that_only_grew(
    both: Ledger, checkpoint_data: bytes, writers
) -> None:
    signed = SignedStatement.from_bytes(checkpoint_data)
    (who,) = checkpoint_signers(signed, trust=writers.trusting("ci"))
    assert who.name == "ci"
    checkpoint = Checkpoint.from_statement(signed)
    assert checkpoint.verify(both) == 0
    both.append(entry("three"))
    assert checkpoint.verify(both) == 1


@pytest.mark.parametrize(
    ("tamper", "what"),
    [
        (lambda found: found[:1], "ends at entry 1: entries were removed"),
        (lambda found: [], "ends at entry 0: entries were removed"),
        (lambda found: chained([found[1], found[2]]), "rewritten or removed"),
        (lambda found: chained([found[1], found[0], found[2]]), "rewritten or removed"),
        (lambda found: chained([found[0]._replace(line=found[0].line.replace(b"one", b"ONE")),
                                *found[1:]]), "rewritten or removed"),
    ],
    ids=["end cut off", "emptied", "first gone", "swapped", "edited"],
)  # fmt: skip
def test_checkpoint_detects_a_changed_past(
    both: Ledger, checkpoint_data: bytes, tamper, what: str
) -> None:
    both.append(entry("three"))
    put(both.state, tamper(rows(both.state)))
    with pytest.raises(PastChanged, match=what) as caught:
        Checkpoint.from_statement(SignedStatement.from_bytes(checkpoint_data)).verify(both)
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


def test_empty_ledger_has_no_checkpoint(both: Ledger) -> None:
    with pytest.raises(EvidenceError, match="is empty"):
        Checkpoint.from_ledger(both)


@pytest.mark.parametrize("tamper", [b"urn:parity-gate:checkpoint:v2", b'{"at":1}'])
def test_other_statement_is_not_a_checkpoint(
    both: Ledger, checkpoint_data: bytes, writers, tamper: bytes
) -> None:
    statement = SignedStatement.from_bytes(checkpoint_data).statement
    changed = (
        {"predicate_type": tamper.decode()} if b"urn" in tamper else {"predicate": {"at": 1}}
    )  # fmt: skip
    second = SignedStatement.sign(statement.model_copy(update=changed), writers.key("ci"))
    with pytest.raises(Untrusted, match="checkpoint"):
        Checkpoint.from_statement(second, label="the checkpoint")


@pytest.fixture
def store(tmp_path: Path) -> StoredHead:
    return StoredHead(tmp_path / "store" / "head.json", location="the store")


def test_audit_counts_entries_by_key(signed: Ledger, writers: Writers) -> None:
    result = audit_ledger(signed)
    assert (result.lines, result.head) == (3, signed.digest(3))
    assert result.by_key == {writers.key("ci").public.key_id: 3}
    assert result.accepted == ()


def test_audit_without_trust_verifies_the_chain_only(both: Ledger) -> None:
    assert audit_ledger(both).lines == 0
    both.append(entry("one"))
    both.append(entry("two"))
    assert (audit_ledger(both).lines, audit_ledger(both).by_key) == (2, {})
    replace(both.state, b'"one"', b'"eno"')
    both.entries()  # its last line is as it was
    with pytest.raises(EvidenceError, match=":2: the chain is broken"):
        audit_ledger(both)


@pytest.mark.parametrize("spoiled", [None, "[]", "{}"])
def test_audit_detects_a_lost_signature_until_it_is_accepted(
    signed: Ledger,
    spoiled: str | None,
) -> None:
    first, second, third = rows(signed.state)
    put(signed.state, [first, second._replace(signature=spoiled), third])
    assert len(signed.entries()) == 3  # the last signature vouches for what it says
    with pytest.raises(Untrusted, match=r":2: this entry has .*signature"):
        audit_ledger(signed)
    signed.append(entry("looked at", action="ledger_accepted"))
    assert audit_ledger(signed).accepted == (2,)


def test_entries_of_a_revoked_key_need_acceptance(
    signed: Ledger,
    writers: Writers,
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
    result = audit_ledger(now)
    assert result.accepted == (1, 2, 3)
    assert result.by_key == {writers.key("new").public.key_id: 1}
    assert accept_rewrite(now, store, reason="again") == ()


def test_untrusted_key_cannot_accept_a_rewrite(
    signed: Ledger,
    writers: Writers,
    store: StoredHead,
) -> None:
    trust = writers.trusting(("ci", "new"), revoked=("ci",))
    for key in (None, writers.key("ci"), writers.key("stranger")):
        with pytest.raises(Untrusted, match="no entry can be added"):
            accept_rewrite(Ledger(signed.state, key=key, trust=trust), store, reason="never mind")
    assert len(rows(signed.state)) == 3


def test_audit_checks_the_stored_head(both: Ledger, store: StoredHead) -> None:
    ledger = Ledger(both.state, stored_head=store)
    for reason in ("one", "two"):
        ledger.append(entry(reason))
    put(both.state, rows(both.state)[:1])
    with pytest.raises(PastChanged):
        audit_ledger(ledger)
