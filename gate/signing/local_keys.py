"""The workspace key, created on first use, and its trust file."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from gate.errors import KeyUnusable
from gate.signing.keys import KEY_VARIABLE, PublicKey, SigningKey
from gate.signing.trust import SECTION, Trust, TrustedKey
from gate.storage.files import make_state_folder, private_lock, write_bytes

# A signature by the folder's own key proves only that nothing was changed since this machine
# measured it.
TRUST_VARIABLE = "GATE_TRUST"
_TIMEOUT_S = 30.0

_HEAD = """\
# Whose signatures count in this folder. Its own key was put in when this file was made. Paste the
# entries of other keys here: gate keys trust prints them.
"""

Announce = Callable[[str], None]
"""Tells people what was made."""


@dataclass(frozen=True)
class LocalKeys:
    """The signing key and the trust: as specified by the user, or else those of the folder."""

    folder: Path
    """Of the gate's state, `.gate`."""
    announce: Announce

    def signing_key(self, uri: str | None = None) -> SigningKey:
        """The key of this address, else of GATE_SIGNING_KEY, else the folder's own, made on first
        use. Raises KeyUnusable, StorageError."""
        chosen = uri or os.environ.get(KEY_VARIABLE)
        return SigningKey.load(chosen) if chosen else self._local_key()

    def signing_key_if_any(self, uri: str | None = None) -> SigningKey | None:
        """Return `signing_key`, or None where the key would have to be created.

        Raises KeyUnusable, StorageError.
        """
        there = uri or os.environ.get(KEY_VARIABLE) or self.key_path.exists()
        return self.signing_key(uri) if there else None

    def trust(self, path: Path | None = None, *, key: str | None = None) -> Trust:
        """Return the trust in this file, else in GATE_TRUST, else the folder's own.

        The folder's own trusts the folder's key until the user edits it. With a key of the user's
        own (`key`, by its address) and no named trust, only that key is trusted: other parties use
        their own trust. Raises PolicyError, KeyUnusable, StorageError.
        """
        chosen = path or os.environ.get(TRUST_VARIABLE)
        if chosen:
            return Trust.from_file(Path(chosen))
        if not self.trust_path.exists():
            given = key or os.environ.get(KEY_VARIABLE)
            if given:
                own = (TrustedKey(**SigningKey.load(given).public.to_plain()),)
                alone = Trust(measurers=own, reviewers=own, writers=own)
                return alone.read_from("--key alone, without --trust")
            self._local_key()
        return Trust.from_file(self.trust_path)

    def trust_if_any(self, path: Path | None = None) -> Trust | None:
        """Return `trust`, or None where it would have to be created. Raises PolicyError."""
        made = self.is_trust_named(path) or self.trust_path.exists()
        return self.trust(path) if made else None

    def is_trust_named(self, path: Path | None = None) -> bool:
        """Return whether the user names a trust, so that the folder's own is not read."""
        return bool(path or os.environ.get(TRUST_VARIABLE))

    @property
    def key_path(self) -> Path:
        """Return the path of the folder's own key."""
        return self.folder / "keys" / "local.pem"

    @property
    def trust_path(self) -> Path:
        """Return the path of the folder's own trust file."""
        return self.folder / "trust.yaml"

    def describe_signature(self, key: PublicKey) -> str:
        """Return a text that states what a signature by the folder's own key proves."""
        return (
            f"signed by the key of this folder, {key.short}: it proves that nothing was changed "
            "since this machine measured it, and nothing to others until they trust it: "
            f"gate keys show {self.key_path}"
        )

    def is_local_key(self, key: PublicKey) -> bool:
        """Return whether it is the folder's own."""
        path = self.key_path.with_suffix(".pub")
        return path.exists() and path.read_text("utf-8") == key.public

    def _local_key(self) -> SigningKey:
        if self.key_path.exists() and self.trust_path.exists():
            return SigningKey.of_file(self.key_path)
        with ExitStack() as held:
            try:
                lock = private_lock(self.key_path.with_suffix(".lock"), timeout_s=_TIMEOUT_S)
                held.enter_context(lock)
            except Timeout as error:
                raise KeyUnusable(
                    f"{self.key_path} is being made by another process for {_TIMEOUT_S:.0f} s. "
                    "Let it finish (or end it), then repeat."
                ) from error
            make_state_folder(self.folder)
            is_new = not self.key_path.exists()
            key = (SigningKey.make if is_new else SigningKey.of_file)(self.key_path)
            # After the key: a process that finds both needs no lock.
            if not self.trust_path.exists():
                write_bytes(self.trust_path, _text(key.public))
        if is_new:
            signature = self.describe_signature(key.public)
            self.announce(f"made {self.key_path}: what is measured here is {signature}")
        return key


def _text(key: PublicKey) -> bytes:
    """A trust in this one key, as YAML that people can edit."""
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
