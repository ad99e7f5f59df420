"""Files of samples, here or at a URL of fsspec, which are read by seeking."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from gate.errors import DataError, first_line
from gate.parity.arrays.shards import check_kinds, is_shard
from gate.parity.arrays.stamp import Stamp, changed
from gate.storage.pointer import missing_content
from gate.storage.redaction import redacted, without_passwords

_CHECK = "Check the address, and that this machine may read there."
_LOOK_S = 5.0
"""Between two questions to a store: each may take as long as reading a sample."""
_MARKS = {"size", "mtime", "ETag", "etag", "LastModified", "last_modified", "generation", "md5Hash"}
"""What stores say of a file that another one has otherwise."""
EXTRA = "pip install 'parity-gate[data]'"


class SourceFile(ABC):
    """One file."""

    name: str
    """For messages; without passwords."""

    @abstractmethod
    def open(self) -> IO[bytes]:
        """A stream that can seek. Raises DataError."""

    @abstractmethod
    def check(self, what: str) -> None:
        """Raise DataError where the file is another one than when it was found. `what`: what is
        read of it."""

    @property
    def suffix(self) -> str:
        """In small letters, with its dot."""
        return Path(self.name).suffix.lower()


class LocalFile(SourceFile):
    """A file of this machine."""

    def __init__(self, path: Path) -> None:
        """Raises DataError where it can't be found."""
        self.path, self.name = path, str(path)
        if (pointer := missing_content(path)) is not None:
            raise DataError(pointer)
        try:
            self._stamp = Stamp.of_file(path)
        except OSError as error:
            raise _unreadable(self.name, error) from error

    def open(self) -> IO[bytes]:
        """The file, which is the one that was found."""
        try:
            stream = self.path.open("rb")
        except OSError as error:
            raise _unreadable(self.name, error) from error
        if not self._stamp.fits(os.fstat(stream.fileno())):
            stream.close()
            raise changed(f"{self.name} was exchanged while it was measured")
        return stream

    def check(self, what: str) -> None:
        """By its size and the time of its last write."""
        self._stamp.check(what)


class RemoteFile(SourceFile):
    """A file at a URL."""

    def __init__(self, system: Any, info: Mapping[str, Any]) -> None:
        """`system`: of fsspec; `info`: what it says of the file."""
        self._system, self._info, self._looked = system, info, time.monotonic()
        self.name = redacted(system.unstrip_protocol(info["name"]))

    def open(self) -> IO[bytes]:
        """A stream that fetches what is read of it."""
        try:
            return cast(IO[bytes], self._system.open(self._info["name"], "rb"))
        except Exception as error:  # each store has errors of its own
            raise _unreadable(self.name, error) from error

    def check(self, what: str) -> None:
        """By what the store says of it, size, time and tag, if it was not asked just before."""
        if time.monotonic() - self._looked < _LOOK_S:
            return
        try:
            self._system.invalidate_cache()
            now = self._system.info(self._info["name"])
        except Exception as error:
            raise _unreadable(self.name, error) from error
        if any(now[key] != self._info[key] for key in _MARKS & now.keys() & self._info.keys()):
            raise changed(f"{self.name} was exchanged while it was measured, at {what}")
        self._looked = time.monotonic()

    @property
    def size(self) -> int:
        """In bytes, as the store says."""
        return int(self._info.get("size") or 0)


def remote_files(url: str, *, kinds: Sequence[str]) -> list[SourceFile]:
    """The file of this URL, or all of a folder in the order of their names.

    Raises DataError where nothing is there, and for a folder with anything but one of `kinds`
    (suffixes).
    """
    name = redacted(url)
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
        system.invalidate_cache()
        info = system.info(path)
        folder = info["type"] == "directory"
        entries = system.ls(path, detail=True) if folder else [info]
    except Exception as error:
        # By fsspec itself, by the package of a scheme, or by the store.
        lacking = isinstance(error, ImportError) or "Protocol not known" in str(error)
        remedy = f"Install what opens it: {EXTRA}, and for s3:// s3fs." if lacking else _CHECK
        raise DataError(f"cannot open {name}: {_reason(error)}. {remedy}") from error
    if not folder:
        return [RemoteFile(system, info)]
    found = {_base(entry["name"]): entry for entry in entries}
    names = [base for base in sorted(found) if is_shard(base, kinds=kinds)]
    check_kinds(names, origin=name, kinds=kinds)
    return [RemoteFile(system, found[base]) for base in names]


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _reason(error: Exception) -> str:
    return without_passwords(first_line(error, empty=type(error).__name__))


def _unreadable(name: str, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else _reason(error)
    return DataError(f"cannot read {name}: {reason}. {_CHECK}")
