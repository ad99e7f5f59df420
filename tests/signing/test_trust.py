"""Trust requires enough listed keys that are within their validity period and not revoked."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.errors import PolicyError, Untrusted
from gate.signing.keys import PublicKey
from gate.signing.statement import SignedStatement, Statement, resources
from gate.signing.trust import Trust, TrustedKey, parse_time
from tests import builders
from tests.signing import signing
from tests.signing.signing import NOW, key, trusted_key

STATEMENT = Statement(
    subject=resources({"model.onnx": builders.digest("model")}),
    predicate_type="t",
    predicate={"x": 1},
)


def sign_statement(*numbers: int) -> SignedStatement:
    first, *rest = numbers or (0,)
    statement = SignedStatement.sign(STATEMENT, key(first))
    for number in rest:
        statement = signing.add_signature(statement, key(number))
    return statement


def signers(
    trust: Trust,
    statement: SignedStatement,
    *,
    signed_at: str | None = None,
    now: datetime = NOW,
    role: Any = "measurers",
) -> tuple[PublicKey, ...]:
    return trust.signers(
        statement, role=role, timestamp=signed_at or NOW.isoformat(), now=now, label="the statement"
    )


def test_listed_key_is_accepted_and_named() -> None:
    assert signers(signing.trust(key(0), key(1)), sign_statement(1)) == (trusted_key(key(1)),)


BEFORE, AFTER = (NOW - timedelta(days=1)).isoformat(), (NOW + timedelta(days=1)).isoformat()
REFUSED = {
    "no key of ours": (signing.trust(key(1)), sign_statement(0), "signed by 0 of the keys"),
    "one of two": (signing.trust(key(0), key(1), threshold=2), sign_statement(0), "by 1 .* expected 2"),
    "two, one unknown": (
        signing.trust(key(0), key(1), threshold=2), sign_statement(0, 2), "by 1 .* expected 2",
    ),
    "revoked": (
        signing.trust(key(0), key(1), revoked=(key(0).public.key_id,)), sign_statement(0),
        "key 0 .* is revoked",
    ),
    "two, one revoked": (
        signing.trust(key(0), key(1), threshold=2, revoked=(key(1).public.key_id,)),
        sign_statement(0, 1), "by 1 .* key 1 .* is revoked",
    ),
    "all revoked": (
        signing.trust(key(0), revoked=(key(0).public.key_id,)), sign_statement(0), "is revoked",
    ),
    "not yet valid": (
        Trust(measurers=(trusted_key(key(0), valid_from=AFTER),)), sign_statement(0), "is valid from",
    ),
    "no longer valid": (
        Trust(measurers=(trusted_key(key(0), valid_until=BEFORE),)), sign_statement(0), "was valid until",
    ),
    "valid until this very moment": (
        Trust(measurers=(trusted_key(key(0), valid_until=NOW.isoformat()),)), sign_statement(0), "was valid",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("trust", "statement", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_untrusted_signature_is_refused(trust: Trust, statement: SignedStatement, why: str) -> None:
    with pytest.raises(Untrusted, match=why):
        signers(trust, statement)


def test_invalid_key_id_is_not_repeated() -> None:
    plain = json.loads(sign_statement(0).data)
    plain["signatures"][0]["keyid"] = "read this"
    with pytest.raises(Untrusted, match="^(?!.*read this)"):
        signers(signing.trust(key(1)), SignedStatement.from_bytes(json.dumps(plain).encode()))


def test_key_must_be_valid_at_signing_and_at_verification() -> None:
    until = NOW + timedelta(hours=1)
    trust = Trust(measurers=(trusted_key(key(0), valid_until=until.isoformat()),))
    assert signers(trust, sign_statement(0), now=until - timedelta(seconds=1))
    with pytest.raises(Untrusted, match="was valid until"):
        signers(trust, sign_statement(0), now=until)
    since = Trust(measurers=(trusted_key(key(0), valid_from=NOW.isoformat()),))
    assert signers(since, sign_statement(0))
    early = (NOW - timedelta(seconds=1)).isoformat()
    with pytest.raises(Untrusted, match="is valid from"):
        signers(since, sign_statement(0), signed_at=early)


def test_both_keys_are_valid_during_a_rotation() -> None:
    end = (NOW + timedelta(days=7)).isoformat()
    pair = Trust(
        measurers=(trusted_key(key(0), valid_until=end), trusted_key(key(1), valid_from=BEFORE))
    )
    assert signers(pair, sign_statement(0))
    assert signers(pair, sign_statement(1))
    assert [each.name for each in pair.keys("measurers", at=NOW)] == ["key 0", "key 1"]
    assert [each.name for each in pair.keys("measurers", at=NOW + timedelta(days=8))] == ["key 1"]


@pytest.mark.parametrize(
    "made", ["", "nan", "NaT", "inf", "yesterday", "0", "1e9", "2026-13-01", "2026-02-30", "None"]
)
def test_invalid_time_is_refused(made: str) -> None:
    assert parse_time(made) is None
    with pytest.raises(Untrusted, match="which is not an ISO 8601 time"):
        signers(signing.trust(), sign_statement(), signed_at=made or " ")


@pytest.mark.parametrize(
    ("age", "reason"),
    [
        (timedelta(), None),
        (timedelta(days=90), None),
        (timedelta(days=90.01), "days old, 90 are allowed"),
        (timedelta(minutes=-5), None),
        (timedelta(minutes=-5, seconds=-1), "dated in the future"),
    ],
)
def test_age_limits_of_a_statement(age: timedelta, reason: str | None) -> None:
    if reason is None:
        assert signers(signing.trust(), sign_statement(), now=NOW + age)
        return
    with pytest.raises(Untrusted, match=reason):
        signers(signing.trust(), sign_statement(), now=NOW + age)


@pytest.mark.parametrize("made", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_extreme_times_are_refused_without_overflow(made: str) -> None:
    with pytest.raises(Untrusted):
        signers(signing.trust(), sign_statement(), signed_at=made)


def test_a_time_without_a_zone_is_utc() -> None:
    assert parse_time("2026-01-31") == datetime(2026, 1, 31, tzinfo=UTC)
    assert parse_time("2026-01-31T12:00:00Z") == parse_time("2026-01-31T14:00:00+02:00")


def test_writer_threshold_is_one() -> None:
    writers = (trusted_key(key(2)),)
    trust = signing.trust(key(0), key(1), threshold=2, writers=writers)
    assert signers(trust, sign_statement(2), role="writers") == writers


PEM = key(0).public.public


def with_keys(role: str, *keys: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"measurers": [{"name": "ci", "public": PEM}], role: list(keys), **fields}


INVALID = {
    "no measurer": {"measurers": []},
    "a key twice": with_keys("measurers", {"name": "a", "public": PEM}, {"name": "b", "public": PEM}),
    "a key twice, with other line ends": with_keys(
        "reviewers", {"name": "a", "public": PEM}, {"name": "b", "public": PEM.replace("\n", "\r\n")}
    ),
    "no key": with_keys("measurers", {"name": "a", "public": "ssh-ed25519 AAAA"}),
    "another id": with_keys("measurers", {"name": "a", "public": PEM, "key_id": "0" * 64}),
    "too few": with_keys("reviewers", {"name": "a", "public": PEM}, reviewers_threshold=2),
    "nobody is enough": {**with_keys("reviewers"), "threshold": 0},
    "no age": {**with_keys("reviewers"), "max_age_days": 0},
    "endless": {**with_keys("reviewers"), "max_age_days": float("inf")},
    "no number": {**with_keys("reviewers"), "max_age_days": float("nan")},
    "half an id revoked": {**with_keys("reviewers"), "revoked": [key(0).public.short]},
    "no time": with_keys("measurers", {"name": "a", "public": PEM, "valid_until": "soon"}),
    "ends before it begins": with_keys(
        "measurers",
        {"name": "a", "public": PEM, "valid_from": "2026-02-01", "valid_until": "2026-01-01"},
    ),
    "a word that nobody knows": {**with_keys("reviewers"), "unsigned": "accept"},
    "a field that nobody knows": {**with_keys("reviewers"), "treshold": 2},
}  # fmt: skip


@pytest.mark.parametrize("plain", INVALID.values(), ids=INVALID.keys())
def test_invalid_trust_file_is_refused(tmp_path: Path, plain: dict[str, Any]) -> None:
    from ruamel.yaml import YAML

    path = tmp_path / "trust.yaml"
    for written in (plain, {"trust": plain}):
        YAML().dump(written, path)
        with pytest.raises(PolicyError, match=r"trust\.yaml:\d+: "):
            Trust.from_file(path)


def test_yaml_timestamps_are_accepted(tmp_path: Path) -> None:
    body = PEM.replace("\n", "\n      ").rstrip()
    path = tmp_path / "trust.yaml"
    path.write_text(
        f"measurers:\n  - name: ci\n    public: |\n      {body}\n"
        "    valid_from: 2026-01-31T12:00:00+02:00\n    valid_until: 2027-01-31\n"
    )
    (result,) = Trust.from_file(path).measurers
    assert parse_time(result.valid_from) == datetime(2026, 1, 31, 10, tzinfo=UTC)
    assert parse_time(result.valid_until) == datetime(2027, 1, 31, tzinfo=UTC)
    assert result.key_id == key(0).public.key_id


NUMBERS = st.lists(st.integers(0, 3), unique=True)


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the keys, signatures, times and limits of one statement."""
    numbers = draw(NUMBERS.filter(bool))
    times = st.none() | st.integers(-100, 100)
    return {
        "listed": {n: draw(st.tuples(times, times)) for n in numbers},
        "signed": draw(NUMBERS.filter(bool)),
        "threshold": draw(st.integers(1, len(numbers))),
        "revoked": draw(NUMBERS),
        "made": draw(st.integers(-100, 10)),
        "max_age": draw(st.integers(1, 100)),
    }


