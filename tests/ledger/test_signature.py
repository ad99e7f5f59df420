"""With a trusted writer's key nobody rewrites the past unseen, whatever he may do to the rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gate.errors import KeyUnusable, Untrusted
from gate.ledger.entry import LedgerEntry, Row
from gate.ledger.ledger import Ledger, sign
from gate.storage.digest import Digest, canonical_json
from tests.ledger.keys import Writers
from tests.ledger.rows import put, rows


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
        plain["parent"] = str(Digest.of_bytes(made[-1].line)) if made else None
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
    rewritten: "is not what ci",
    removed: "is not what ci",
    reordered: "is not what ci",
    edited_end: "is not what ci",
    stripped: "has no signature",
    exchanged: "is not what ci",
    no_json: "can't be read",
    no_hex: "is not what ci",
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
    with pytest.raises(Untrusted, match="no trusted writer now"):
        old.append(entry("three"))
    assert len(new.entries()) == 2


def test_nobody_writes_what_he_himself_would_not_believe(signed: Ledger, writers: Writers) -> None:
    for key in (None, writers.key("stranger")):
        with pytest.raises(Untrusted, match="seen (no key|the key)"):
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
