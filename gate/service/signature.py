"""Whether a delivery comes from an MLflow server that knows one of our secrets, and comes now.

MLflow's scheme: `X-MLflow-Signature: v1,<base64>` is the HMAC-SHA256, keyed with the UTF-8 secret,
of `<delivery id>.<timestamp>.<raw body>`. One signature, never several.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

SIGNATURE_HEADER = "X-MLflow-Signature"
TIMESTAMP_HEADER = "X-MLflow-Timestamp"
DELIVERY_HEADER = "X-MLflow-Delivery-Id"

# No dot: id, timestamp and body could otherwise be parted elsewhere under the same signature.
_DELIVERY_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_TIMESTAMP = re.compile(r"[0-9]{1,12}")
_SIGNATURE = re.compile(r"v1,[A-Za-z0-9+/]{43}=")


@dataclass(frozen=True)
class SignatureRefusal:
    """Why a delivery is not believed. `reason` is for the log; the sender gets `status` only."""

    outcome: Literal["unsigned", "stale", "forged"]
    reason: str
    status: int = 401


@dataclass(frozen=True)
class Envelope:
    """What a delivery's headers claim: well formed and of our time, but not proven."""

    delivery_id: str
    timestamp: str
    signature: str


def open_envelope(
    header: Callable[[str], Sequence[str]], *, now: float, window_s: float
) -> Envelope | SignatureRefusal:
    """Read the headers before the body is read, so that a stranger's body need not be.

    `header`: all values of a header. `now`: seconds since the epoch.
    """
    found: list[str] = []
    for name, form in (
        (DELIVERY_HEADER, _DELIVERY_ID),
        (TIMESTAMP_HEADER, _TIMESTAMP),
        (SIGNATURE_HEADER, _SIGNATURE),
    ):
        values = header(name)
        if len(values) != 1:
            return SignatureRefusal(
                "unsigned", f"{name} is there {len(values)} times, expected once"
            )
        if not form.fullmatch(values[0]):
            return SignatureRefusal("unsigned", f"{name} is not of MLflow's form")
        found.append(values[0])
    envelope = Envelope(*found)
    off = now - int(envelope.timestamp)
    if not abs(off) <= window_s:
        return SignatureRefusal(
            "stale", f"the timestamp is {off:.0f} s old, allowed are ±{window_s:.0f} s"
        )
    return envelope


def refuse(envelope: Envelope, body: bytes, *, secrets: Iterable[str]) -> SignatureRefusal | None:
    """None if one of the secrets signed exactly this body under this envelope.

    Takes the same time whichever secret fits, or none.
    """
    given, fits, tried = envelope.signature.encode(), False, 0
    for secret in secrets:
        expected = sign(
            secret, delivery_id=envelope.delivery_id, timestamp=envelope.timestamp, body=body
        )
        fits |= hmac.compare_digest(expected.encode(), given)
        tried += 1
    return (
        None if fits else SignatureRefusal("forged", f"the signature fits none of {tried} secrets")
    )


def sign(secret: str, *, delivery_id: str, timestamp: str, body: bytes) -> str:
    """The signature header that MLflow sends."""
    signed = f"{delivery_id}.{timestamp}.".encode() + body
    digest = hmac.new(secret.encode(), signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"
