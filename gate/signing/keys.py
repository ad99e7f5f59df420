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


# Only PEM (SubjectPublicKeyInfo) of Ed25519 or ECDSA is accepted, so that the key ID determines how
# signatures are verified.
_TYPES = ("ed25519", "ecdsa")
"""Key types of securesystemslib."""


@functools.lru_cache(maxsize=256)
def parsed(pem: str) -> SSlibKey:
    """Parse a public key in PEM. Raises ValueError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.signer import SSlibKey

    try:
        key = SSlibKey.from_crypto(load_pem_public_key(pem.encode()))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError("public is not a PEM Ed25519 or ECDSA key") from error
    if key.keytype not in _TYPES:
        raise ValueError(f"public is a key of type {key.keytype}, expected Ed25519 or ECDSA")
    return key


def pem_of(key: SSlibKey) -> str:
    """Return a key as PEM. securesystemslib stores Ed25519 keys raw. Raises ValueError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_public_key,
    )

    public = key.keyval["public"]
    public_key = (
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        if key.keytype == "ed25519"
        else load_pem_public_key(public.encode())
    )
    return public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


KEY_VARIABLE = "GATE_SIGNING_KEY"

Scheme = Literal["ed25519", "ecdsa"]

_FILE = "file:"
_MISSING = "Create one: gate keys new."


