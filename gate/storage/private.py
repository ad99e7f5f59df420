"""Files that only their owner may read: they hold a secret."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from gate.errors import StorageError

MODE = 0o600
_KEY_LIMIT = 1 << 16
"""Bytes of a private key at most."""


def read_private(path: Path, *, what: str, missing: str) -> str:
    """The text of a file that nobody else may read. Raises StorageError.

    `what`: how messages call it; `missing`: what to do where it can't be read.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            status = os.fstat(stream.fileno())
            text = stream.read()
    except OSError as error:
        raise StorageError(f"cannot read the {what} {path}: {error.strerror}. {missing}") from error
    except UnicodeDecodeError as error:
        raise StorageError(f"the {what} {path} is not UTF-8 text. Write it anew.") from error
    _refuse_others(status, path, what=what)
    return text


def read_own(path: Path, *, what: str, missing: str) -> bytes:
    """As `read_private`, and only a plain file of this very user: whoever could put a link or a
    file of their own there would choose the key that signs. Raises StorageError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            data = stream.read(_KEY_LIMIT + 1) if stat.S_ISREG(status.st_mode) else b""
    except (OSError, ValueError) as error:  # a zero byte in the name
        code = getattr(error, "errno", None)
        why = "it is a link" if code == errno.ELOOP else getattr(error, "strerror", None) or error
        raise StorageError(f"cannot read the {what} {path}: {why}. {missing}") from error
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"the {what} {path} is no plain file. {missing}")
    if status.st_uid != os.geteuid():
        raise StorageError(
            f"the {what} {path} belongs to user {status.st_uid}, expected {os.geteuid()}, who runs "
            f"this. Use a key of your own. {missing}"
        )
    _refuse_others(status, path, what=what)
    if len(data) > _KEY_LIMIT:
        raise StorageError(f"the {what} {path} has more than {_KEY_LIMIT} bytes. {missing}")
    return data


def _refuse_others(status: os.stat_result, path: Path, *, what: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if mode & ~MODE:
        raise StorageError(
            f"the {what} {path} has mode {mode:04o}, others may use it. Expected 0600: "
            f"chmod 600 {path}, and exchange the {what} if somebody may have read it."
        )
