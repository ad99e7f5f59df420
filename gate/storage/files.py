"""Atomic writes, temporary folders, private files, file locks."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from filelock import FileLock

from gate.errors import StorageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


# What takes several files to make is made in a scratch folder beside the place that it will take.
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
        make_folders(path.parent)
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
    """Write bytes to a path that does not exist, however many processes write it at once.

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


# A record from outside could name `/dev/zero`, a pipe, or any other file of this machine.
NAME_LIMIT = 255
"""Bytes of a relative name, as most file systems bound a file's own."""


def wrong_name(name: str) -> str | None:
    """Why `name` can't name a file below a folder, on any system, or None."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name:
        return "is no path inside of a folder"
    if "\0" in name:
        return "holds a zero byte"
    if len(name.encode(errors="replace")) > NAME_LIMIT:
        return f"has more than {NAME_LIMIT} bytes"
    return None


def is_inside(folder: Path, name: str) -> bool:
    """Whether `name` below `folder` is there, links followed, without leaving the folder.

    Raises OSError or RuntimeError where links can't be followed.
    """
    root = folder.resolve()
    return (root / name).resolve().is_relative_to(root)


def open_inside(folder: Path, name: str) -> io.FileIO:
    """Open the plain file `name` below `folder`, no link followed from there on.

    Raises OSError, also where a link or anything but folders and a plain file is on the way.
    """
    wrong = wrong_name(name)
    if wrong is not None:
        raise OSError(errno.EINVAL, wrong, name)
    *folders, last = PurePosixPath(name).parts
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            os.close(place)
            place = inner
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(last, flags, dir_fd=place)
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ELOOP, "is no plain file", name)
    return io.FileIO(descriptor)


def open_plain(path: Path) -> io.BufferedReader:
    """Open a plain file for reading, links followed. Raises OSError, for any other kind too.

    Nothing waits for the other end of a pipe meanwhile.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # a zero byte in the name
        raise OSError(f"{str(path)!r} is no file's name") from error
    stream = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        stream.close()
        raise OSError(f"{path} is no plain file")
    return stream


_STATE_FOLDER = ".gate"


# Whoever may open a lock's file, if only to read, may hold it for ever; and whoever may write to
# its folder may put another file in its place.
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


def make_folders(path: Path, *, mode: int = 0o777) -> None:
    """Make a folder with its parents, as `mkdir -p`; a folder `.gate` as `make_state_folder`.
    Raises OSError."""
    if not path.is_dir():
        make_folders(path.parent, mode=mode)
        if path.name == _STATE_FOLDER:
            make_state_folder(path)
        else:
            path.mkdir(mode=mode, exist_ok=True)


def make_state_folder(path: Path) -> None:
    """Make the folder of the gate's state, for this user alone. Git leaves it out, unless its
    .gitignore says otherwise. Raises OSError."""
    path.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError), (path / ".gitignore").open("xb") as stream:
        stream.write(b"*\n")


def make_private_file(path: Path, *, with_suffixes: tuple[str, ...] = ()) -> None:
    """Make an empty file that only this user may open, whatever the umask; close one that is there
    to all others, with those whose names have these suffixes. Folders that are made are private.

    Raises OSError, and StorageError where file or folder are another user's to change.
    """
    path = Path(os.path.realpath(path))
    folder = path.parent
    make_folders(folder, mode=0o700)
    status = folder.stat()
    if folder.name == _STATE_FOLDER:
        _close(folder, status, mode=0o700)
    elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise StorageError(
            f"every user of this host may replace files in {folder}. Run chmod o-w {folder}, or "
            f"keep {path.name} in another folder."
        )
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, MODE))
    for each in (path, *(Path(f"{path}{suffix}") for suffix in with_suffixes)):
        with contextlib.suppress(FileNotFoundError):
            _close(each, each.stat(), mode=MODE)


def _make_private(folder: Path) -> None:
    make_folders(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise StorageError(f"{folder} is a link, expected a folder of locks. Remove it.")
    _close(folder, status, mode=0o700)


def _refuse_foreign(path: Path) -> None:
    """Refuse files that were in the folder before it was private, or that its owner put there."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"{path} is no plain file, expected a lock. Remove it.")
        _close(path, status, mode=0o600)


def _close(path: Path, status: os.stat_result, *, mode: int) -> None:
    """Remove the permissions of all other users.

    Root may use files of others, which it could read and lock anyway.
    """
    if status.st_uid != os.geteuid() and os.geteuid() != 0:
        raise StorageError(
            f"{path} belongs to the user with id {status.st_uid}, this is {os.geteuid()}: its "
            "owner may hold it for ever. Run as that user, or name another."
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(mode)


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
    _refuse_wrong_mode(status, path, what=what)
    return text


def read_private_bytes(path: Path, *, what: str, missing: str) -> bytes:
    """Read a private file that is a plain file of this very user: anyone who could put a link or a
    file there would choose the signing key. Raises StorageError."""
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
    _refuse_wrong_mode(status, path, what=what)
    if len(data) > _KEY_LIMIT:
        raise StorageError(f"the {what} {path} has more than {_KEY_LIMIT} bytes. {missing}")
    return data


def _refuse_wrong_mode(status: os.stat_result, path: Path, *, what: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if mode & ~MODE:
        raise StorageError(
            f"the {what} {path} has mode {mode:04o}, others may use it. Expected 0600: "
            f"chmod 600 {path}, and exchange the {what} if somebody may have read it."
        )


# A process holds a lock in each of its temporary folders. A lock dies with its process, and cannot
# belong to another one: ids of processes come again, and in containers at once.
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
            # Without locks it is never swept.
            with contextlib.suppress(OSError, AttributeError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                made.rename(made.with_name(_LOCK))
            yield
    finally:
        _OURS.discard(place)


def _sweep(place: Path) -> None:
    if fcntl is None:
        return
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
