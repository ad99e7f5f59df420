"""Keys: a public one by its id, and one that signs.

Signing and verifying are securesystemslib's; here is only where keys come from.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from gate.attestation.pem import parsed, pem_of
from gate.attestation.vault import is_in_vault, reason, signer_of
from gate.errors import KeyUnusable, StorageError
from gate.storage.atomic import write_bytes, write_new
from gate.storage.files import open_plain
from gate.storage.private import MODE, read_own
from gate.storage.record import Record

if TYPE_CHECKING:
    from securesystemslib.signer import Signature, Signer, SSlibKey

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
    def of_pem(cls, pem: bytes, *, name: str) -> Self:
        """Of a public key in PEM. Raises KeyUnusable where it is none."""
        try:
            return cls(name=name, public=pem_of(parsed(pem.decode())))
        except ValueError as error:
            raise KeyUnusable(
                f"{name} is no public key: expected PEM (SubjectPublicKeyInfo) of Ed25519 or "
                "ECDSA, as gate keys new writes it beside the private one (.pub)."
            ) from error

    @property
    def verifier(self) -> SSlibKey:
        """What verifies."""
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
        """Whose and which, for people."""
        return f"{self.name} ({self.short})"


def labels(keys: Iterable[PublicKey]) -> str | None:
    """Of several, for people; None for none."""
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
        """As `load`. The key's name is the file's."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from securesystemslib.signer import CryptoSigner

        data = read_own(path, what="signing key", missing=_MISSING)
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
        """Make a key and write it to a file of mode 0600, its public part beside it (`.pub`).
        Raises KeyUnusable where the file is there already, StorageError."""
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
                f"the key {self.public.name} ({self.public.short}) can't sign now: "
                f"{reason(error)}. Repeat when its vault answers, or use another key: --key."
            ) from None


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
            return PublicKey.of_pem(head, name=path.stem)
    return SigningKey.load(place).public