class PublicKey(Record):
    """A public key with the name of its owner."""

    name: str
    """The owner, for display."""
    public: str
    """PEM, SubjectPublicKeyInfo."""
    key_id: str = ""
    """Hexadecimal SHA-256 of the key, as securesystemslib computes it. Derived if omitted."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: object) -> object:
        if isinstance(data, dict) and isinstance(data.get("public"), str):
            derived = parsed(data["public"]).keyid
            if data.get("key_id") not in (None, "", derived):
                raise ValueError(f"key_id is {data['key_id']}, the ID of this key is {derived}")
            return {**data, "key_id": derived}
        return data

    @classmethod
    def from_pem(cls, pem: bytes, *, path: Path) -> Self:
        """Create the key from the PEM text of a file. Raises KeyUnusable if it is no public key."""
        try:
            return cls(name=path.stem, public=pem_of(parsed(pem.decode())))
        except ValueError as error:
            raise KeyUnusable(
                f"{path} is not a public key: expected PEM (SubjectPublicKeyInfo) of Ed25519 or "
                "ECDSA, such as the .pub file that gate keys new writes."
            ) from error

    @property
    def verifier(self) -> SSlibKey:
        """Return the key object that verifies signatures."""
        return parsed(self.public)

    @property
    def scheme(self) -> str:
        """Return the signature scheme, such as `ed25519` or `ecdsa-sha2-nistp256`."""
        return self.verifier.scheme

    @property
    def short(self) -> str:
        """Return the first twelve digits of the key ID, for display."""
        return self.key_id[:12]

    @property
    def label(self) -> str:
        """Return the name and the short ID of the key, for display."""
        return f"{self.name} ({self.short})"


def labels(keys: Iterable[PublicKey]) -> str | None:
    """Return the labels of several keys, for display; None for no key."""
    return ", ".join(key.label for key in keys) or None


class SigningKey:
    """A private key that signs. It never appears in a message or a repr."""

    def __init__(self, signer: Signer, public: PublicKey) -> None:
        self.signer = signer
        self.public = public

    def __repr__(self) -> str:
        return f"SigningKey({self.public.name}, {self.public.short})"

    @classmethod
    def load(cls, uri: str) -> Self:
        """Load a key from a file or use a key in a vault.

        uri: `file:PATH` or a path (PEM, PKCS#8, mode 0600), or securesystemslib's URI of a key in a
        vault: `awskms:…`, `gcpkms:…`, `azurekms:…`, `hsm:…`. Raises KeyUnusable, StorageError.
        """
        if is_in_vault(uri):
            signer = signer_of(uri)
            return cls(signer, public_key_of(signer, name=uri))
        return cls.from_file(Path(uri.removeprefix(_FILE)))

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Load the key from a file. Its name is the stem of the file name."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from securesystemslib.signer import CryptoSigner

        data = read_private_bytes(path, kind="signing key", missing=_MISSING)
        _refuse_tracked(path)
        try:
            signer = CryptoSigner(load_pem_private_key(data, None))
            return cls(signer, public_key_of(signer, name=path.stem))
        except (ValueError, TypeError, UnsupportedAlgorithm):
            # `from None`: the cause may quote the content of the file.
            raise KeyUnusable(
                f"{path} is not a signing key: expected an Ed25519 or ECDSA private key in PEM "
                f"(PKCS#8) without a password. {_MISSING}"
            ) from None

    @classmethod
    def make(cls, path: Path, *, scheme: Scheme = "ed25519") -> Self:
        """Create a key and write it to a file of mode 0600, and its public part to a `.pub` file.

        Raises KeyUnusable if the file exists, StorageError.
        """
        from securesystemslib.signer import CryptoSigner

        is_ecdsa = scheme == "ecdsa"
        signer = CryptoSigner.generate_ecdsa() if is_ecdsa else CryptoSigner.generate_ed25519()
        key = cls(signer, public_key_of(signer, name=path.stem))
        try:
            write_new(path, signer.private_bytes, mode=MODE)
        except FileExistsError:
            raise KeyUnusable(f"{path} already exists. Name another file, or remove it.") from None
        write_bytes(path.with_suffix(".pub"), key.public.public.encode())
        return key

    def sign(self, data: bytes) -> Signature:
        """Sign bytes. Raises KeyUnusable if the vault refuses or does not answer."""
        try:
            return self.signer.sign(data)
        except Exception as error:  # The vendors' libraries have no common base class.
            raise KeyUnusable(
                f"the key {self.public.label} can't sign now: "
                f"{reason(error)}. Retry when its vault answers, or use another key: --key."
            ) from None


_GIT_S = 10.0


def _refuse_tracked(path: Path) -> None:
    """Raise KeyUnusable if Git tracks the file: every clone would contain the private key."""
    command = ["git", "ls-files", "--error-unmatch", "--", path.name]
    try:
        result = subprocess.run(
            command, cwd=path.parent, capture_output=True, timeout=_GIT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):  # no Git here
        return
    if result.returncode == 0:
        raise KeyUnusable(
            f"{path} is a private key that Git tracks: everyone with the repository can sign with "
            f"it. Run git rm --cached {path}, add it to .gitignore, and create another key: gate "
            "keys new NAME."
        )


def public_key_of(signer: Signer, *, name: str) -> PublicKey:
    """Return the public key of a signer. Raises ValueError unless it is Ed25519 or ECDSA."""
    from securesystemslib.signer import SSlibKey

    key = signer.public_key
    if not isinstance(key, SSlibKey):
        raise ValueError(f"{type(key).__name__} is not a public key that can be written as PEM")
    return PublicKey(name=name, public=pem_of(key))


def read_public(uri: str) -> PublicKey:
    """Return the public key in a PEM file, or of a signing key that `SigningKey.load` loads.

    Raises KeyUnusable, StorageError.
    """
    path = Path(uri.removeprefix(_FILE))
    if not is_in_vault(uri):
        try:
            with open_plain(path) as stream:
                head = stream.read(1 << 16)
        except OSError as error:
            reason = error.strerror or "not a regular file"
            raise StorageError(f"cannot read {path}: {reason}. Name a key file.") from error
        if b"PRIVATE" not in head:
            return PublicKey.from_pem(head, path=path)
    return SigningKey.load(uri).public


PIN_VARIABLE = "GATE_SIGNING_PIN"
"""Environment variable with the PIN of a token (`hsm:`). The libraries of the other vaults find
their credentials themselves."""

VAULTS = {
    "awskms": "awskms:KEY-ID, awskms:ARN or awskms:alias/NAME",
    "gcpkms": "gcpkms:projects/…/cryptoKeyVersions/N",
    "azurekms": "azurekms://VAULT.vault.azure.net/keys/NAME[/VERSION]",
    "hsm": "hsm:[ID][?label=TOKEN]",
}
"""Formats of key URIs, by scheme. Each scheme is also an extra of securesystemslib."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")


