"""Mapped arrays of URLs: shards are copied here while they are needed, few at a time."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from gate.errors import DataError, StorageError
from gate.parity.arrays.rows import Array
from gate.parity.arrays.shards import SINGLE_NAME, Form, Shard, open_array, open_npz
from gate.parity.arrays.stamp import changed
from gate.parity.sources.files import RemoteFile
from gate.parity.sources.npy import npy_form
from gate.storage.temporary import temporary_folder

HELD = 2
"""Copies that are there at a time: the shard that is read, and the one before for a second look."""
_CHUNK = 1 << 20


class Copies:
    """The latest copies of shards. They have no name any more: they are gone with the last map."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Mapping[str, Array]] = OrderedDict()
        self._contents: dict[str, str] = {}

    def of(self, file: RemoteFile) -> Mapping[str, Array]:
        """Its arrays, mapped. Raises DataError where the content is another one than before,
        StorageError where there is no room."""
        if file.name in self._held:
            self._held.move_to_end(file.name)
            return self._held[file.name]
        while len(self._held) >= HELD:
            self._held.popitem(last=False)
        with temporary_folder() as folder:
            target = folder / f"copy{file.suffix}"
            content = _copy(file, target)
            if self._contents.setdefault(file.name, content) != content:
                raise changed(f"{file.name} has other bytes than when it was read first")
            arrays = (
                {SINGLE_NAME: open_array(target)} if file.suffix == ".npy" else open_npz(target)
            )
        self._held[file.name] = arrays
        return arrays


class CopiedShard(Shard):
    """One `.npy` or `.npz` at a URL."""

    def __init__(self, file: RemoteFile, copies: Copies) -> None:
        """Reads headers only. Raises DataError."""
        self._file, self._copies = file, copies
        with file.open() as stream:
            if file.suffix == ".npy":
                self.forms: Mapping[str, Form] = {SINGLE_NAME: npy_form(stream, name=file.name)}
            else:
                self.forms = _npz_forms(stream, name=file.name)

    def arrays(self) -> Mapping[str, Array]:
        """Of a copy, made where there is none. Raises DataError, StorageError."""
        arrays = self._copies.of(self._file)
        if {name: Form(array.dtype, array.shape) for name, array in arrays.items()} != self.forms:
            raise changed(f"{self._file.name} has other arrays than when it was opened")
        return arrays

    def check(self, what: str) -> None:
        """Raise DataError where the store has another file now."""
        self._file.check(what)


def _npz_forms(stream: IO[bytes], *, name: str) -> dict[str, Form]:
    forms = {}
    try:
        with zipfile.ZipFile(stream) as archive:
            for member in archive.infolist():
                with archive.open(member) as opened:
                    form = npy_form(opened, name=f"{member.filename} of {name}")
                forms[member.filename.removesuffix(".npy")] = form
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(
            f"cannot read {name} as .npz: {error}. Expected a whole file as numpy.savez writes it."
        ) from error
    return forms


def _copy(file: RemoteFile, target: Path) -> str:
    """Copy it; the SHA-256 of what came."""
    free = shutil.disk_usage(target.parent).free
    if file.size > free:
        raise StorageError(
            f"no room to copy {file.name} of {file.size} bytes into {target.parent}: {free} bytes "
            "are free. Free space, set TMPDIR, or give smaller shards."
        )
    sha256, left = hashlib.sha256(), file.size
    with file.open() as stream, target.open("wb") as copy:
        while data := stream.read(_CHUNK):
            left -= len(data)
            if left < 0:
                raise changed(f"{file.name} gave more bytes than its store says it has")
            sha256.update(data)
            copy.write(data)
    return sha256.hexdigest()
