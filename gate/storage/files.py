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

from gate.errors import GateError, StorageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces `path` on success.

    After a failure or a crash the old file is unchanged. Temporary files of crashed writers are
    removed first. Raises StorageError if the disk is full or not writable, or if `path` is a
    folder.
    """
    if not path.name or (path.is_dir() and not path.is_symlink()):
        raise StorageError(
            f"cannot write {path}: it is a folder. Name a file in it, such as "
            f"{path / 'model.onnx'}."
        )
    try:
        make_folders(path.parent)
        for stale in path.parent.glob(f".{path.name}.*.tmp"):
            if not is_writer_alive(stale):
                stale.unlink(missing_ok=True)
    except OSError as error:
        raise _storage_error(path, error) from error
    # The UUID distinguishes threads of a process that write the same path.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise _storage_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # a read-only file system also for a file that is absent
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def scratch(output: Path) -> Iterator[Path]:
    """Yield an empty folder next to `output`, from which files can be moved there atomically.

    It is removed at the end, like those that killed processes left. Raises OSError.
    """
    for stale in output.parent.glob(f".{output.name}.*.scratch"):
        if not is_writer_alive(stale):
            shutil.rmtree(stale, ignore_errors=True)
    folder = output.with_name(f".{output.name}.{os.getpid()}.scratch")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_bytes(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write `data` to `path` atomically. Raises StorageError.

    `mode`: the mode of the new file, from its creation on, less the umask.
    """
    with replacing(path) as temporary:
        temporary.touch(mode=mode, exist_ok=False)
        temporary.write_bytes(data)


def write_new(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write bytes to a path that does not exist yet. Safe for concurrent processes.

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
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 `text` to `path` atomically. Raises StorageError."""
    write_bytes(path, text.encode())


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_writer_alive(temporary: Path) -> bool:
    """Return whether the process runs whose ID precedes the last dot of the name."""
    pid = temporary.name.split(".")[-2]
    try:
        with contextlib.suppress(PermissionError):  # The process of another user.
            os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    return True


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror or error}. "
        "The old file, if any, is unchanged. Free space or fix permissions, then retry."
    )


NAME_LIMIT = 255
"""Maximum length in bytes of a relative name, the limit of most file systems for a file name."""


def wrong_name(name: str) -> str | None:
    """Return why an untrusted `name` is not a relative path inside a folder, or None."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name:
        return "is not a path inside a folder"
    if "\0" in name:
        return "contains a null byte"
    if len(name.encode(errors="replace")) > NAME_LIMIT:
        return f"has more than {NAME_LIMIT} bytes"
    return None


def is_inside(folder: Path, name: str) -> bool:
    """Return whether `name` is inside `folder` after links are resolved.

    Raises OSError or RuntimeError if links can't be resolved.
    """
    root = folder.resolve()
    return (root / name).resolve().is_relative_to(root)


def open_inside(folder: Path, name: str) -> io.FileIO:
    """Open a regular file inside `folder` without following links below it.

    Raises OSError, also if a part of the path is a link or not a folder or regular file.
    """
    problem = wrong_name(name)
    if problem is not None:
        raise OSError(errno.EINVAL, problem, name)
    *folders, last = PurePosixPath(name).parts
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            os.close(parent)
            parent = inner
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(last, flags, dir_fd=parent)
    finally:
        os.close(parent)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ELOOP, "is not a regular file", name)
    return io.FileIO(descriptor)


def open_plain(path: Path) -> io.BufferedReader:
    """Open a regular file for reading, following links. Never waits for the writer of a pipe.

    Raises OSError, also for anything but a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # A null byte in the name.
        raise OSError(f"{str(path)!r} is not a valid file name") from error
    stream = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        stream.close()
        raise OSError(f"{path} is not a regular file")
    return stream


def open_failure(error: OSError | ValueError) -> str:
    """Return why a file can't be opened with O_NOFOLLOW. ValueError: a null byte in the name."""
    is_link = getattr(error, "errno", None) == errno.ELOOP
    return "it is a link" if is_link else getattr(error, "strerror", None) or str(error)


