"""The signature of a line, or of a note: securesystemslib's, over exactly its bytes."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from gate.attestation.keys import SigningKey
from gate.attestation.trust import Trust, TrustedKey, time_of
from gate.errors import EvidenceError, Untrusted
from gate.storage.foreign import strict_json


def sign(data: bytes, key: SigningKey | None) -> str | None:
    """The signature as JSON; None without a key. Raises KeyUnusable."""
    if key is None:
        return None
    return json.dumps(key.sign(data).to_dict(), sort_keys=True)


def verify(data: bytes, signature: str | None, *, trust: Trust, at: str) -> TrustedKey:
    """The trusted writer that signed these bytes, which say that they were written at that time.

    A key counts for what it signed while it was valid, whatever came later; one that was revoked
    counts for nothing. Raises Untrusted, with the reason after "this line".
    """
    from securesystemslib.exceptions import UnverifiedSignatureError
    from securesystemslib.signer import Signature

    if signature is None:
        raise Untrusted(f"has no signature of those who are trusted as writers{trust.by}")
    try:
        found = Signature.from_dict(strict_json(signature.encode(), what="it"))
        name = str(found.keyid)
    except (EvidenceError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Untrusted("has a signature that can't be read") from error
    key = next((one for one in trust.writers if one.key_id == name), None)
    if key is None:
        raise Untrusted(f"is signed by {name[:12]}, which is not trusted as a writer{trust.by}")
    who, time = f"{key.name} ({key.short})", time_of(at)
    if name in trust.revoked:
        raise Untrusted(f"is signed by {who}, which is revoked{trust.by}")
    late = "can't be judged" if time is None else key.untimely(time)
    if late is not None:
        raise Untrusted(f"is of '{at}' and signed by {who}, which {late}")
    try:
        key.verifier.verify_signature(found, data)
    except UnverifiedSignatureError as error:
        raise Untrusted(f"is not what {who} signed") from error
    return key


def check_writer(key: SigningKey | None, trust: Trust | None, *, place: str) -> None:
    """Prove that who reads this ledger will believe what this key writes now. Raises Untrusted."""
    if trust is None or not trust.writers:
        return
    good = [each.key_id for each in trust.keys("writers", at=datetime.now(UTC))]
    if key is None or key.public.key_id not in good:
        name = "no key" if key is None else f"the key {key.public.name} ({key.public.short})"
        who = name if key is None else f"{name}, which is no trusted writer now"
        raise Untrusted(
            f"nothing is written into the ledger {place}: seen {who}; expected a key that is "
            f"trusted as a writer{trust.by}, or nobody would believe the ledger any more. Name it "
            "with --key, or trust this one there: gate keys trust --as writer."
        )
