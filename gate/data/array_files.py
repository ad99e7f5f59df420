"""Files of arrays as memory maps: `.npy`, `.npz`, or a folder of such shards in name order.

Nothing is unpickled, and no array is read whole.
"""

from __future__ import annotations

import mmap
import shutil
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gate.errors import DataError, StorageError, first_line
from gate.parity.arrays.rows import Array
from gate.parity.arrays.stamp import Stamp
from gate.storage.pointer import missing_content
from gate.storage.temporary import temporary_folder

SINGLE_NAME = "input"
"""Name of the only array of an `.npy` file, which carries no name itself."""

SUFFIXES = (".npy", ".npz")
_IMAGES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class Shard(ABC):
    """Named arrays that lie together, with the same number of samples each."""

    forms: Mapping[str, Form]
    """Of each array."""

    @abstractmethod
    def arrays(self) -> Mapping[str, Array]:
        """Its arrays, mapped. Raises DataError where they are other ones than before."""

    def check(self, what: str) -> None:  # noqa: B027 - most can't change
        """Raise DataError where its file was written to since it was opened."""


@dataclass(frozen=True)
class Form:
    """What an array is, without its values."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]


class HeldShard(Shard):
    """Arrays that are there: in memory, or mapped."""

    def __init__(self, arrays: Mapping[str, Array], stamp: Stamp | None = None) -> None:
        """`stamp`: of the file that is mapped."""
        self.forms = {name: Form(array.dtype, array.shape) for name, array in arrays.items()}
        self._arrays, self._stamp = dict(arrays), stamp

    def arrays(self) -> Mapping[str, Array]:
        """The arrays."""
        return self._arrays

    def check(self, what: str) -> None:
        """Raise DataError where the mapped file was written to."""
        if self._stamp is not None:
            self._stamp.check(what)


def open_shards(path: Path) -> list[HeldShard]:
    """Memory-map one file or every shard of a folder, in name order (pad numbers with zeros).

    Raises DataError for what is missing, unreadable, truncated, mixed or not an array;
    StorageError where there is no room to unpack an `.npz`.
    """
    if path.is_dir():
        return [_open_file(file) for file in shard_files(path)]
    _check_content(path)
    if not path.exists():
        raise DataError(
            f"{path} does not exist. Name a .npy or .npz file, a folder of them, or another source "
            "of samples: docs/data.md."
        )
    return [_open_file(path)]


def open_array(path: Path) -> Array:
    """Memory-map one `.npy` file, read-only. Raises DataError."""
    _check_content(path)
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        reason = first_line(error, empty=type(error).__name__)
        raise DataError(
            f"cannot read {path.name} as a .npy array: {reason}. Expected a whole file of "
            "numbers as numpy.save writes it, without Python objects."
        ) from error


def forget_pages(array: Array) -> None:
    """Tell the system that the mapped pages of `array` are not needed for now.

    Without it the pages that were read stay counted as memory of this process.
    """
    mapping = array.base
    if isinstance(mapping, mmap.mmap) and hasattr(mapping, "madvise"):
        mapping.madvise(mmap.MADV_DONTNEED)


def shard_files(folder: Path, *, kinds: Sequence[str] = SUFFIXES) -> list[Path]:
    """The files of a folder of shards in the order of their names, all of one kind that holds
    samples (`kinds`: suffixes). Raises DataError for a folder that holds anything else."""
    files = sorted(file for file in folder.iterdir() if is_shard(file.name, kinds=kinds))
    if any(file.suffix.lower() in _IMAGES for file in folder.rglob("*")):
        raise DataError(
            f"{folder} holds images; arrays are expected. Preprocess them as the model wants them "
            "and save the result as .npy (samples on axis 0), or give a data set that lists them, "
            "and the spec: docs/data.md."
        )
    folders = [file for file in files if not file.is_file()]
    if folders:
        raise strange_file(folder, folders[0].name)
    check_kinds([file.name for file in files], origin=str(folder), kinds=kinds)
    return files


def is_shard(name: str, *, kinds: Sequence[str]) -> bool:
    """Whether it is meant as one: not hidden, nor `_SUCCESS` or `_metadata` beside columns."""
    aside = name.startswith("_") and Path(name).suffix.lower() not in kinds
    return not name.startswith(".") and not aside


def check_kinds(names: Sequence[str], *, origin: str, kinds: Sequence[str]) -> str:
    """The one suffix of all these files, which is one of `kinds`. Raises DataError."""
    found = {Path(name).suffix.lower() for name in names}
    for name in names:
        if Path(name).suffix.lower() not in kinds:
            raise strange_file(origin, name)
    if not found:
        raise DataError(f"{origin} is empty. Put shards in it: {', '.join(kinds)}.")
    if len(found) > 1:
        raise DataError(f"{origin} mixes {' and '.join(sorted(found))} shards. Keep one kind.")
    return found.pop()


def strange_file(origin: Path | str, name: str) -> DataError:
    """The error of a folder with a file that is no shard."""
    return DataError(
        f"{origin} holds {name}, which is no shard of samples. "
        "Keep only shards in the folder; labels have a file of their own."
    )


def _open_file(path: Path) -> HeldShard:
    suffix = path.suffix.lower()
    if suffix == ".npy":
        array = open_array(path)
        return HeldShard({SINGLE_NAME: array}, Stamp.of_file(path))
    if suffix == ".npz":
        return HeldShard(open_npz(path))
    if suffix in _IMAGES:
        raise DataError(
            f"{path.name} is an image; arrays are expected. Preprocess it as the model wants it "
            "and save the result as .npy (samples on axis 0)."
        )
    raise DataError(
        f"{path.name} is no .npy or .npz file, nor another source of samples (docs/data.md). Save "
        "the samples with numpy.save."
    )


def open_npz(path: Path) -> dict[str, Array]:
    """Map the members of an `.npz`, one array an input.

    They are unpacked to a temporary folder that is removed at once: the maps keep the bytes
    until they are dropped, so that nothing stays behind even if the process is killed.
    """
    _check_content(path)
    arrays: dict[str, Array] = {}
    try:
        with (
            zipfile.ZipFile(path) as archive,
            temporary_folder() as folder,
        ):
            for number, member in enumerate(archive.infolist()):
                name = _member_name(path, member, taken=arrays)
                unpacked = Path(folder) / f"{number}.npy"
                _unpack(archive, member, unpacked)
                arrays[name] = open_array(unpacked)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, NotImplementedError) as error:
        raise DataError(
            f"cannot read {path.name} as .npz: {error}. Expected a whole file as numpy.savez "
            "writes it; save it again."
        ) from error
    except RuntimeError as error:  # an encrypted member
        raise DataError(f"cannot read {path.name}: {error}. Save it without a password.") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}.") from error
    if not arrays:
        raise DataError(f"{path.name} holds no array. Save one array for each input of the model.")
    return arrays


def _check_content(path: Path) -> None:
    if (pointer := missing_content(path)) is not None:
        raise DataError(pointer)


def _member_name(path: Path, member: zipfile.ZipInfo, *, taken: dict[str, Array]) -> str:
    name = member.filename.removesuffix(".npy")
    if name == member.filename or name in taken:
        raise DataError(
            f"{path.name} holds '{member.filename}', which is no array or is there twice. "
            "Expected one .npy member for each input, as numpy.savez writes it."
        )
    return name


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    free = shutil.disk_usage(target.parent).free
    if member.file_size > free:
        raise StorageError(
            f"no room to unpack '{member.filename}' of {member.file_size} bytes into "
            f"{target.parent}: {free} bytes are free. Free space, set TMPDIR, or give .npy files."
        )
    import zlib

    try:
        with archive.open(member) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except zlib.error as error:
        raise zipfile.BadZipFile(str(error)) from error
