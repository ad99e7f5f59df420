"""Files and folders that are on the disk when we say so."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from gate.errors import StorageError
from gate.storage.atomic import sync


def settle(folder: Path) -> None:
    """Make all files below read-only and everything durable, the folder itself last."""
    for inside in sorted(folder.rglob("*"), reverse=True):
        if inside.is_symlink():
            continue
        inside.chmod(0o755 if inside.is_dir() else 0o444)
        sync(inside)
    folder.chmod(0o755)
    sync(folder)


def make_folder(path: Path) -> None:
    """Make a folder with its parents; their entries are durable afterwards."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def discard(path: Path, *, into: Path) -> None:
    """Remove a folder so that nobody ever sees a part of it: first it gets another place."""
    grave = into / f"discarded-{uuid.uuid4().hex}"
    path.rename(grave)
    shutil.rmtree(grave, ignore_errors=True)


def point(link: Path, target: str) -> None:
    """Let `link` point at `target` from one moment to the next. It is there at every moment."""
    fresh = link.with_name(f".{link.name}.next")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
    sync(link.parent)


@contextlib.contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the store {root} can't be used: {error}. What served before serves still. "
            "Free space or fix permissions, then repeat."
        ) from error
