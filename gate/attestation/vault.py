"""Keys that never leave their vault: a cloud's, or a token's. securesystemslib asks for them.

The vault gives the public part, and signs; who may ask is the vault's to say (its own
credentials, from where its vendor's library takes them).
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from gate.attestation.pem import parsed, pem_of
from gate.errors import KeyUnusable, first_line

if TYPE_CHECKING:
    from securesystemslib.signer import Signer

PIN_VARIABLE = "GATE_SIGNING_PIN"
"""The PIN of a token (`hsm:`)."""
VAULTS = {
    "awskms": "awskms:KEY-ID, awskms:ARN or awskms:alias/NAME",
    "gcpkms": "gcpkms:projects/…/cryptoKeyVersions/N",
    "azurekms": "azurekms://VAULT.vault.azure.net/keys/NAME[/VERSION]",
    "hsm": "hsm:[ID][?label=TOKEN]",
}
"""By scheme: how the address of a key looks. Each is an extra of securesystemslib, too."""
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")
_FILE = "file:"


def is_in_vault(uri: str) -> bool:
    """Whether this names a key in a vault, not a file. Raises KeyUnusable for other addresses."""
    found = _SCHEME.match(uri)
    if found is None or found[0] == _FILE:
        return False
    if found[0].rstrip(":") not in VAULTS:
        if os.path.lexists(uri):
            return False
        raise KeyUnusable(
            f"'{uri}' names no key: '{found[0]}' is none of file:, "
            f"{', '.join(f'{name}:' for name in VAULTS)}. Name a file, or one of those."
        )
    return True


def signer_of(uri: str) -> Signer:
    """What signs by the key at this address. Raises KeyUnusable: the vendor's library is missing,
    the vault refuses, or has no such key, or another kind of key."""
    from securesystemslib.exceptions import UnsupportedLibraryError
    from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, Signer

    scheme = uri.partition(":")[0]
    vault = SIGNER_FOR_URI_SCHEME[scheme]
    try:
        found, public = vault.import_(*_arguments(scheme, uri))  # type: ignore[attr-defined]
        if scheme == "azurekms" and not _is_of(found, uri):
            raise KeyUnusable(
                f"{uri} names another version than the newest, {found}, and the vault gives only "
                "that one's public key. Name that, or none: …/keys/NAME."
            )
        # As everybody reads it from PEM: one key has one id, however its vault writes it.
        return Signer.from_priv_key_uri(found, parsed(pem_of(public)), _pin)
    except UnsupportedLibraryError:
        raise KeyUnusable(
            f"{scheme}: needs its vendor's library. Install it: "
            f"pip install 'securesystemslib[{scheme}]'."
        ) from None
    except KeyUnusable:
        raise
    except Exception as error:  # whatever the vendor's library raises
        raise KeyUnusable(
            f"{uri} gives no key that signs: {reason(error)}. Expected {VAULTS[scheme]}, a key of "
            "ECDSA or Ed25519, and the right to read its public part and to sign with it."
        ) from None


def _arguments(scheme: str, uri: str) -> tuple[Any, ...]:
    """What securesystemslib's `import_` of this vault takes."""
    parts = urlsplit(uri)
    if scheme == "azurekms":
        vault, (keys, name, *_) = (parts.hostname or "").partition(".")[0], _steps(parts.path)
        if keys != "keys":
            raise ValueError("no name of a key in it")
        return vault, name
    if scheme == "hsm":
        label = dict(parse_qsl(parts.query)).get("label")
        return (int(parts.path) if parts.path else None), label, _pin
    return (uri.partition(":")[2],)


def _steps(path: str) -> list[str]:
    steps = path.strip("/").split("/")
    if len(steps) < 2:
        raise ValueError("no name of a key in it")
    return steps


def _is_of(found: str, uri: str) -> bool:
    """Whether the address that the vault gives is the one that was asked for, or its newest."""
    return found == uri.rstrip("/") or found.rpartition("/")[0] == uri.rstrip("/")


def _pin(_what: str) -> str:
    pin = os.environ.get(PIN_VARIABLE)
    if not pin:
        raise KeyUnusable(f"the token asks for its PIN. Put it into {PIN_VARIABLE}.")
    return pin


def reason(error: Exception) -> str:
    """What a vendor's library says, without passwords in addresses. Its first line only, because
    what follows may repeat what was sent."""
    from gate.storage.redaction import Redaction

    pin = os.environ.get(PIN_VARIABLE)
    clean = Redaction(lambda: {pin} if pin else ()).clean
    return f"{type(error).__name__}: {clean(first_line(error))[:300]}"
