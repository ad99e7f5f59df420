"""Parse `--inputs`: a path, an fsspec URL or a factory."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast
from urllib.parse import parse_qsl

from gate.errors import DataError, StorageError, first_line
from gate.storage.safe_text import redacted, without_passwords
from gate.storage.untrusted_files import detect_pointer_file

_CHECK = "Check the URL or path, and the permissions."

_CHECK_INTERVAL_S = 5.0
"""Minimum time between two queries to a store: each may take as long as reading a sample."""

_CHANGE_KEYS = {
    "size", "mtime", "ETag", "etag", "LastModified", "last_modified", "generation", "md5Hash",
}  # fmt: skip
"""Metadata of the stores that changes with the file."""

EXTRA = "pip install 'parity-gate[data]'"


@dataclass(frozen=True)
class Stamp:
    """The inode, size and modification time of a file.

    Replacing the file by another one is not a change, because an open file keeps its content.
    """

    path: Path
    inode: int
    size: int
    written_ns: int

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read the stamp of a file. Raises OSError."""
        status = path.stat()
        return cls(path, status.st_ino, status.st_size, status.st_mtime_ns)

    def matches(self, status: os.stat_result) -> bool:
        """Return whether a file with this status is unchanged."""
        now = (status.st_ino, status.st_size, status.st_mtime_ns)
        return now == (self.inode, self.size, self.written_ns)

    def check(self, position: str) -> None:
        """Raise DataError if the file was written to. `position`: what is being read."""
        try:
            status = self.path.stat()
        except OSError:  # An open file stays readable after it is removed.
            return
        if status.st_ino == self.inode and not self.matches(status):
            raise changed(f"{self.path} was written to while it was measured, at {position}")


def changed(problem: str) -> DataError:
    """Return the error for samples that changed during a measurement."""
    return DataError(
        f"{problem}, so the results are not valid. Measure again while no process writes to the "
        "samples, or on a copy."
    )


class SourceFile(ABC):
    """One file of a source of samples."""

    name: str
    """The name in messages, without passwords."""

    @abstractmethod
    def open(self) -> IO[bytes]:
        """Open a seekable stream. Raises DataError."""

    @abstractmethod
    def check(self, position: str) -> None:
        """Raise DataError if the file has changed. `position`: what is read, for the message."""

    @property
    def suffix(self) -> str:
        """Return the suffix of the name in lowercase, with its dot."""
        return Path(self.name).suffix.lower()


class LocalFile(SourceFile):
    """A file on this machine."""

    def __init__(self, path: Path) -> None:
        """Raises DataError if the file can't be found."""
        self.path, self.name = path, str(path)
        if (pointer := detect_pointer_file(path)) is not None:
            raise DataError(pointer)
        try:
            self._stamp = Stamp.from_file(path)
        except OSError as error:
            raise _unreadable(self.name, error) from error

    def open(self) -> IO[bytes]:
        """Open the file. Raises DataError if it was replaced."""
        try:
            stream = self.path.open("rb")
        except OSError as error:
            raise _unreadable(self.name, error) from error
        if not self._stamp.matches(os.fstat(stream.fileno())):
            stream.close()
            raise changed(f"{self.name} was replaced while it was measured")
        return stream

    def check(self, position: str) -> None:
        """Verify that the size and the time of the last write are unchanged."""
        self._stamp.check(position)


class RemoteFile(SourceFile):
    """A file at a URL."""

    def __init__(self, system: Any, info: Mapping[str, Any]) -> None:
        """`system`: a file system of fsspec. `info`: its metadata of the file."""
        self._system, self._info, self._checked_at = system, info, time.monotonic()
        self.name = redacted(system.unstrip_protocol(info["name"]))

    def open(self) -> IO[bytes]:
        """Open a stream that fetches the file as it is read."""
        try:
            return cast(IO[bytes], self._system.open(self._info["name"], "rb"))
        except Exception as error:  # The stores' errors have no common base class.
            raise _unreadable(self.name, error) from error

    def check(self, position: str) -> None:
        """Verify that size, time and ETag are unchanged, at most every few seconds."""
        if time.monotonic() - self._checked_at < _CHECK_INTERVAL_S:
            return
        try:
            self._system.invalidate_cache()
            now = self._system.info(self._info["name"])
        except Exception as error:
            raise _unreadable(self.name, error) from error
        keys = _CHANGE_KEYS & now.keys() & self._info.keys()
        if any(now[key] != self._info[key] for key in keys):
            raise changed(f"{self.name} was replaced while it was measured, at {position}")
        self._checked_at = time.monotonic()

    @property
    def size(self) -> int | None:
        """Return the size in bytes that the store reports, or None."""
        size = self._info.get("size")
        return None if size is None else int(size)

    def cached(self, folder: Path) -> Path:
        """Copy the file to a folder with fsspec's `filecache`. Raises DataError, OSError."""
        import fsspec

        try:
            cache = fsspec.filesystem(
                "filecache", fs=self._system, cache_storage=str(folder), same_names=True,
                skip_instance_cache=True,
            )  # fmt: skip
            with cache.open(self._info["name"], "rb") as stream:
                return Path(stream.name)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            raise _unreadable(self.name, error) from error
        except Exception as error:
            raise _unreadable(self.name, error) from error


