"""The workspace key, created on first use, and its trust file."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gate.errors import KeyUnusable
from gate.signing.keys import KEY_VARIABLE, PublicKey, SigningKey
from gate.signing.trust import SECTION, Trust, TrustedKey
from gate.storage.files import make_state_folder, private_lock, write_bytes

TRUST_VARIABLE = "GATE_TRUST"
_TIMEOUT_S = 30.0

_HEAD = """\
# The keys that are trusted in this folder. The folder's own key was added when this file was
# created. Add the entries of other keys here: gate keys trust prints them.
"""

Announce = Callable[[str], None]
"""Shows the user a message about a new key."""


@dataclass(frozen=True)
class LocalKeys:
    """The signing key and the trust: those that the user names, or else those of the folder.

    A signature by the folder's key proves only that nothing changed after this machine measured.
    """

    folder: Path
    """The gate's state folder, `.gate`."""
    announce: Announce

    def signing_key(self, uri: str | None = None) -> SigningKey:
        """Return the key at this address, else at GATE_SIGNING_KEY, else the folder's key, which is
        created on first use. Raises KeyUnusable, StorageError."""
        chosen = uri or os.environ.get(KEY_VARIABLE)
        return SigningKey.load(chosen) if chosen else self._local_key()

    def signing_key_if_any(self, uri: str | None = None) -> SigningKey | None:
        """Return `signing_key`, or None where the key would have to be created.

        Raises KeyUnusable, StorageError.
        """
        exists = uri or os.environ.get(KEY_VARIABLE) or self.key_path.exists()
        return self.signing_key(uri) if exists else None

    def trust(self, path: Path | None = None, *, key: str | None = None) -> Trust:
        """Return the trust in this file, else in GATE_TRUST, else the folder's trust.

        Until the user edits it, the folder's trust contains only the folder's key. If there is no
        trust file yet and the user names a key (`key`: its address), only that key is trusted.
        Raises PolicyError, KeyUnusable, StorageError.
        """
        chosen = path or os.environ.get(TRUST_VARIABLE)
        if chosen:
            return Trust.from_file(Path(chosen))
        if not self.trust_path.exists():
            uri = key or os.environ.get(KEY_VARIABLE)
            if uri:
                keys = (TrustedKey(**SigningKey.load(uri).public.to_plain()),)
                trust = Trust(measurers=keys, reviewers=keys, writers=keys)
                return trust.read_from("--key alone, without --trust")
            self._local_key()
        return Trust.from_file(self.trust_path)

    def trust_if_any(self, path: Path | None = None) -> Trust | None:
        """Return `trust`, or None where it would have to be created. Raises PolicyError."""
        exists = self.is_trust_named(path) or self.trust_path.exists()
        return self.trust(path) if exists else None

    def is_trust_named(self, path: Path | None = None) -> bool:
        """Return whether the user names a trust file, which replaces the folder's trust."""
        return bool(path or os.environ.get(TRUST_VARIABLE))

    @property
    def key_path(self) -> Path:
        """Return the path of the folder's key."""
        return self.folder / "keys" / "local.pem"

    @property
    def trust_path(self) -> Path:
        """Return the path of the folder's trust file."""
        return self.folder / "trust.yaml"

    def describe_signature(self, key: PublicKey) -> str:
        """Return a text that states what a signature by the folder's key proves."""
        return (
            f"signed by the key of this folder, {key.short}. It proves that nothing was changed "
            "since this machine measured it. Other users must trust the key first: "
            f"gate keys show {self.key_path}"
        )

    def describe_signer(self, key: PublicKey) -> str:
        """Return who signed; for the folder's key also what its signature proves."""
        is_local = self.is_local_key(key)
        return self.describe_signature(key) if is_local else f"signed by {key.label}"

    def is_local_key(self, key: PublicKey) -> bool:
        """Return whether this is the folder's key."""
        path = self.key_path.with_suffix(".pub")
        return path.exists() and path.read_text("utf-8") == key.public

    def _local_key(self) -> SigningKey:
        if self.key_path.exists() and self.trust_path.exists():
            return SigningKey.from_file(self.key_path)
        busy = KeyUnusable(
            f"another process has been creating {self.key_path} for {_TIMEOUT_S:.0f} s. "
            "Wait until it is done (or end it), then retry."
        )
        with private_lock(self.key_path.with_suffix(".lock"), timeout_s=_TIMEOUT_S, busy=busy):
            make_state_folder(self.folder)
            is_new = not self.key_path.exists()
            key = (SigningKey.make if is_new else SigningKey.from_file)(self.key_path)
            # Written after the key: a process that finds both files needs no lock.
            if not self.trust_path.exists():
                write_bytes(self.trust_path, _text(key.public))
        if is_new:
            signature = self.describe_signature(key.public)
            self.announce(f"created {self.key_path}: what is measured here is {signature}")
        return key


def _text(key: PublicKey) -> bytes:
    """Return a trust file with this key, as YAML that users can edit."""
    from ruamel.yaml import YAML
    from ruamel.yaml.scalarstring import LiteralScalarString

    listed = [{"name": key.name, "public": LiteralScalarString(key.public)}]
    roles = {
        role: [dict(each) for each in listed] for role in ("measurers", "reviewers", "writers")
    }
    stream = io.BytesIO(_HEAD.encode())
    stream.seek(0, io.SEEK_END)
    YAML().dump({SECTION: roles}, stream)
    return stream.getvalue()
