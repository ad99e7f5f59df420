"""Files appear whole or not at all: temporary file in the same folder, fsync, atomic replace.

What takes several files to make is made in a scratch folder beside the place that it will take.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from gate.errors import StorageError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes the place of `path`.

    A failure or a crash leaves the old file as it was. Left-overs of crashed writers of the same
    file are removed first. Raises StorageError where the disk is full or not writable, and where
    `path` is a folder.
    """
    if not path.name or (path.is_dir() and not path.is_symlink()):
        raise StorageError(
            f"cannot write {path}: it is a folder. Name a file in it: {path / 'model.onnx'}."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f".{path.name}.*.tmp"):
            if not writer_lives(stale):
                stale.unlink(missing_ok=True)
    except OSError as error:
        raise _storage_error(path, error) from error
    # Threads of one process may write one path at once: each has a name of its own.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise _storage_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def scratch(output: Path) -> Iterator[Path]:
    """Yield an empty folder beside `output`, so that a file in it can be moved there atomically.

    It is removed at the end, and so are those that killed processes left. Raises OSError.
    """
    for stale in output.parent.glob(f".{output.name}.*.scratch"):
        if not writer_lives(stale):
            shutil.rmtree(stale, ignore_errors=True)
    room = output.with_name(f".{output.name}.{os.getpid()}.scratch")
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


def write_bytes(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write `data` to `path` atomically. Raises StorageError.

    `mode`: the file's from its first byte on, less what the umask takes away.
    """
    with replacing(path) as temporary:
        temporary.touch(mode=mode, exist_ok=False)
        temporary.write_bytes(data)


def write_new(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """As `write_bytes`, but never over anything that is there, however many write it at once.

    Raises FileExistsError, StorageError.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.{os.getpid()}.tmp")
    write_bytes(temporary, data, mode=mode)
    try:
        os.link(temporary, path, follow_symlinks=False)
        sync(path.parent)
    except FileExistsError:
        raise
    except OSError as error:
        raise _storage_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 `text` to `path` atomically. Raises StorageError."""
    write_bytes(path, text.encode())


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def writer_lives(temporary: Path) -> bool:
    """Whether the process lives whose id stands before the last dot of the name."""
    pid = temporary.name.split(".")[-2]
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror or error}. "
        "The old file, if there was one, is untouched. Free space or fix permissions, then repeat."
    )