def weaken(draw: st.DrawFn, situation: dict[str, Any]) -> dict[str, Any]:
    """Weaken one aspect: signatures, threshold, revocation, age limit or validity of a key."""
    weaker = {**situation, "listed": dict(situation["listed"])}
    change = draw(
        st.sampled_from(["sign", "threshold", "revoke", "max_age", "unlist", "begin", "end"])
    )
    number = draw(st.sampled_from(sorted(weaker["listed"])))
    begin, end = weaker["listed"][number]
    match change:
        case "sign":
            weaker["signed"] = weaker["signed"][:-1] or [9]
        case "threshold":
            weaker["threshold"] = min(weaker["threshold"] + 1, len(weaker["listed"]))
        case "revoke":
            weaker["revoked"] = [*weaker["revoked"], number]
        case "max_age":
            weaker["max_age"] = max(1, weaker["max_age"] // 2)
        case "unlist" if len(weaker["listed"]) > weaker["threshold"]:
            del weaker["listed"][number]
        case "begin":
            weaker["listed"][number] = (max(begin or -200, draw(st.integers(-200, 100))), end)
        case "end":
            ends = draw(st.integers(-100, 200))
            weaker["listed"][number] = (begin, ends if end is None else min(end, ends))
    return weaker


def is_trusted(situation: dict[str, Any]) -> bool:
    def at(day: int | None) -> str | None:
        return None if day is None else (NOW + timedelta(days=day)).isoformat()

    keys = []
    for number, (begin, end) in situation["listed"].items():
        try:
            keys.append(TrustedKey(**key(number).public.to_plain(),
                                   valid_from=at(begin), valid_until=at(end)))  # fmt: skip
        except ValueError:  # the key's validity ends before it begins: Trust refuses such a file
            return False
    trust = Trust(
        measurers=tuple(keys),
        threshold=situation["threshold"],
        revoked=tuple(key(number).public.key_id for number in situation["revoked"]),
        max_age_days=float(situation["max_age"]),
    )
    try:
        result = signers(
            trust, sign_statement(*situation["signed"]), signed_at=at(situation["made"])
        )
    except Untrusted:
        return False
    assert len({each.key_id for each in result}) >= situation["threshold"]
    return True


@given(st.data())
def test_weaker_situation_never_becomes_trusted(data: st.DataObject) -> None:
    situation = data.draw(situations())
    weaker = weaken(data.draw, situation)
    assert is_trusted(situation) or not is_trusted(weaker)
