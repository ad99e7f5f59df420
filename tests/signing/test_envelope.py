"""DSSE envelopes: malformed ones are refused and each signature counts once."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from gate.errors import Untrusted
from gate.signing.statement import ENVELOPE_LIMIT, PAYLOAD_TYPE, SignedStatement
from gate.storage.digest import canonical_json
from tests.signing import signing

Plain = dict[str, Any]


def signed() -> SignedStatement:
    return signing.statements(*signing.judged()).decision


def verify_dsse(data: bytes, pem: str) -> Plain:
    """DSSE by cryptography alone, as docs/attestation.md shows it: the payload of the envelope, if
    this key (Ed25519) signed it."""
    envelope = json.loads(data)
    kind, payload = envelope["payloadType"], base64.b64decode(envelope["payload"])
    if kind != "application/vnd.in-toto+json":
        raise ValueError(kind)
    message = b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)
    key = load_pem_public_key(pem.encode())
    for signature in envelope["signatures"]:
        try:
            key.verify(base64.b64decode(signature["sig"]), message)  # type: ignore[union-attr, call-arg]
            return json.loads(payload)
        except InvalidSignature:
            continue
    raise InvalidSignature


def test_envelope_verifies_with_cryptography_alone() -> None:
    statement = signed()
    assert (
        verify_dsse(statement.data, signing.key().public.public) == statement.statement.to_plain()
    )
    with pytest.raises(InvalidSignature):
        verify_dsse(statement.data, signing.key(1).public.public)
    with pytest.raises(InvalidSignature):
        verify_dsse(
            changed(statement, lambda p: p.update(predicateType="x")), signing.key().public.public
        )


def changed(statement: SignedStatement, change: Callable[[Plain], Any]) -> bytes:
    """The envelope with another payload under the old signature."""
    envelope = json.loads(statement.data)
    payload = json.loads(base64.b64decode(envelope["payload"]))
    change(payload)
    envelope["payload"] = base64.b64encode(canonical_json(payload)).decode()
    return json.dumps(envelope).encode()


def test_signed_statement_round_trips() -> None:
    statement = signed()
    again = SignedStatement.from_bytes(statement.data)
    assert again.statement == statement.statement
    assert again.digest == statement.digest
    assert again.key_ids == (signing.key().public.key_id,)
    assert again.signers([signing.key(1).public, signing.key().public]) == (signing.key().public,)
    assert SignedStatement.sign(again.statement, signing.key()).data == statement.data


def test_changed_payload_has_no_signers() -> None:
    data = changed(signed(), lambda payload: payload["predicate"].update(resourceUri="other"))
    assert SignedStatement.from_bytes(data).signers([signing.key().public]) == ()


def test_changed_key_id_has_no_signers() -> None:
    envelope = json.loads(signed().data)
    envelope["signatures"][0]["keyid"] = signing.key(1).public.key_id
    opened = SignedStatement.from_bytes(json.dumps(envelope).encode())
    assert opened.signers([signing.key().public, signing.key(1).public]) == ()


def test_each_key_counts_once() -> None:
    first, two = signing.key().public, signing.key(1).public
    pair = signing.signed_twice(signed(), signing.key(1))
    assert pair.signers([first, two]) == (first, two)
    assert (
        pair.signers([first, first, first.model_copy(update={"name": "again"})])[0].key_id
        == first.key_id
    )
    assert len(pair.signers([first, first, first.model_copy(update={"name": "again"})])) == 1


def envelope(**fields: Any) -> bytes:
    return json.dumps({**json.loads(signed().data), **fields}).encode()


def payload(**fields: Any) -> bytes:
    return changed(signed(), lambda plain: plain.update(fields))


def payload_of(data: bytes) -> bytes:
    return envelope(payload=base64.b64encode(data).decode())


def whole() -> bytes:
    """The payload as it was signed."""
    return canonical_json(signed().statement.to_plain())


def of_signatures(change: Callable[[list[Plain]], Any]) -> bytes:
    plain = json.loads(signed().data)
    change(plain["signatures"])
    return json.dumps(plain).encode()


SUBJECT = {"name": "model.onnx", "digest": {"sha256": "0" * 64}}
MALFORMED = {
    "empty": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "nothing in it": b"{}",
    "another payload type": envelope(payloadType="application/json"),
    "a payload type that is no text": envelope(payloadType=[PAYLOAD_TYPE]),
    "no signatures": envelope(signatures=[]),
    "signatures missing": json.dumps({"payload": "e30=", "payloadType": PAYLOAD_TYPE}).encode(),
    "signatures are null": envelope(signatures=None),
    "signatures are an object": envelope(signatures={"keyid": "a", "sig": "b"}),
    "a signature is text": envelope(signatures=["ab"]),
    "a signature without a key": envelope(signatures=[{"sig": "YQ=="}]),
    "a signature without itself": envelope(signatures=[{"keyid": "a"}]),
    "a signature that is a number": envelope(signatures=[{"keyid": "a", "sig": 1}]),
    "a signature that is no base64": envelope(signatures=[{"keyid": "a", "sig": "*"}]),
    "two of one key": of_signatures(lambda all_: all_.append(dict(all_[0]))),
    "seventeen": envelope(signatures=[{"keyid": str(n), "sig": "YQ=="} for n in range(17)]),
    "no payload": json.dumps({"payloadType": PAYLOAD_TYPE, "signatures": [{}]}).encode(),
    "a payload that is no base64": envelope(payload="***"),
    "a payload that is no JSON": payload_of(b"model"),
    "a payload that is no object": payload_of(b"[1]"),
    "a payload that is no statement": payload_of(b"{}"),
    "a deep envelope": b"[" * 100_000,
    "a deep payload": payload_of(whole().replace(b"{", b'{"a":' + b"[" * 100 + b"]" * 100, 1)),
    "a deep predicate": payload(predicate=json.loads('{"a":' * 100 + "1" + "}" * 100)),
    "a key twice": signed().data.replace(b"{", b'{"payloadType": "x",', 1),
    "a key twice in the payload": payload_of(whole().replace(b"{", b'{"predicateType":"a",', 1)),
    "NaN in the predicate": payload_of(whole().replace(b'"PASSED"', b"NaN")),
    "a number without an end": payload_of(whole().replace(b'"PASSED"', b"1e999")),
    "huge": signed().data + b" " * ENVELOPE_LIMIT,
    "an older statement": payload(_type="https://in-toto.io/Statement/v0.1"),
    "no subject": payload(subject=[]),
    "a subject without a digest": payload(subject=[{"name": "model.onnx"}]),
    "two subjects of one name": payload(subject=[SUBJECT, SUBJECT]),
    "more than a statement": payload(more=1),
    "no predicate": payload(predicate=None),
}


def test_unsigned_decision_gets_a_hint_to_its_statement_file() -> None:
    with pytest.raises(Untrusted, match="it has no payloadType; statement files end in"):
        SignedStatement.from_bytes(b"{}")


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_envelope_is_refused(data: bytes) -> None:
    with pytest.raises(
        Untrusted, match="x.json is not an in-toto statement in a signed DSSE"
    ) as why:
        SignedStatement.from_bytes(data, label="x.json")
    assert len(str(why.value)) < 700


def test_extra_signature_fields_are_ignored() -> None:
    data = of_signatures(lambda all_: all_[0].update(cert="-----BEGIN…"))
    assert SignedStatement.from_bytes(data).signers([signing.key().public])
