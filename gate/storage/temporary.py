"""Temporary folders; those that killed processes left are removed by whoever makes the next one.

Whoever works in one holds a lock in it. A lock dies with its process, however that ends, and no
other process can be taken for it: ids of processes come again, and in containers at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gate.errors import StorageError

_PREFIX = "parity-gate-"
_LOCK = "lock"
_OURS: set[str] = set()
"""Where locks belong to processes, as on NFS, another thread of ours would get it."""


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """An empty folder that is gone afterwards. Raises StorageError where none can be made."""
    sweep()
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(_removed(prefix=_PREFIX))
            stack.enter_context(_locked(place))
            # The lock goes last: what is killed while it removes its files is found again.
            folder = stack.enter_context(_removed(dir=place))
        except OSError as error:
            raise StorageError(
                f"cannot make a temporary folder: {error.strerror or error}. Free space or fix "
                "permissions there, or name another place with TMPDIR."
            ) from error
        yield Path(folder)


def sweep() -> None:
    """Remove what killed processes of this user left. What can't be removed stays."""
    with contextlib.suppress(OSError):
        with os.scandir(tempfile.gettempdir()) as found:
            places = [Path(entry.path) for entry in found if entry.name.startswith(_PREFIX)]
        for place in places:
            with contextlib.suppress(OSError):
                _sweep(place)


def _removed(**where: str) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True, **where)


@contextlib.contextmanager
def _locked(place: str) -> Iterator[None]:
    """Hold the lock of a folder of ours; it appears when it is held already."""
    made = Path(place, f"{_LOCK}.new")
    _OURS.add(place)
    try:
        with made.open("xb") as lock:
            with contextlib.suppress(OSError):  # no locks there: it is never swept
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                made.rename(made.with_name(_LOCK))
            yield
    finally:
        _OURS.discard(place)


def _sweep(place: Path) -> None:
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or str(place) in _OURS:
        return
    descriptor = os.open(place / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for inside in place.iterdir():
            if inside.is_dir() and not inside.is_symlink():
                shutil.rmtree(inside, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
    finally:
        os.close(descriptor)
