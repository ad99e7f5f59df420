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
        """The suffix of the name in lowercase, with its dot."""
        return Path(self.name).suffix.lower()


class LocalFile(SourceFile):
    """A file of this machine."""

    def __init__(self, path: Path) -> None:
        """Raises DataError where it can't be found."""
        from gate.data.array_files import Stamp

        self.path, self.name = path, str(path)
        if (pointer := detect_pointer_file(path)) is not None:
            raise DataError(pointer)
        try:
            self._stamp = Stamp.from_file(path)
        except OSError as error:
            raise _unreadable(self.name, error) from error

    def open(self) -> IO[bytes]:
        """The file, which is the one that was found."""
        try:
            stream = self.path.open("rb")
        except OSError as error:
            raise _unreadable(self.name, error) from error
        if not self._stamp.fits(os.fstat(stream.fileno())):
            from gate.data.array_files import changed

            stream.close()
            raise changed(f"{self.name} was exchanged while it was measured")
        return stream

    def check(self, what: str) -> None:
        """Verify that size and time of the last write are unchanged."""
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
        """Verify that size, time and tag in the store are unchanged, unless it was just queried."""
        if time.monotonic() - self._looked < _LOOK_S:
            return
        try:
            self._system.invalidate_cache()
            now = self._system.info(self._info["name"])
        except Exception as error:
            raise _unreadable(self.name, error) from error
        if any(now[key] != self._info[key] for key in _MARKS & now.keys() & self._info.keys()):
            from gate.data.array_files import changed

            raise changed(f"{self.name} was exchanged while it was measured, at {what}")
        self._looked = time.monotonic()

    @property
    def size(self) -> int | None:
        """Return the size in bytes that the store reports, or None."""
        size = self._info.get("size")
        return None if size is None else int(size)

    def cached(self, folder: Path) -> Path:
        """A copy in the folder, by fsspec's `filecache`. Raises DataError, OSError."""
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
    """Copy all files into the folder: arrays are mapped, and a map needs a file. What the store
    holds later does not change them.

    Raises StorageError where there is no room, DataError where a file can't be read or is longer
    than its store says.
    """
    needed, free = sum(file.size or 0 for file in files), shutil.disk_usage(folder).free
    try:
        if needed > free:
            raise OSError(errno.ENOSPC, "")
        copies = [file.cached(folder) for file in files]
    except OSError as error:
        raise StorageError(
            f"no room to copy {files[0].name} ({len(files)} files of {needed} bytes) into "
            f"{folder.parent}: {free} bytes are free. Free space, set TMPDIR, or give Parquet or "
            ".tar shards, which are not copied."
        ) from error
    for file, copy in zip(files, copies, strict=True):
        file.check("its copy")
        if file.size is not None and copy.stat().st_size > file.size:
            from gate.data.array_files import changed

            raise changed(f"{file.name} gave more bytes than its store says it has")
    return copies


def remote_files(url: str, *, kinds: Sequence[str]) -> list[SourceFile]:
    """The file of this URL, or all of a folder in the order of their names.

    Raises DataError where nothing is there, and for a folder with anything but one of `kinds`
    (suffixes).
    """
    from gate.data.array_files import check_kinds, is_shard

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
    found = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}
    names = [base for base in sorted(found) if is_shard(base, kinds=kinds)]
    check_kinds(names, origin=name, kinds=kinds)
    return [RemoteFile(system, found[base]) for base in names]


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
    """In this order. None: all but the label."""
    label: str | None = None
    """Empty: none. None: `label`, where it is one integer a sample and no input."""

    def of(self, names: list[str]) -> tuple[tuple[str, ...], str | None]:
        """The inputs among these names, and the label. Raises DataError for one that is absent."""
        label = LABEL if self.label is None and LABEL in names else self.label or None
        if self.inputs is not None and self.label is None and LABEL in self.inputs:
            label = None
        inputs = self.inputs or tuple(name for name in names if name != label)
        absent = [name for name in (*inputs, label) if name is not None and name not in names]
        if absent:
            raise DataError(
                f"there is no field {absent[0]!r}. There are: {', '.join(names)}. Name them as "
                "#inputs=FIELD,FIELD&label=FIELD behind the source."
            )
        return inputs, label


@dataclass(frozen=True)
class SampleLocation:
    """The parts of the text."""

    place: str
    """Path, URL, or `package.module:factory`."""
    fields: Fields

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `PLACE` or `PLACE#inputs=a,b&label=c`. Raises DataError.

        The path of an existing file is a path, whatever its name.
        """
        found = None if _is_there(text) else _FIELDS.fullmatch(text)
        if found is None:
            return cls(text, Fields())
        pairs = parse_qsl(found["fields"], keep_blank_values=True)
        given = dict(pairs)
        if len(given) < len(pairs) or given.keys() - {"inputs", "label"}:
            raise DataError(
                f"cannot read the fields of {redacted(text)!r}: expected #inputs=FIELD,FIELD, "
                "&label=FIELD, or both, each once."
            )
        inputs = tuple(filter(None, given.get("inputs", "").split(","))) or None
        return cls(found["place"], Fields(inputs, given.get("label")))

    @property
    def is_url(self) -> bool:
        """Whether it names a place by a scheme."""
        return "://" in self.place

    @property
    def is_factory(self) -> bool:
        """Whether it is `package.module:factory`, and no file of that name."""
        return bool(_FACTORY.fullmatch(self.place)) and not _is_there(self.place)


def _is_there(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # such as a name that is too long
        return False
