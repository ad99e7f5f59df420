"""With a trusted writer's key nobody rewrites the past unseen, whatever he may do to the rows."""

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
    given = {"action": "promoted", "registry": "here", "model": "digits", "reason": reason}
    return LedgerEntry.model_validate(given | fields)


@pytest.fixture
def writers(tmp_path: Path) -> Writers:
    return Writers(tmp_path)


@pytest.fixture
def signed(both: Ledger, writers: Writers) -> Ledger:
    """Three lines of a trusted writer."""
    made = Ledger(both.state, key=writers.key("ci"), trust=writers.trusting("ci"))
    for reason in ("one", "two", "three"):
        made.append(entry(reason))
    return made


def chained(kept: list[Row], *, key=None) -> list[Row]:
    """With parents that fit, as a forger writes them."""
    made: list[Row] = []
    for row in kept:
        plain = json.loads(row.line)
        plain["parent"] = str(Digest.from_bytes(made[-1].line)) if made else None
        line = canonical_json(plain)
        made.append(Row(len(made) + 1, line, sign(line, key) if key else row.signature))
    return made


def rewritten(kept: list[Row]) -> list[Row]:
    first = kept[0]._replace(line=kept[0].line.replace(b'"one"', b'"eno"'))
    return chained([first, *kept[1:]])


def removed(kept: list[Row]) -> list[Row]:
    return chained([kept[0], kept[2]])


def reordered(kept: list[Row]) -> list[Row]:
    return chained([kept[1], kept[0], kept[2]])


def edited_end(kept: list[Row]) -> list[Row]:
    return [*kept[:2], kept[2]._replace(line=kept[2].line.replace(b'"three"', b'"eerht"'))]


def stripped(kept: list[Row]) -> list[Row]:
    return [*kept[:2], kept[2]._replace(signature=None)]


def exchanged(kept: list[Row]) -> list[Row]:
    return [*kept[:2], kept[2]._replace(signature=kept[1].signature)]


def no_json(kept: list[Row]) -> list[Row]:
    return [*kept[:2], kept[2]._replace(signature="[]")]


def no_hex(kept: list[Row]) -> list[Row]:
    plain = json.loads(kept[2].signature or "") | {"sig": "zz"}
    return [*kept[:2], kept[2]._replace(signature=json.dumps(plain))]


def nested(kept: list[Row]) -> list[Row]:
    return [*kept[:2], kept[2]._replace(signature="[" * 200_000)]


def added(kept: list[Row]) -> list[Row]:
    return chained([*kept, Row(4, kept[2].line.replace(b'"three"', b'"four"'))])


FORGED: dict[Callable[[list[Row]], list[Row]], str] = {
    rewritten: "by ci .* does not verify",
    removed: "by ci .* does not verify",
    reordered: "by ci .* does not verify",
    edited_end: "by ci .* does not verify",
    stripped: "has no signature",
    exchanged: "by ci .* does not verify",
    no_json: "can't be read",
    no_hex: "by ci .* does not verify",
    nested: "can't be read",
    added: "has no signature",
}


@pytest.mark.rows(5)
@pytest.mark.parametrize("anew", [True, False], ids=["at start", "while it runs"])
@pytest.mark.parametrize("forge", FORGED)
def test_a_forged_past_is_not_believed(signed: Ledger, writers: Writers, forge, anew) -> None:
    put(signed.state, forge(rows(signed.state)))
    key, trust = writers.key("ci"), writers.trusting("ci")
    ledger = Ledger(signed.state, key=key, trust=trust) if anew else signed
    for use in (ledger.entries, ledger.verify, lambda: ledger.append(entry("more"))):
        with pytest.raises(Untrusted, match=FORGED[forge]) as caught:
            use()
        assert "gate accept-ledger" in str(caught.value)
    assert len(Ledger(signed.state).entries()) == len(rows(signed.state))  # who trusts nobody


def test_a_past_that_an_unknown_key_signed_is_not_believed(
    signed: Ledger, writers: Writers
) -> None:
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
def test_trust_that_changes_counts_from_the_next_reading_on(
    signed: Ledger, writers: Writers, trust, reason: str
) -> None:
    signed.entries()
    signed.trust = writers.trusting(**trust)
    with pytest.raises(Untrusted, match=reason):
        signed.entries()


def test_a_key_that_was_rotated_stays_good_for_its_time(both: Ledger, writers: Writers) -> None:
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


def test_nobody_writes_what_he_himself_would_not_believe(signed: Ledger, writers: Writers) -> None:
    for key in (None, writers.key("stranger")):
        with pytest.raises(Untrusted, match="there is no key|not a trusted writer"):
            Ledger(signed.state, key=key, trust=signed.trust).append(entry("four"))
    assert len(signed.entries()) == 3


