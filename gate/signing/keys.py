"""Public and private keys, including keys in a vault."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import model_validator

from gate.errors import KeyUnusable, StorageError, first_line
from gate.storage.files import MODE, open_plain, read_private_bytes, write_bytes, write_new
from gate.storage.record import Record

if TYPE_CHECKING:
    from securesystemslib.signer import Signature, Signer, SSlibKey


# PEM, SubjectPublicKeyInfo, of Ed25519 or ECDSA; no other kind is taken, so that a key's id says
# how its signatures are checked.
_TYPES = ("ed25519", "ecdsa")
"""As securesystemslib calls them."""


@functools.lru_cache(maxsize=256)
def parsed(pem: str) -> SSlibKey:
    """Parse a public key in PEM. Raises ValueError."""
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


KEY_VARIABLE = "GATE_SIGNING_KEY"

Scheme = Literal["ed25519", "ecdsa"]

_FILE = "file:"
_MISSING = "Make one: gate keys new."


class PublicKey(Record):
    """A public key, and whose it is."""

    name: str
    """Whose, for people."""
    public: str
    """PEM, SubjectPublicKeyInfo."""
    key_id: str = ""
    """SHA-256 of the key, in hexadecimal, as securesystemslib counts it; derived where it is not
    given."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, given: object) -> object:
        if isinstance(given, dict) and isinstance(given.get("public"), str):
            derived = parsed(given["public"]).keyid
            if given.get("key_id") not in (None, "", derived):
                raise ValueError(f"key_id is {given['key_id']}, the key's own is {derived}")
            return {**given, "key_id": derived}
        return given

    @classmethod
    def from_pem(cls, pem: bytes, *, name: str) -> Self:
        """Create the key from a public key in PEM. Raises KeyUnusable where it is not one."""
        try:
            return cls(name=name, public=pem_of(parsed(pem.decode())))
        except ValueError as error:
            raise KeyUnusable(
                f"{name} is no public key: expected PEM (SubjectPublicKeyInfo) of Ed25519 or "
                "ECDSA, as gate keys new writes it beside the private one (.pub)."
            ) from error

    @property
    def verifier(self) -> SSlibKey:
        """Return the key object that verifies signatures."""
        return parsed(self.public)

    @property
    def scheme(self) -> str:
        """How it signs: `ed25519`, `ecdsa-sha2-nistp256`, …"""
        return self.verifier.scheme

    @property
    def short(self) -> str:
        """The first twelve digits of the id, for people."""
        return self.key_id[:12]

    @property
    def label(self) -> str:
        """Return the name and the short ID of the key, for display."""
        return f"{self.name} ({self.short})"


def labels(keys: Iterable[PublicKey]) -> str | None:
    """Return the labels of several keys, for display; None for no key."""
    return ", ".join(key.label for key in keys) or None


class SigningKey:
    """A key that signs; its private part is never shown, and never in a message."""

    def __init__(self, signer: Signer, public: PublicKey) -> None:
        self.signer = signer
        self.public = public

    def __repr__(self) -> str:
        return f"SigningKey({self.public.name}, {self.public.short})"

    @classmethod
    def load(cls, uri: str) -> Self:
        """A file (`file:PATH` or its path): PEM, PKCS#8, mode 0600; or a key that never leaves its
        vault: `awskms:…`, `gcpkms:…`, `azurekms:…`, `hsm:…`, as securesystemslib has them.

        Raises KeyUnusable, StorageError.
        """
        if is_in_vault(uri):
            signer = signer_of(uri)
            return cls(signer, public_key_of(signer, name=uri))
        return cls.of_file(Path(uri.removeprefix(_FILE)))

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Load the key as `load` does; its name is the stem of the file name."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from securesystemslib.signer import CryptoSigner

        data = read_private_bytes(path, what="signing key", missing=_MISSING)
        _refuse_tracked(path)
        try:
            signer = CryptoSigner(load_pem_private_key(data, None))
            return cls(signer, public_key_of(signer, name=path.stem))
        except (ValueError, TypeError, UnsupportedAlgorithm):
            # Without the cause: it may quote what it read.
            raise KeyUnusable(
                f"{path} is no signing key: expected a private key in PEM (PKCS#8) without a "
                f"password, of Ed25519 or ECDSA. {_MISSING}"
            ) from None

    @classmethod
    def make(cls, path: Path, *, scheme: Scheme = "ed25519") -> Self:
        """Create a key and write it to a file of mode 0600, with its public part next to it
        (`.pub`).

        Raises KeyUnusable where the file exists, StorageError.
        """
        from securesystemslib.signer import CryptoSigner

        generate = CryptoSigner.generate_ed25519 if scheme == "ed25519" else (
            CryptoSigner.generate_ecdsa
        )  # fmt: skip
        signer = generate()
        key = cls(signer, public_key_of(signer, name=path.stem))
        try:
            write_new(path, signer.private_bytes, mode=MODE)
        except FileExistsError:
            raise KeyUnusable(
                f"{path} is there already. Name another file, or remove it."
            ) from None
        write_bytes(path.with_suffix(".pub"), key.public.public.encode())
        return key

    def sign(self, data: bytes) -> Signature:
        """Sign bytes. Raises KeyUnusable where it can't now: a vault refuses, or is away."""
        try:
            return self.signer.sign(data)
        except Exception as error:  # whatever the vendor's library raises
            raise KeyUnusable(
                f"the key {self.public.label} can't sign now: "
                f"{reason(error)}. Repeat when its vault answers, or use another key: --key."
            ) from None


