"""The secrets that MLflow servers sign with: several at once while one is exchanged for another.

A file is read again whenever it changed, so that a rotation needs no restart.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from gate.errors import ServiceError, StorageError
from gate.storage.atomic import replacing
from gate.storage.private import MODE, read_private

SECRETS_VARIABLE = "GATE_WEBHOOK_SECRETS"
"""The environment variable that is read where no file is named."""

MIN_LENGTH = 16
_log = logging.getLogger(__name__)


class Keyring:
    """Secrets, newest first, of an environment variable or a file: one in a line."""

    def __init__(self, secrets: Sequence[str], *, file: Path | None = None) -> None:
        self._secrets = tuple(secrets)
        self._file = file
        self._state = _state(file) if file else None
        self._all_secrets = set(secrets)
        self._lock = threading.Lock()

    @classmethod
    def of_file(cls, path: Path) -> Keyring:
        """Read a file that only its owner may read.

        Raises ServiceError where it is missing, open to others, empty, or a secret is too short.
        """
        return cls(_read(path), file=path)

    @classmethod
    def of_environment(cls, name: str) -> Keyring:
        """Read an environment variable. Raises ServiceError where it holds no secret."""
        if name not in os.environ:
            raise ServiceError(
                f"there is no secret: neither a secret file nor the environment variable {name}. "
                "Without one nobody's deliveries can be told from MLflow's. "
                "Let gate webhooks register --secret-file FILE make one."
            )
        return cls(_parsed(os.environ[name], where=name))

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets in force now. A file that became unusable leaves the last ones in force."""
        if self._file is not None:
            with self._lock:
                self._refresh(self._file)
        return self._secrets

    @property
    def all_secrets(self) -> frozenset[str]:
        """All secrets that were ever in force here: none of them belongs into a log."""
        return frozenset(self._all_secrets)

    def _refresh(self, file: Path) -> None:
        try:
            state = _state(file)
            if state == self._state:
                return
            self._state = state
            secrets = _read(file)
        except ServiceError as error:
            _log.error("the old secrets stay in force: %s", error)
            return
        self._all_secrets |= set(secrets)
        self._secrets = secrets
        _log.info("secrets were read again", extra={"fields": {"secrets": len(secrets)}})


def write(path: Path, secrets: Sequence[str]) -> None:
    """Write a secret file, atomically, readable by its owner only. Raises StorageError.

    A link stays one, and the owner stays the same: the service may be another user than we are.
    """
    path = Path(os.path.realpath(path))
    with replacing(path) as temporary:
        before = path.stat() if path.exists() else None
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            os.fchmod(descriptor, MODE)
            if before is not None and before.st_uid != os.fstat(descriptor).st_uid:
                os.fchown(descriptor, before.st_uid, before.st_gid)
            stream.writelines(f"{secret}\n" for secret in secrets)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _read(path: Path) -> tuple[str, ...]:
    missing = "Let gate webhooks register --secret-file FILE make it."
    try:
        text = read_private(path, what="secret file", missing=missing)
    except StorageError as error:
        raise ServiceError(str(error)) from error
    return _parsed(text, where=str(path))


def _parsed(text: str, *, where: str) -> tuple[str, ...]:
    secrets = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not secrets:
        raise ServiceError(f"{where} holds no secret. Write one in a line, the newest first.")
    for number, secret in enumerate(secrets, start=1):
        if len(secret) < MIN_LENGTH:
            raise ServiceError(
                f"secret {number} in {where} has {len(secret)} characters, at least {MIN_LENGTH} "
                "are expected. Make one with: openssl rand -hex 32"
            )
    return secrets