def test_a_key_that_can_not_sign_writes_nothing(signed: Ledger, monkeypatch) -> None:
    def away(_data: bytes) -> None:
        raise OSError("the vault is sealed")

    monkeypatch.setattr(signed.key.signer, "sign", away)
    with pytest.raises(KeyUnusable, match="the vault is sealed"):
        signed.append(entry("four"))
    assert len(signed.entries()) == 3


def test_what_a_vault_says_of_its_pin_is_told_to_nobody(
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
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_signed_ledger_goes_on_signed(both: Ledger, tmp_path: Path) -> None:
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


def test_a_key_that_its_own_trust_does_not_count_is_refused(both: Ledger, tmp_path: Path) -> None:
    writers = Writers(tmp_path)
    trust = writers.trusting("service")
    require_writable(Ledger(both.state, key=writers.key("service"), trust=trust))
    for key in (None, writers.key("ci")):
        with pytest.raises(Untrusted, match="trusted as a writer"):
            require_writable(Ledger(both.state, key=key, trust=trust))


@pytest.fixture
def kept(both: Ledger, writers: Writers) -> bytes:
    """Of two lines, as it is on the auditor's disk."""
    for reason in ("one", "two"):
        both.append(entry(reason))
    return Checkpoint.from_ledger(both).signed(writers.key("ci")).data


def test_a_ledger_that_only_grew_is_the_one_it_was(both: Ledger, kept: bytes, writers) -> None:
    signed = SignedStatement.from_bytes(kept)
    (who,) = checkpoint_signers(signed, trust=writers.trusting("ci"))
    assert who.name == "ci"
    checkpoint = Checkpoint.from_statement(signed)
    assert checkpoint.verify(both) == 0
    both.append(entry("three"))
    assert checkpoint.verify(both) == 1


@pytest.mark.parametrize(
    ("spoil", "what"),
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
def test_another_past_is_seen(both: Ledger, kept: bytes, spoil, what: str) -> None:
    both.append(entry("three"))
    put(both.state, spoil(rows(both.state)))
    with pytest.raises(PastChanged, match=what) as caught:
        Checkpoint.from_statement(SignedStatement.from_bytes(kept)).verify(both)
    assert "had 2 entries" in str(caught.value)


@pytest.mark.parametrize(
    "trust",
    [{"names": ("other",)}, {"names": ("ci",), "revoked": ("ci",)},
     {"names": ("ci",), "valid_until": "2026-01-01T00:00:00Z"}, {"names": ()}],
    ids=["other", "revoked", "before", "nobody"],
)  # fmt: skip
def test_whose_word_it_is_must_be_a_trusted_writer_s(kept: bytes, writers, trust) -> None:
    with pytest.raises(Untrusted, match="was trusted as a writer"):
        checkpoint_signers(SignedStatement.from_bytes(kept), trust=writers.trusting(**trust))


def test_an_empty_ledger_has_none(both: Ledger) -> None:
    with pytest.raises(EvidenceError, match="is empty"):
        Checkpoint.from_ledger(both)


@pytest.mark.parametrize("spoil", [b"urn:parity-gate:checkpoint:v2", b'{"at":1}'])
def test_another_statement_is_none(both: Ledger, kept: bytes, writers, spoil: bytes) -> None:
    statement = SignedStatement.from_bytes(kept).statement
    changed = (
        {"predicate_type": spoil.decode()} if b"urn" in spoil else {"predicate": {"at": 1}}
    )  # fmt: skip
    other = SignedStatement.sign(statement.model_copy(update=changed), writers.key("ci"))
    with pytest.raises(Untrusted, match="checkpoint"):
        Checkpoint.from_statement(other, what="the checkpoint")


@pytest.fixture
def store(tmp_path: Path) -> StoredHead:
    return StoredHead(tmp_path / "store" / "head.json", place="the store")


def test_all_lines_of_a_trusted_writer(signed: Ledger, writers: Writers) -> None:
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


def test_what_a_revoked_key_signed_is_refused_until_a_trusted_writer_vouches(
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
    found = audit_ledger(now)
    assert found.accepted == (1, 2, 3)
    assert found.by_key == {writers.key("new").public.key_id: 1}
    assert accept_rewrite(now, store, reason="again") == ()


def test_who_is_not_trusted_accepts_nothing(
    signed: Ledger,
    writers: Writers,
    store: StoredHead,
) -> None:
    trust = writers.trusting(("ci", "new"), revoked=("ci",))
    for key in (None, writers.key("ci"), writers.key("stranger")):
        with pytest.raises(Untrusted, match="no entry can be added"):
            accept_rewrite(Ledger(signed.state, key=key, trust=trust), store, reason="never mind")
    assert len(rows(signed.state)) == 3


def test_another_past_is_seen_too(both: Ledger, store: StoredHead) -> None:
    ledger = Ledger(both.state, stored_head=store)
    for reason in ("one", "two"):
        ledger.append(entry(reason))
    put(both.state, rows(both.state)[:1])
    with pytest.raises(PastChanged):
        audit_ledger(ledger)