_GIT_S = 10.0


def _refuse_tracked(path: Path) -> None:
    """Raise KeyUnusable if Git tracks the file: everyone with the repository would have the key."""
    command = ["git", "ls-files", "--error-unmatch", "--", path.name]
    try:
        done = subprocess.run(
            command, cwd=path.parent, capture_output=True, timeout=_GIT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):  # no Git here
        return
    if done.returncode == 0:
        raise KeyUnusable(
            f"{path} is a private key that Git tracks: everyone with the repository can sign with "
            f"it. Run git rm --cached {path}, add it to .gitignore, and make another key: gate "
            "keys new NAME."
        )


def public_key_of(signer: Signer, *, name: str) -> PublicKey:
    """The public part of a key that signs. Raises ValueError for what is neither Ed25519 nor
    ECDSA."""
    from securesystemslib.signer import SSlibKey

    key = signer.public_key
    if not isinstance(key, SSlibKey):
        raise ValueError(f"{type(key).__name__} is no public key that can be written as PEM")
    return PublicKey(name=name, public=pem_of(key))


def read_public(place: str) -> PublicKey:
    """The public key in a file of PEM, else that of a key that signs, as `SigningKey.load` takes
    it. Raises KeyUnusable, StorageError."""
    path = Path(place.removeprefix(_FILE))
    if not is_in_vault(place):
        try:
            with open_plain(path) as stream:
                head = stream.read(1 << 16)
        except OSError as error:
            why = error.strerror or "no plain file"
            raise StorageError(f"cannot read {path}: {why}. Name a key's file.") from error
        if b"PRIVATE" not in head:
            return PublicKey.from_pem(head, name=path.stem)
    return SigningKey.load(place).public


# The vault returns the public key, and signs. It controls access by its own credentials, which the
# vendor's library finds.
PIN_VARIABLE = "GATE_SIGNING_PIN"
"""The PIN of a token (`hsm:`)."""

VAULTS = {
    "awskms": "awskms:KEY-ID, awskms:ARN or awskms:alias/NAME",
    "gcpkms": "gcpkms:projects/…/cryptoKeyVersions/N",
    "azurekms": "azurekms://VAULT.vault.azure.net/keys/NAME[/VERSION]",
    "hsm": "hsm:[ID][?label=TOKEN]",
}
"""Formats of key addresses, by scheme. Each scheme is also an extra of securesystemslib."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")


def is_in_vault(uri: str) -> bool:
    """Return whether this names a key in a vault, not a file.

    Raises KeyUnusable for other addresses.
    """
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
    """Return the signer that uses the key at this address.

    Raises KeyUnusable: the vendor's library is missing, the vault refuses, it has no such key, or
    the key is of another kind.
    """
    from securesystemslib.exceptions import UnsupportedLibraryError
    from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, Signer

    scheme = uri.partition(":")[0]
    vault = SIGNER_FOR_URI_SCHEME[scheme]
    try:
        found, public = vault.import_(*_arguments(scheme, uri))  # type: ignore[attr-defined]
        if scheme == "azurekms" and uri.rstrip("/") not in (found, found.rpartition("/")[0]):
            raise KeyUnusable(
                f"{uri} names another version than the newest, {found}, and the vault gives only "
                "that one's public key. Name that, or none: …/keys/NAME."
            )
        # Parsed again from PEM, as all readers do: so one key has one ID in every vault.
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
    """Return the arguments for securesystemslib's `import_` of this vault."""
    parts = urlsplit(uri)
    if scheme == "azurekms":
        steps = parts.path.strip("/").split("/")
        if len(steps) < 2 or steps[0] != "keys":
            raise ValueError("no name of a key in it")
        return (parts.hostname or "").partition(".")[0], steps[1]
    if scheme == "hsm":
        label = dict(parse_qsl(parts.query)).get("label")
        return (int(parts.path) if parts.path else None), label, _pin
    return (uri.partition(":")[2],)


def _pin(_what: str) -> str:
    pin = os.environ.get(PIN_VARIABLE)
    if not pin:
        raise KeyUnusable(f"the token asks for its PIN. Put it into {PIN_VARIABLE}.")
    return pin


def reason(error: Exception) -> str:
    """Return the error message of a vendor's library, without passwords in addresses.

    Only its first line is used, because the following lines may repeat what was sent.
    """
    from gate.storage.safe_text import Redaction

    pin = os.environ.get(PIN_VARIABLE)
    clean = Redaction(lambda: {pin} if pin else ()).clean
    return f"{type(error).__name__}: {clean(first_line(error))[:300]}"
