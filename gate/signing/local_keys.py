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

# Its word is worth what the folder is worth: nobody changed what was measured on this machine.


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
    """Which key signs, and whose signatures count: as somebody says, else the folder's own."""

    folder: Path
    """Of the gate's state, `.gate`."""
    announce: Announce

    def signing_key(self, uri: str | None = None) -> SigningKey:
        """The key of this address, else of GATE_SIGNING_KEY, else the folder's own, made on first
        use. Raises KeyUnusable, StorageError."""
        chosen = uri or os.environ.get(KEY_VARIABLE)
        return SigningKey.load(chosen) if chosen else self._own()

    def signing_key_if_any(self, uri: str | None = None) -> SigningKey | None:
        """As `signing_key`, and None where it would have to be made. Raises KeyUnusable,
        StorageError."""
        there = uri or os.environ.get(KEY_VARIABLE) or self.key_path.exists()
        return self.signing_key(uri) if there else None

    def trust(self, path: Path | None = None, *, key: str | None = None) -> Trust:
        """That of this file, else of GATE_TRUST, else the folder's, which trusts the folder's key
        until somebody says otherwise. Whoever signs with a key of his own (`key`, by its address)
        and names no trust has that key alone: others judge by theirs. Raises PolicyError,
        KeyUnusable, StorageError."""
        chosen = path or os.environ.get(TRUST_VARIABLE)
        if chosen:
            return Trust.from_file(Path(chosen))
        if not self.trust_path.exists():
            given = key or os.environ.get(KEY_VARIABLE)
            if given:
                own = (TrustedKey(**SigningKey.load(given).public.to_plain()),)
                alone = Trust(measurers=own, reviewers=own, writers=own)
                return alone.read_from("--key alone, without --trust")
            self._own()
        return Trust.from_file(self.trust_path)

    def trust_if_any(self, path: Path | None = None) -> Trust | None:
        """As `trust`, and None where it would have to be made. Raises PolicyError."""
        made = self.is_trust_named(path) or self.trust_path.exists()
        return self.trust(path) if made else None

    def is_trust_named(self, path: Path | None = None) -> bool:
        """Whether somebody says whose word counts, so that the folder's own is not asked."""
        return bool(path or os.environ.get(TRUST_VARIABLE))

    @property
    def key_path(self) -> Path:
        """Of the folder's own key."""
        return self.folder / "keys" / "local.pem"

    @property
    def trust_path(self) -> Path:
        """Of the folder's own trust."""
        return self.folder / "trust.yaml"

    def word_of(self, key: PublicKey) -> str:
        """What a signature of the folder's own key is worth."""
        return (
            f"signed by the key of this folder, {key.short}: it proves that nothing was changed "
            "since this machine measured it, and nothing to others until they trust it: "
            f"gate keys show {self.key_path}"
        )

    def is_own(self, key: PublicKey) -> bool:
        """Whether it is the folder's own."""
        path = self.key_path.with_suffix(".pub")
        return path.exists() and path.read_text("utf-8") == key.public

    def _own(self) -> SigningKey:
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
            # After the key: whoever finds both needs no lock.
            if not self.trust_path.exists():
                write_bytes(self.trust_path, _text(key.public))
        if is_new:
            self.announce(
                f"made {self.key_path}: what is measured here is {self.word_of(key.public)}"
            )
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
