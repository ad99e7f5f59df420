"""A lock that nobody else on the machine can hold: a file of mode 0600 in a folder of its own.

Whoever may open a lock's file, if only to read, may hold it for ever; and whoever may write to its
folder may put another file in its place.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from gate.errors import StorageError


@contextlib.contextmanager
def private_lock(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold the lock in this file, whose folder is made private to this user; the operating system
    frees it if this process dies.

    Raises filelock's Timeout where another process holds it for longer, and StorageError where
    folder or file can't be made, or are somebody else's.
    """
    try:
        _make_private(path.parent)
        _refuse_foreign(path)
        lock = FileLock(path, timeout=timeout_s, mode=0o600)
        lock.acquire()
    except TimeoutError:  # filelock's is one, and this is an OSError
        raise
    except OSError as error:
        raise StorageError(
            f"cannot lock {path}: {error.strerror or error}. Free space or fix permissions: "
            f"{path.parent} belongs to the user who writes beside it, with mode 0700."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _make_private(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise StorageError(f"{folder} is a link, expected a folder of locks. Remove it.")
    _close(folder, status, mode=0o700)


def _refuse_foreign(path: Path) -> None:
    """What was in the folder before it was private, or was put there by its owner."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"{path} is no plain file, expected a lock. Remove it.")
        _close(path, status, mode=0o600)


def _close(path: Path, status: os.stat_result, *, mode: int) -> None:
    """To all others. Root may use what is another's: he could read and hold it anyway."""
    if status.st_uid != os.geteuid() and os.geteuid() != 0:
        raise StorageError(
            f"{path} belongs to the user with id {status.st_uid}, this is {os.geteuid()}: who "
            "owns a lock may hold it for ever. Run as that user, or remove it."
        )
    if stat.S_IMODE(status.st_mode) & 0o077 and status.st_uid == os.geteuid():
        path.chmod(mode)
