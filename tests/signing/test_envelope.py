"""Malformed DSSE envelopes are refused, and each signature counts once."""

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


def signed_decision() -> SignedStatement:
    return signing.statements(*signing.evidence_and_decision()).decision


def verify_dsse(data: bytes, pem: str) -> Plain:
    """Verify a DSSE envelope as docs/attestation.md shows it, and return its payload.

    Raise InvalidSignature if this key (Ed25519) did not sign it.
    """
    envelope_with = json.loads(data)
    kind, payload = envelope_with["payloadType"], base64.b64decode(envelope_with["payload"])
    if kind != "application/vnd.in-toto+json":
        raise ValueError(kind)
    message = b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)
    key = load_pem_public_key(pem.encode())
    for signature in envelope_with["signatures"]:
        try:
            key.verify(base64.b64decode(signature["sig"]), message)  # type: ignore[union-attr, call-arg]
            return json.loads(payload)
        except InvalidSignature:
            continue
    raise InvalidSignature


def test_envelope_verifies_with_cryptography_alone() -> None:
    statement = signed_decision()
    assert (
        verify_dsse(statement.data, signing.key().public.public) == statement.statement.to_plain()
    )
    with pytest.raises(InvalidSignature):
        verify_dsse(statement.data, signing.key(1).public.public)
    with pytest.raises(InvalidSignature):
        verify_dsse(
            change_payload(statement, lambda p: p.update(predicateType="x")),
            signing.key().public.public,
        )


def change_payload(statement: SignedStatement, change: Callable[[Plain], Any]) -> bytes:
    """Return the envelope with a changed payload under the old signature."""
    envelope_with = json.loads(statement.data)
    payload = json.loads(base64.b64decode(envelope_with["payload"]))
    change(payload)
    envelope_with["payload"] = base64.b64encode(canonical_json(payload)).decode()
    return json.dumps(envelope_with).encode()


def test_signed_statement_round_trips() -> None:
    statement = signed_decision()
    again = SignedStatement.from_bytes(statement.data)
    assert again.statement == statement.statement
    assert again.digest == statement.digest
    assert again.key_ids == (signing.key().public.key_id,)
    assert again.signers([signing.key(1).public, signing.key().public]) == (signing.key().public,)
    assert SignedStatement.sign(again.statement, signing.key()).data == statement.data


def test_changed_payload_has_no_signers() -> None:
    data = change_payload(
        signed_decision(), lambda payload: payload["predicate"].update(resourceUri="other")
    )
    assert SignedStatement.from_bytes(data).signers([signing.key().public]) == ()


def test_changed_key_id_has_no_signers() -> None:
    envelope_with = json.loads(signed_decision().data)
    envelope_with["signatures"][0]["keyid"] = signing.key(1).public.key_id
    opened = SignedStatement.from_bytes(json.dumps(envelope_with).encode())
    assert opened.signers([signing.key().public, signing.key(1).public]) == ()


def test_each_key_counts_once() -> None:
    first, second = signing.key().public, signing.key(1).public
    pair = signing.add_signature(signed_decision(), signing.key(1))
    assert pair.signers([first, second]) == (first, second)
    assert (
        pair.signers([first, first, first.model_copy(update={"name": "again"})])[0].key_id
        == first.key_id
    )
    assert len(pair.signers([first, first, first.model_copy(update={"name": "again"})])) == 1


def envelope_with(**fields: Any) -> bytes:
    return json.dumps({**json.loads(signed_decision().data), **fields}).encode()


def payload(**fields: Any) -> bytes:
    return change_payload(signed_decision(), lambda plain: plain.update(fields))


def envelope_with_payload(data: bytes) -> bytes:
    return envelope_with(payload=base64.b64encode(data).decode())


def signed_payload() -> bytes:
    """Return the signed payload."""
    return canonical_json(signed_decision().statement.to_plain())


def change_signatures(change: Callable[[list[Plain]], Any]) -> bytes:
    plain = json.loads(signed_decision().data)
    change(plain["signatures"])
    return json.dumps(plain).encode()


SUBJECT = {"name": "model.onnx", "digest": {"sha256": "0" * 64}}
MALFORMED = {
    "empty": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "nothing in it": b"{}",
    "another payload type": envelope_with(payloadType="application/json"),
    "a payload type that is no text": envelope_with(payloadType=[PAYLOAD_TYPE]),
    "no signatures": envelope_with(signatures=[]),
    "signatures missing": json.dumps({"payload": "e30=", "payloadType": PAYLOAD_TYPE}).encode(),
    "signatures are null": envelope_with(signatures=None),
    "signatures are an object": envelope_with(signatures={"keyid": "a", "sig": "b"}),
    "a signature is text": envelope_with(signatures=["ab"]),
    "a signature without a key": envelope_with(signatures=[{"sig": "YQ=="}]),
    "a signature without itself": envelope_with(signatures=[{"keyid": "a"}]),
    "a signature that is a number": envelope_with(signatures=[{"keyid": "a", "sig": 1}]),
    "a signature that is no base64": envelope_with(signatures=[{"keyid": "a", "sig": "*"}]),
    "two of one key": change_signatures(lambda all_: all_.append(dict(all_[0]))),
    "seventeen": envelope_with(signatures=[{"keyid": str(n), "sig": "YQ=="} for n in range(17)]),
    "no payload": json.dumps({"payloadType": PAYLOAD_TYPE, "signatures": [{}]}).encode(),
    "a payload that is no base64": envelope_with(payload="***"),
    "a payload that is no JSON": envelope_with_payload(b"model"),
    "a payload that is no object": envelope_with_payload(b"[1]"),
    "a payload that is no statement": envelope_with_payload(b"{}"),
    "a deep envelope": b"[" * 100_000,
    "a deep payload": envelope_with_payload(
        signed_payload().replace(b"{", b'{"a":' + b"[" * 100 + b"]" * 100, 1)
    ),
    "a deep predicate": payload(predicate=json.loads('{"a":' * 100 + "1" + "}" * 100)),
    "a key twice": signed_decision().data.replace(b"{", b'{"payloadType": "x",', 1),
    "a key twice in the payload": envelope_with_payload(
        signed_payload().replace(b"{", b'{"predicateType":"a",', 1)
    ),
    "NaN in the predicate": envelope_with_payload(signed_payload().replace(b'"PASSED"', b"NaN")),
    "a number without an end": envelope_with_payload(
        signed_payload().replace(b'"PASSED"', b"1e999")
    ),
    "huge": signed_decision().data + b" " * ENVELOPE_LIMIT,
    "an older statement": payload(_type="https://in-toto.io/Statement/v0.1"),
    "no subject": payload(subject=[]),
    "a subject without a digest": payload(subject=[{"name": "model.onnx"}]),
    "two subjects of one name": payload(subject=[SUBJECT, SUBJECT]),
    "more than a statement": payload(more=1),
    "no predicate": payload(predicate=None),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_envelope_is_refused(data: bytes) -> None:
    with pytest.raises(
        Untrusted, match="x.json is not an in-toto statement in a signed DSSE"
    ) as caught:
        SignedStatement.from_bytes(data, label="x.json")
    assert len(str(caught.value)) < 700


def test_extra_signature_fields_are_ignored() -> None:
    data = change_signatures(lambda all_: all_[0].update(cert="-----BEGIN…"))
    assert SignedStatement.from_bytes(data).signers([signing.key().public])