_STATE_FOLDER = ".gate"


# A user who can open a lock file, even only for reading, can hold the lock forever; and a user who
# can write to its folder can replace the file.
@contextlib.contextmanager
def private_lock(path: Path, *, timeout_s: float, busy: GateError) -> Iterator[None]:
    """Hold a file lock in a folder that only this user can access. The operating system releases
    the lock if this process dies.

    Raises `busy` if another process holds it for longer, and StorageError if the folder or file
    can't be created or belongs to another user.
    """
    try:
        _make_private(path.parent)
        _refuse_foreign(path)
        lock = FileLock(path, timeout=timeout_s, mode=0o600)
        lock.acquire()
    except TimeoutError as error:  # filelock's Timeout, which is an OSError.
        raise busy from error
    except OSError as error:
        raise StorageError(
            f"cannot lock {path}: {error.strerror or error}. Free space or fix permissions: "
            f"{path.parent} must belong to this user and have mode 0700."
        ) from error
    try:
        yield
    finally:
        lock.release()


def make_folders(path: Path, *, mode: int = 0o777) -> None:
    """Create a folder with its parents, like `mkdir -p`, but `.gate` with `make_state_folder`.
    Raises OSError."""
    if not path.is_dir():
        make_folders(path.parent, mode=mode)
        if path.name == _STATE_FOLDER:
            make_state_folder(path)
        else:
            path.mkdir(mode=mode, exist_ok=True)


def make_state_folder(path: Path) -> None:
    """Create the gate's state folder, which only this user can access, with a .gitignore that
    excludes it from Git. Raises OSError."""
    path.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError), (path / ".gitignore").open("xb") as stream:
        stream.write(b"*\n")


def make_private_file(path: Path, *, with_suffixes: tuple[str, ...] = ()) -> None:
    """Create an empty file that only this user can open, or restrict an existing one.

    with_suffixes: also restrict existing files with these suffixes appended. New folders are
    private. Raises OSError, and StorageError if another user could change the file or its folder.
    """
    path = Path(os.path.realpath(path))
    folder = path.parent
    make_folders(folder, mode=0o700)
    status = folder.stat()
    if folder.name == _STATE_FOLDER:
        _restrict_access(folder, status, mode=0o700)
    elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise StorageError(
            f"every user of this host can replace files in {folder}. Run chmod o-w {folder}, or "
            f"put {path.name} into another folder."
        )
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, MODE))
    for each in (path, *(Path(f"{path}{suffix}") for suffix in with_suffixes)):
        with contextlib.suppress(FileNotFoundError):
            status = each.stat()
            if stat.S_ISREG(status.st_mode):  # a folder that is named by mistake keeps its mode
                _restrict_access(each, status, mode=MODE)