def is_in_vault(uri: str) -> bool:
    """Return whether this names a key in a vault, not a file.

    Raises KeyUnusable for an unknown scheme.
    """
    match = _SCHEME.match(uri)
    if match is None or match[0] == _FILE:
        return False
    if match[0].rstrip(":") not in VAULTS:
        if os.path.lexists(uri):
            return False
        raise KeyUnusable(
            f"'{uri}' has the unknown scheme '{match[0]}'. Name a key file, or use one of file:, "
            f"{', '.join(f'{name}:' for name in VAULTS)}."
        )
    return True


def signer_of(uri: str) -> Signer:
    """Return the signer that uses the key at this URI.

    Raises KeyUnusable if the vendor's library is missing, the vault refuses access or does not have
    the key, or the key type is not supported.
    """
    from securesystemslib.exceptions import UnsupportedLibraryError
    from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, Signer

    scheme = uri.partition(":")[0]
    vault = SIGNER_FOR_URI_SCHEME[scheme]
    try:
        key_uri, public = vault.import_(*_import_arguments(scheme, uri))  # type: ignore[attr-defined]
        if scheme == "azurekms" and uri.rstrip("/") not in (key_uri, key_uri.rpartition("/")[0]):
            raise KeyUnusable(
                f"{uri} is not the newest version of the key, {key_uri}, and the vault returns the "
                "public key of that version only. Name it, or omit the version: …/keys/NAME."
            )
        # Parsed from PEM, as readers of a statement do: so a key has the same ID in every vault.
        return Signer.from_priv_key_uri(key_uri, parsed(pem_of(public)), _pin)
    except UnsupportedLibraryError:
        raise KeyUnusable(
            f"{scheme}: keys need the vendor's library. Install it: "
            f"pip install 'securesystemslib[{scheme}]'."
        ) from None
    except KeyUnusable:
        raise
    except Exception as error:  # The vendors' libraries have no common base class.
        raise KeyUnusable(
            f"{uri} is not a usable signing key: {reason(error)}. Expected {VAULTS[scheme]}, an "
            "ECDSA or Ed25519 key, and permission to read its public key and to sign with it."
        ) from None


def _import_arguments(scheme: str, uri: str) -> tuple[Any, ...]:
    """Return the arguments for securesystemslib's `import_` of this vault."""
    parts = urlsplit(uri)
    if scheme == "azurekms":
        steps = parts.path.strip("/").split("/")
        if len(steps) < 2 or steps[0] != "keys":
            raise ValueError("it contains no key name")
        return (parts.hostname or "").partition(".")[0], steps[1]
    if scheme == "hsm":
        label = dict(parse_qsl(parts.query)).get("label")
        return (int(parts.path) if parts.path else None), label, _pin
    return (uri.partition(":")[2],)


def _pin(_secret: str) -> str:
    pin = os.environ.get(PIN_VARIABLE)
    if not pin:
        raise KeyUnusable(f"the token requires a PIN. Set the variable {PIN_VARIABLE}.")
    return pin


def reason(error: Exception) -> str:
    """Return the error message of a vendor's library, without passwords in URLs.

    Only the first line, because the following lines may repeat the request.
    """
    from gate.storage.safe_text import Redaction

    pin = os.environ.get(PIN_VARIABLE)
    clean = Redaction(lambda: {pin} if pin else ()).clean
    return f"{type(error).__name__}: {clean(first_line(error))[:300]}"