def copy_files(files: Sequence[RemoteFile], folder: Path) -> list[Path]:
    """Copy all files into the folder, where arrays can be memory-mapped and do not change.

    Raises StorageError if there is not enough space, DataError if a file can't be read or is longer
    than its store reports.
    """
    needed, free = sum(file.size or 0 for file in files), shutil.disk_usage(folder).free
    try:
        if needed > free:
            raise OSError(errno.ENOSPC, "")
        copies = [file.cached(folder) for file in files]
    except OSError as error:
        raise StorageError(
            f"not enough space to copy {files[0].name} ({len(files)} files, {needed} bytes) to "
            f"{folder.parent}: {free} bytes are free. Free space, set TMPDIR, or use Parquet or "
            ".tar shards, which are not copied."
        ) from error
    for file, copy in zip(files, copies, strict=True):
        file.check("its copy")
        if file.size is not None and copy.stat().st_size > file.size:
            raise changed(f"{file.name} is longer than the size that its store reports")
    return copies


def is_shard(name: str, *, kinds: Sequence[str]) -> bool:
    """Return whether a file is a shard: not hidden, `_SUCCESS` or `_metadata`."""
    is_metadata = name.startswith("_") and Path(name).suffix.lower() not in kinds
    return not name.startswith(".") and not is_metadata


def check_kinds(names: Sequence[str], *, origin: str, kinds: Sequence[str]) -> str:
    """Return the common suffix of all files, which is one of `kinds`. Raises DataError."""
    suffixes = {Path(name).suffix.lower() for name in names}
    for name in names:
        if Path(name).suffix.lower() not in kinds:
            raise unexpected_file(origin, name)
    if not suffixes:
        raise DataError(f"{origin} is empty. Add shards: {', '.join(kinds)}.")
    if len(suffixes) > 1:
        raise DataError(f"{origin} mixes {' and '.join(sorted(suffixes))} shards. Keep one kind.")
    return suffixes.pop()


def unexpected_file(origin: Path | str, name: str) -> DataError:
    """Return the error for a folder with a file that is not a shard."""
    return DataError(
        f"{origin} contains {name}, which is not a shard of samples. "
        "Keep only shards in the folder, and labels in a separate file."
    )


def remote_files(url: str, *, kinds: Sequence[str]) -> list[SourceFile]:
    """Return the file at this URL, or all files of a folder in the order of their names.

    Raises DataError if there is none, or if the suffixes in a folder are not all the same one of
    `kinds`.
    """
    name = redacted(url)
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
        system.invalidate_cache()
        info = system.info(path)
        is_folder = info["type"] == "directory"
        entries = system.ls(path, detail=True) if is_folder else [info]
    except Exception as error:
        # Raised by fsspec, by the package of a scheme, or by the store.
        is_missing = isinstance(error, ImportError) or "Protocol not known" in str(error)
        remedy = f"Install {EXTRA}, and s3fs for s3://." if is_missing else _CHECK
        raise DataError(f"cannot open {name}: {_reason(error)}. {remedy}") from error
    if not is_folder:
        return [RemoteFile(system, info)]
    by_name = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}
    names = [base for base in sorted(by_name) if is_shard(base, kinds=kinds)]
    check_kinds(names, origin=name, kinds=kinds)
    return [RemoteFile(system, by_name[base]) for base in names]


def _reason(error: Exception) -> str:
    return without_passwords(first_line(error, empty=type(error).__name__))


def _unreadable(name: str, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else _reason(error)
    return DataError(f"cannot read {name}: {reason}. {_CHECK}")


LABEL = "label"

_FACTORY = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")

_FIELDS = re.compile(r"(?P<place>.+)#(?P<fields>(?:inputs|label)=[^#]*)", re.DOTALL)


@dataclass(frozen=True)
class Fields:
    """The fields of a record that are inputs, and the one that is the label."""

    inputs: tuple[str, ...] | None = None
    """The inputs, in order. None: all fields but the label."""
    label: str | None = None
    """The label. Empty: no label. None: the field `label`, if it is not an input and an integer."""

    def select(self, names: list[str]) -> tuple[tuple[str, ...], str | None]:
        """Return the inputs and the label among these names. Raises DataError if one is absent."""
        label = LABEL if self.label is None and LABEL in names else self.label or None
        if self.inputs is not None and self.label is None and LABEL in self.inputs:
            label = None
        inputs = self.inputs or tuple(name for name in names if name != label)
        absent = [name for name in (*inputs, label) if name is not None and name not in names]
        if absent:
            raise DataError(
                f"there is no field {absent[0]!r}. The fields are: {', '.join(names)}. Append "
                "#inputs=FIELD,FIELD&label=FIELD to the source."
            )
        return inputs, label


@dataclass(frozen=True)
class SampleLocation:
    """The parsed value of `--inputs`."""

    source: str
    """A path, a URL, or `package.module:factory`."""
    fields: Fields

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `PLACE` or `PLACE#inputs=a,b&label=c`. Raises DataError.

        If a file with this name exists, the whole text is its path.
        """
        match = None if _exists(text) else _FIELDS.fullmatch(text)
        if match is None:
            return cls(text, Fields())
        pairs = parse_qsl(match["fields"], keep_blank_values=True)
        fields = dict(pairs)
        if len(fields) < len(pairs) or fields.keys() - {"inputs", "label"}:
            raise DataError(
                f"cannot read the fields of {redacted(text)!r}: expected #inputs=FIELD,FIELD, "
                "&label=FIELD, or both, each once."
            )
        inputs = tuple(filter(None, fields.get("inputs", "").split(","))) or None
        return cls(match["place"], Fields(inputs, fields.get("label")))

    @property
    def is_url(self) -> bool:
        """Return whether it is a URL."""
        return "://" in self.source

    @property
    def is_factory(self) -> bool:
        """Return whether it is `package.module:factory`, and there is no file with that name."""
        return bool(_FACTORY.fullmatch(self.source)) and not _exists(self.source)


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # For example, the name is too long.
        return False
