"""The review tally counts only valid statements of trusted reviewers."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.registry.reviews import (
    COMMENT_LIMIT,
    STATEMENT_LIMIT,
    STATEMENT_TAG,
    ReviewCounter,
    ReviewTally,
)
from gate.signing.keys import SigningKey
from gate.signing.predicates import APPROVAL_TYPE, SUMMARY_TYPE, Reviewable
from gate.signing.statement import SignedStatement, Statement, resources
from gate.signing.trust import Trust, TrustedKey
from tests import builders

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
BEFORE = NOW - timedelta(hours=1)
REVIEWABLE = Reviewable(
    registry="https://registry", model="digits", version="2",
    sha256=builders.digest("model"), decision=builders.digest("decision"),
)  # fmt: skip
NAMES = ("alice", "bob", "carol", "ci", "mallory")
Tags = dict[str, str]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SigningKey]:
    folder = tmp_path_factory.mktemp("keys")
    return {
        name: SigningKey.make(
            folder / f"{name}.pem", scheme="ecdsa" if name == "bob" else "ed25519"
        )
        for name in NAMES
    }


def make_trusted_key(key: SigningKey, **more: Any) -> TrustedKey:
    return TrustedKey(**key.public.to_plain(), **more)


def trust_in(keys: dict[str, SigningKey], **more: Any) -> Trust:
    """Return a trust where ci measures, and alice, bob, carol and ci review."""
    reviewers = tuple(make_trusted_key(keys[name]) for name in ("alice", "bob", "carol", "ci"))
    return Trust(**{"measurers": (make_trusted_key(keys["ci"]),), "reviewers": reviewers, **more})


def make_counter(
    keys: dict[str, SigningKey], trust: Trust | None = None, **more: Any
) -> ReviewCounter:
    fields: dict[str, Any] = {
        "trust": trust or trust_in(keys),
        "registries": frozenset({"https://registry", "http://same-registry:5000"}),
        "measurers": frozenset({keys["ci"].public.key_id}),
        "closed_at": None,
        "now": NOW,
    }
    return ReviewCounter(**fields | more)


def statement_tag(
    key: SigningKey, word: Any = "approved", *, at: datetime = BEFORE, under: SigningKey | None = None,
    comment: str | None = None, **overrides: Any,
) -> Tags:  # fmt: skip
    """Return a tag with a statement signed by `key`; `under`: the key whose id the tag name has."""
    signed = dataclasses.replace(REVIEWABLE, **overrides).sign(word, key, at=at, comment=comment)
    return {f"{STATEMENT_TAG}{(under or key).public.short}": signed.compact}


def tag_of_other_statement(key: SigningKey, predicate_type: str) -> Tags:
    """Return a tag with a statement of another predicate type."""
    statement = Statement(
        subject=resources({"model": REVIEWABLE.sha256}), predicate_type=predicate_type, predicate={}
    )
    return {f"{STATEMENT_TAG}{key.public.short}": SignedStatement.sign(statement, key).compact}


def tamper(tags: Tags, change: Callable[[dict[str, Any]], Any]) -> Tags:
    ((name, text),) = tags.items()
    envelope = json.loads(text)
    change(envelope)
    return {name: json.dumps(envelope)}


def edit_payload(envelope: dict[str, Any]) -> None:
    payload = base64.b64decode(envelope["payload"]).replace(b'"2"', b'"3"')
    envelope["payload"] = base64.b64encode(payload).decode()


def turn_rejection_into_approval(envelope: dict[str, Any]) -> None:
    payload = base64.b64decode(envelope["payload"]).replace(b"rejected", b"approved")
    envelope["payload"] = base64.b64encode(payload).decode()


def remove_signatures(envelope: dict[str, Any]) -> None:
    envelope["signatures"] = []


def rename_key(envelope: dict[str, Any], *, key_id: str) -> None:
    envelope["signatures"][0]["keyid"] = key_id


Case = tuple[Callable[[dict[str, SigningKey]], Tags], int, str]
CASES: dict[str, Case] = {
    "nothing": (lambda k: {}, 0, "0 of 2 signed approvals"),
    "one of two": (lambda k: statement_tag(k["alice"]), 1, "1 of 2 signed approvals (alice ("),
    "two": (lambda k: statement_tag(k["alice"]) | statement_tag(k["bob"]), 2, "2 of 2"),
    "at another address of the registry": (
        lambda k: statement_tag(k["alice"], registry="http://same-registry:5000"), 1, "1 of 2"),
    "one key under two names": (
        lambda k: statement_tag(k["alice"]) | statement_tag(k["alice"], under=k["bob"]), 1, "1 of 2"),
    "the key that measured": (
        lambda k: statement_tag(k["ci"]), 0, "this key also signed the verdict"),
    "an unknown key": (
        lambda k: statement_tag(k["mallory"]), 0, "not among the trusted reviewers (trust.reviewers): the key"),
    "an unknown key under a reviewer's name": (
        lambda k: statement_tag(k["mallory"], under=k["alice"]), 0, "signed by 0 of the keys"),
    "an unknown key that says that it is a reviewer's": (
        lambda k: tamper(statement_tag(k["mallory"], under=k["alice"]),
                          lambda e: rename_key(e, key_id=k["alice"].public.key_id)),
        0, "signed by 0 of the keys"),
    "another version": (lambda k: statement_tag(k["alice"], version="1"), 0, "about version 1, expected 2"),
    "another model": (
        lambda k: statement_tag(k["alice"], model="letters"), 0, "about model letters, expected digits"),
    "another registry": (
        lambda k: statement_tag(k["alice"], registry="https://other"), 0, "about registry https://other"),
    "another file": (
        lambda k: statement_tag(k["alice"], sha256=builders.digest("other")), 0, "about file"),
    "another decision": (
        lambda k: statement_tag(k["alice"], decision=builders.digest("other")), 0, "about decision"),
    "too old": (
        lambda k: statement_tag(k["alice"], at=NOW - timedelta(days=91)), 0, "more than 90 days ago"),
    "of the future": (
        lambda k: statement_tag(k["alice"], at=NOW + timedelta(hours=1)), 0, "dated in the future"),
    "an edited payload": (
        lambda k: tamper(statement_tag(k["alice"]), edit_payload), 0, "expected 2"),
    "a no that was made a yes": (
        lambda k: tamper(statement_tag(k["alice"], "rejected"), turn_rejection_into_approval), 0, "signed by 0 of the keys"),
    "no signature": (lambda k: tamper(statement_tag(k["alice"]), remove_signatures), 0, "not an in-toto statement"),
    "no word": (lambda k: tag_of_other_statement(k["alice"], APPROVAL_TYPE), 0, "is not valid"),
    "a statement of another type": (
        lambda k: tag_of_other_statement(k["alice"], SUMMARY_TYPE), 0, f"of type {SUMMARY_TYPE}"),
    "no envelope": (lambda k: {f"{STATEMENT_TAG}{k['alice'].public.short}": "yes"}, 0, "not an in-toto"),
    "too long": (
        lambda k: {f"{STATEMENT_TAG}{k['alice'].public.short}": "x" * 5001}, 0, "at most 5000 are allowed"),
    "a good one beside a bad one": (
        lambda k: statement_tag(k["alice"]) | statement_tag(k["bob"], version="1"), 1, "about version 1"),
}  # fmt: skip


@pytest.mark.parametrize(("tags", "number", "text"), CASES.values(), ids=list(CASES))
def test_counted_approvals(
    keys: dict[str, SigningKey], tags: Callable[..., Tags], number: int, text: str
) -> None:
    tally = make_counter(keys, trust_in(keys, reviewers_threshold=2)).count(tags(keys), REVIEWABLE)
    assert len(tally.approvals) == number
    assert tally.is_approved == (number == 2)
    assert not tally.rejections
    assert text in str(tally)


def test_measurer_may_approve_if_the_trust_allows_it(keys: dict[str, SigningKey]) -> None:
    trust = trust_in(keys, measurer_may_approve=True)
    assert make_counter(keys, trust).count(statement_tag(keys["ci"]), REVIEWABLE).is_approved


@pytest.mark.parametrize(
    ("closed_at", "counts"),
    [
        (None, True),
        (BEFORE - timedelta(seconds=1), True),
        (BEFORE, False),  # ledger entries have a resolution of one second
        (BEFORE + timedelta(minutes=1), False),
    ],
)
def test_approval_before_the_last_use_does_not_count(
    keys: dict[str, SigningKey], closed_at: datetime | None, counts: bool
) -> None:
    closed = None if closed_at is None else closed_at.isoformat(timespec="seconds")
    tally = make_counter(keys, closed_at=closed).count(statement_tag(keys["alice"]), REVIEWABLE)
    assert tally.is_approved == counts
    assert ("sign again" in str(tally)) != counts


def test_rejection_overrides_approvals(keys: dict[str, SigningKey]) -> None:
    tags = (
        statement_tag(keys["alice"])
        | statement_tag(keys["bob"])
        | statement_tag(keys["carol"], "rejected", comment="no")
    )
    tally = make_counter(keys).count(tags, REVIEWABLE)
    assert len(tally.approvals) == 2
    assert list(tally.rejections) == [keys["carol"].public.key_id]
    assert not tally.is_approved
    assert tally.comment == "no"


@pytest.mark.parametrize("by", ["ci", "alice"])
def test_measurer_may_reject_at_any_time(keys: dict[str, SigningKey], by: str) -> None:
    closed = NOW.isoformat(timespec="seconds")
    tally = make_counter(keys, closed_at=closed).count(
        statement_tag(keys[by], "rejected"), REVIEWABLE
    )
    assert list(tally.rejections) == [keys[by].public.key_id]


def test_rejection_by_an_untrusted_key_does_not_count(keys: dict[str, SigningKey]) -> None:
    tally = make_counter(keys).count(
        statement_tag(keys["mallory"], "rejected", under=keys["bob"]), REVIEWABLE
    )
    assert not tally.rejections
    assert "does not count" in str(tally)


def test_comments_are_sanitized_and_limited(keys: dict[str, SigningKey]) -> None:
    tags = statement_tag(keys["alice"], comment="looked\nat \x1b[31mit")
    assert make_counter(keys).count(tags, REVIEWABLE).comment == "looked at �[31mit"
    pair = (
        make_counter(keys)
        .count(tags | statement_tag(keys["bob"], comment="fine"), REVIEWABLE)
        .comment
    )
    assert pair is not None
    assert set(pair.split("; ")) == {"alice: looked at �[31mit", "bob: fine"}
    long = (
        make_counter(keys).count(statement_tag(keys["bob"], comment="y" * 2000), REVIEWABLE).comment
    )
    assert long is not None
    assert len(long) == COMMENT_LIMIT


def test_many_invalid_statements_do_not_hide_an_approval(
    keys: dict[str, SigningKey],
) -> None:
    tags = {f"{STATEMENT_TAG}{number:012x}": "x" for number in range(1000)} | statement_tag(
        keys["alice"]
    )
    tally = make_counter(keys).count(tags, REVIEWABLE)
    assert tally.is_approved
    assert "and 997 more" in str(tally)
    assert len(str(tally)) < 300


def test_summary_of_the_same_tags_does_not_depend_on_time(keys: dict[str, SigningKey]) -> None:
    tags = statement_tag(keys["alice"], at=NOW - timedelta(days=100)) | statement_tag(
        keys["bob"], version="7"
    )
    texts = {
        str(make_counter(keys, now=NOW + timedelta(hours=hours)).count(tags, REVIEWABLE))
        for hours in (0, 1, 30)
    }
    assert len(texts) == 1


@given(st.dictionaries(st.integers(0, 9), st.text() | st.text(alphabet='{}[]":,ab0\\ud800')))
def test_counting_accepts_any_tags(keys: dict[str, SigningKey], texts: dict[int, str]) -> None:
    shorts = [key.public.short for key in keys.values()] + ["", "é", "x" * 300, "0", "1"]
    tags = {f"{STATEMENT_TAG}{shorts[number]}": text for number, text in texts.items()}
    assert isinstance(make_counter(keys).count(tags, REVIEWABLE), ReviewTally)


SIZES = {"none": None, "plain": "x" * COMMENT_LIMIT, "wide": "値" * COMMENT_LIMIT}


@pytest.mark.parametrize("name", ["alice", "bob"])
@pytest.mark.parametrize("comment", SIZES.values(), ids=list(SIZES))
def test_statement_fits_into_a_tag(
    keys: dict[str, SigningKey], comment: str | None, name: str
) -> None:
    (text,) = statement_tag(
        keys[name], comment=comment, model="m" * 200, registry="r" * 200
    ).values()
    assert len(text) <= STATEMENT_LIMIT
    assert text.isascii()
    assert "\n" not in text


REVIEWERS = st.sampled_from(["alice", "bob", "carol", "ci"])
WEAKER = ("remove a statement", "revoke", "raise", "age", "close", "measure", "reject")


@given(
    approvers=st.sets(REVIEWERS),
    threshold=st.integers(1, 4),
    change=st.sampled_from(WEAKER),
    reviewer=REVIEWERS,
)
def test_weaker_evidence_never_turns_into_an_approval(
    keys: dict[str, SigningKey], approvers: set[str], threshold: int, change: str, reviewer: str
) -> None:
    tags: Tags = {}
    for name in approvers:
        tags |= statement_tag(keys[name])
    fields: dict[str, Any] = {"reviewers_threshold": threshold}
    more: dict[str, Any] = {}
    before = make_counter(keys, trust_in(keys, **fields)).count(tags, REVIEWABLE)
    match change:
        case "remove a statement":
            tags.pop(f"{STATEMENT_TAG}{keys[reviewer].public.short}", None)
        case "revoke":
            fields["revoked"] = (keys[reviewer].public.key_id,)
        case "raise":
            fields["reviewers_threshold"] = threshold + 1
        case "age":
            fields["max_age_days"] = 0.01
        case "close":
            more["closed_at"] = NOW.isoformat()
        case "measure":
            more["measurers"] = frozenset({keys["ci"].public.key_id, keys[reviewer].public.key_id})
        case "reject":
            tags |= statement_tag(keys[reviewer], "rejected")
    try:
        trust = trust_in(keys, **fields)
    except ValueError:  # the threshold exceeds the number of reviewers
        return
    after = make_counter(keys, trust, **more).count(tags, REVIEWABLE)
    assert before.is_approved or not after.is_approved
    assert len(approvers - {"ci"}) >= threshold or not before.is_approved
