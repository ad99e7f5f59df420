"""A verdict in others' words: nothing is added, and a rejection never looks like a pass."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from google.protobuf import json_format
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement as InToto

from gate.attestation.facts import MODEL_SIGNING_TYPE, bundle_of, facts_of, manifest_of
from gate.attestation.keys import SigningKey
from gate.attestation.statements import summary_in
from gate.errors import KeyUnusable, Untrusted
from tests.attestation import signing
from tests.attestation.released import release


def test_facts_are_flat_and_say_whether_somebody_looked(tmp_path: Path) -> None:
    made = release(tmp_path)
    signed = made.statements.decision
    facts = facts_of(signed, summary_in(signed), trusted=None)
    assert facts["verdict"] == "PASSED"
    assert facts["signatures_verified"] is False
    assert facts["trusted_key_ids"] == []
    assert facts["signature_key_ids"] == [signing.key().public.key_id]
    assert facts["policy_sha256"] == made.policy.digest().hex
    assert facts["evidence_sha256"] == [made.evidence.digest().hex]
    assert facts["decision_sha256"] == made.decision.digest().hex
    assert facts["subjects"]["model.onnx"] == facts["model_sha256"]
    proven = facts_of(signed, summary_in(signed), trusted=(signing.key().public,))
    assert proven["signatures_verified"] is True
    assert proven["trusted_key_ids"] == facts["signature_key_ids"]
    assert json.loads(json.dumps(facts)) == facts


def test_the_manifest_is_model_signings(tmp_path: Path) -> None:
    """As model-signing 1.1.1 builds it: one subject, the digest of all digests in the order of the
    files, which its verifier computes again."""
    signed = release(tmp_path, data=True).statements.decision
    plain = manifest_of(signed, summary_in(signed)).to_plain()
    read = json_format.ParseDict(plain, statement_pb2.Statement())  # type: ignore[attr-defined]
    InToto.copy_from_pb(read).validate()
    assert plain["predicateType"] == MODEL_SIGNING_TYPE
    files = plain["predicate"]["resources"]
    names = [each["name"] for each in files]
    assert names == sorted(names) == ["golden/golden.json", "model.onnx", "weights.data"]
    together = hashlib.sha256(b"".join(bytes.fromhex(each["digest"]) for each in files))
    assert plain["subject"] == [{"name": "digits", "digest": {"sha256": together.hexdigest()}}]
    for each in files:
        assert each["digest"] == hashlib.sha256((tmp_path / each["name"]).read_bytes()).hexdigest()
        assert each["algorithm"] == "sha256"


def test_a_rejected_file_is_not_vouched_for(tmp_path: Path) -> None:
    signed = release(tmp_path, runtimes=()).statements.decision
    with pytest.raises(Untrusted, match="the verdict is FAILED, and model-signing's"):
        manifest_of(signed, summary_in(signed))


def test_the_bundle_verifies_as_model_signing_does_it(tmp_path: Path) -> None:
    key = SigningKey.make(tmp_path / "release.pem", scheme="ecdsa")
    signed = release(tmp_path / "made").statements.decision
    manifest = manifest_of(signed, summary_in(signed))
    bundle = bundle_of(manifest, key)
    assert bundle["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    material = bundle["verificationMaterial"]
    pem = (tmp_path / "release.pub").read_bytes()
    assert material["publicKey"]["hint"] == hashlib.sha256(pem).hexdigest()
    envelope = bundle["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])
    assert json.loads(payload) == manifest.to_plain()
    message = b"DSSEv1 28 application/vnd.in-toto+json %d %b" % (len(payload), payload)
    public = load_pem_public_key(pem)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    public.verify(base64.b64decode(envelope["signatures"][0]["sig"]), message, ec.ECDSA(SHA256()))
    with pytest.raises(KeyUnusable, match="model-signing verifies ECDSA only"):
        bundle_of(manifest, signing.key())
