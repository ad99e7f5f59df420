"""A verdict in the words of others: plain facts for policy engines, and the manifest that OpenSSF's
model-signing verifies.

https://github.com/sigstore/model-transparency (predicate `https://model_signing/signature/v1.0`)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gate.attestation.envelope import SignedStatement
from gate.attestation.keys import PublicKey, SigningKey
from gate.attestation.statement import Statement, resources
from gate.attestation.subjects import PREPROCESSING
from gate.attestation.summary import Summary
from gate.errors import KeyUnusable, Untrusted
from gate.storage.digest import Digest

MODEL_SIGNING_TYPE = "https://model_signing/signature/v1.0"
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_SCHEMA = 1


def facts_of(
    signed: SignedStatement, summary: Summary, *, trusted: tuple[PublicKey, ...] | None
) -> dict[str, Any]:
    """Flat facts, each by one name, for OPA and its like (docs/attestation.md). `trusted`: who was
    proven to have signed; None: nobody looked."""
    named = {each.name: each.sha256 for each in signed.statement.subject if each.name}
    return {
        "schema_version": _SCHEMA,
        "verdict": summary.verification_result,
        "levels": list(summary.verified_levels),
        "model_sha256": summary.model.hex,
        "resource_uri": summary.resource_uri,
        "policy_sha256": summary.policy.sha256,
        "evidence_sha256": [each.sha256 for each in summary.input_attestations],
        "decision_sha256": summary.decision.sha256,
        "time_verified": summary.time_verified,
        "verifier_id": summary.verifier.id,
        "verifier_version": summary.verifier.version.get("parity-gate"),
        "subjects": named,
        "statement_sha256": signed.digest.hex,
        "signature_key_ids": list(signed.key_ids),
        "signatures_verified": trusted is not None,
        "trusted_key_ids": [key.key_id for key in trusted or ()],
    }


def manifest_of(signed: SignedStatement, summary: Summary) -> Statement:
    """The statement of model-signing on the same files: one subject, whose digest is that of all
    digests, and the files in the predicate. It knows no verdict.

    Raises Untrusted for a verdict that is not PASSED: nothing in it would say so.
    """
    if summary.verification_result != "PASSED":
        raise Untrusted(
            f"the verdict is {summary.verification_result}, and model-signing's statement has no "
            "place for a verdict: it would vouch for a file that was rejected. Export a PASSED one."
        )
    files = _files(signed)
    digests = b"".join(bytes.fromhex(digest) for digest in files.values())
    name = summary.resource_uri.rpartition("/")[2] or "model"
    return Statement(
        subject=resources({name: Digest(hashlib.sha256(digests).hexdigest())}),
        predicate_type=MODEL_SIGNING_TYPE,
        predicate={
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [],
            },
            "resources": [
                {"name": name, "digest": digest, "algorithm": "sha256"}
                for name, digest in files.items()
            ],
        },
    )


def bundle_of(manifest: Statement, key: SigningKey) -> dict[str, Any]:
    """The manifest, signed, as model-signing reads it: a bundle of Sigstore's form with a key in
    the place of a certificate. Raises KeyUnusable, also for Ed25519, which it does not verify."""
    if not key.public.scheme.startswith("ecdsa"):
        raise KeyUnusable(
            f"the key {key.public.name} is of {key.public.scheme}, model-signing verifies ECDSA "
            "only. Make one: gate keys new NAME --scheme ecdsa."
        )
    envelope = json.loads(SignedStatement.sign(manifest, key).data)
    hint = hashlib.sha256(key.public.public.encode()).hexdigest()
    return {
        "mediaType": _BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": envelope,
    }


def _files(signed: SignedStatement) -> Mapping[str, str]:
    """Subjects that are files, in the order in which model-signing counts them."""
    named = {each.name: each.sha256 for each in signed.statement.subject}
    return {
        name: digest
        for name, digest in sorted((n or "", d or "") for n, d in named.items())
        if name and digest and name != PREPROCESSING
    }
