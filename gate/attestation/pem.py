"""Public keys as text: one key has one text and one id, however it came.

PEM, SubjectPublicKeyInfo, of Ed25519 or ECDSA; no other kind is taken, so that a key's id says how
its signatures are checked.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from securesystemslib.signer import SSlibKey

_TYPES = ("ed25519", "ecdsa")
"""As securesystemslib calls them."""


@functools.lru_cache(maxsize=256)
def parsed(pem: str) -> SSlibKey:
    """What verifies. Raises ValueError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.signer import SSlibKey

    try:
        key = SSlibKey.from_crypto(load_pem_public_key(pem.encode()))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError("public is no PEM of an Ed25519 or ECDSA key") from error
    if key.keytype not in _TYPES:
        raise ValueError(f"public is a key of {key.keytype}, expected Ed25519 or ECDSA")
    return key


def pem_of(key: SSlibKey) -> str:
    """The text of a key, which securesystemslib keeps raw for Ed25519. Raises ValueError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_public_key,
    )

    public = key.keyval["public"]
    whole = (
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        if key.keytype == "ed25519"
        else load_pem_public_key(public.encode())
    )
    return whole.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