def _make_private(folder: Path) -> None:
    make_folders(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise StorageError(f"{folder} is a link, expected a folder of locks. Remove it.")
    _restrict_access(folder, status, mode=0o700)


def _refuse_foreign(path: Path) -> None:
    """Refuse files of other users, from before the folder was private."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"{path} is not a regular file, expected a lock file. Remove it.")
        _restrict_access(path, status, mode=0o600)


def _restrict_access(path: Path, status: os.stat_result, *, mode: int) -> None:
    """Remove the permissions of all other users.

    Root may use files of other users, which it can read and lock anyway.
    """
    if status.st_uid != os.geteuid() and os.geteuid() != 0:
        raise StorageError(
            f"{path} belongs to the user with id {status.st_uid}, this process has "
            f"{os.geteuid()}: its owner can lock it forever. Run as that user, or use another path."
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(mode)


MODE = 0o600

_KEY_LIMIT = 1 << 16
"""Maximum size of a private key, in bytes."""


def read_private(path: Path, *, kind: str, missing: str) -> str:
    """Return the text of a file that no other user can read. Raises StorageError.

    `kind`: its name in messages. `missing`: the remedy if it can't be read.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            status = os.fstat(stream.fileno())
            text = stream.read()
    except OSError as error:
        raise StorageError(f"cannot read the {kind} {path}: {error.strerror}. {missing}") from error
    except UnicodeDecodeError as error:
        raise StorageError(f"the {kind} {path} is not UTF-8 text. Write it again.") from error
    _refuse_wrong_mode(status, path, kind=kind)
    return text


def read_private_bytes(path: Path, *, kind: str, missing: str) -> bytes:
    """Read a private, regular file that belongs to this user. Otherwise another user could choose
    the signing key with a link or a file. Raises StorageError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            data = stream.read(_KEY_LIMIT + 1) if stat.S_ISREG(status.st_mode) else b""
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name.
        raise StorageError(
            f"cannot read the {kind} {path}: {open_failure(error)}. {missing}"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"the {kind} {path} is not a regular file. {missing}")
    if status.st_uid != os.geteuid():
        raise StorageError(
            f"the {kind} {path} belongs to user {status.st_uid}, expected {os.geteuid()}, who runs "
            f"this process. Use your own key. {missing}"
        )
    _refuse_wrong_mode(status, path, kind=kind)
    if len(data) > _KEY_LIMIT:
        raise StorageError(f"the {kind} {path} has more than {_KEY_LIMIT} bytes. {missing}")
    return data


def _refuse_wrong_mode(status: os.stat_result, path: Path, *, kind: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if mode & ~MODE:
        raise StorageError(
            f"the {kind} {path} has mode {mode:04o}, so other users can read it. Expected 0600: "
            f"chmod 600 {path}, and replace the {kind} if another user may have read it."
        )


# A process holds a lock in each of its temporary folders, which ends with the process. A process ID
# would not identify the owner: IDs are reused, in containers immediately.
_PREFIX = "parity-gate-"
_LOCK = "lock"

_ACTIVE: set[str] = set()
"""Folders of this process. On NFS locks belong to processes, so other threads could get them."""


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create an empty folder that is removed afterwards. Raises StorageError."""
    sweep()
    with contextlib.ExitStack() as stack:
        try:
            outer = stack.enter_context(_temporary_directory(prefix=_PREFIX))
            stack.enter_context(_locked(outer))
            # The inner folder is removed before the lock. If that is interrupted, `sweep` finds it.
            folder = stack.enter_context(_temporary_directory(dir=outer))
        except OSError as error:
            raise StorageError(
                f"cannot create a temporary folder: {error.strerror or error}. Free space or fix "
                "its permissions, or set TMPDIR to another folder."
            ) from error
        yield Path(folder)


def path_for_messages(path: Path) -> str:
    """Return a path for messages: only the name of a file in a temporary folder.

    The folder's name differs each time, and a message that differs is written again.
    """
    temporary = str(Path(tempfile.gettempdir(), _PREFIX))
    return path.name if str(path).startswith(temporary) else str(path)


def sweep() -> None:
    """Remove temporary folders that killed processes of this user left, as far as possible."""
    with contextlib.suppress(OSError):
        with os.scandir(tempfile.gettempdir()) as entries:
            folders = [Path(entry.path) for entry in entries if entry.name.startswith(_PREFIX)]
        for folder in folders:
            with contextlib.suppress(OSError):
                _sweep(folder)


def _temporary_directory(**options: str) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True, **options)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold the lock of a folder. The file is locked before it gets its name."""
    new = Path(folder, f"{_LOCK}.new")
    _ACTIVE.add(folder)
    try:
        with new.open("xb") as lock:
            # If the file system has no locks, the folder is never swept.
            with contextlib.suppress(OSError, AttributeError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                new.rename(new.with_name(_LOCK))
            yield
    finally:
        _ACTIVE.discard(folder)


def _sweep(folder: Path) -> None:
    if fcntl is None:
        return
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or str(folder) in _ACTIVE:
        return
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for inner in folder.iterdir():
            if inner.is_dir() and not inner.is_symlink():
                shutil.rmtree(inner, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
