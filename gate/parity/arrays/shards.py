"""Files of arrays as memory maps: `.npy`, `.npz`, or a folder of such shards in name order.

Nothing is unpickled, and no array is read whole.
"""

from __future__ import annotations

import mmap
import shutil
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError, StorageError, first_line
from gate.storage.temporary import temporary_folder

Array = NDArray[np.generic]

SINGLE_NAME = "input"
"""Name of the only array of an `.npy` file, which carries no name itself."""

_KINDS = (".npy", ".npz")
_IMAGES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


def open_shards(path: Path) -> list[dict[str, Array]]:
    """Memory-map one file or every shard of a folder, in name order (pad numbers with zeros).

    Raises DataError for what is missing, unreadable, truncated, mixed or not an array;
    StorageError where there is no room to unpack an `.npz`.
    """
    if path.is_dir():
        return [_open_file(file) for file in _shard_files(path)]
    if not path.exists():
        raise DataError(f"{path} does not exist. Name a .npy or .npz file, or a folder of them.")
    return [_open_file(path)]


def open_array(path: Path) -> Array:
    """Memory-map one `.npy` file, read-only. Raises DataError."""
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


def _shard_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    kinds = {file.suffix.lower() for file in files if file.is_file()}
    strange = [f for f in files if not f.is_file() or f.suffix.lower() not in _KINDS]
    if any(file.suffix.lower() in _IMAGES for file in folder.rglob("*")):
        raise DataError(
            f"{folder} holds images; arrays are expected. Preprocess them as the model wants them "
            "and save the result as .npy (samples on axis 0)."
        )
    if strange:
        raise DataError(
            f"{folder} holds {strange[0].name}, which is no .npy or .npz shard. "
            "Keep only shards in the folder; labels have a file of their own."
        )
    if not files:
        raise DataError(f"{folder} is empty. Put .npy or .npz shards in it.")
    if len(kinds) > 1:
        raise DataError(f"{folder} mixes .npy and .npz shards. Keep one kind.")
    return files


def _open_file(path: Path) -> dict[str, Array]:
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return {SINGLE_NAME: open_array(path)}
    if suffix == ".npz":
        return _open_npz(path)
    if suffix in _IMAGES:
        raise DataError(
            f"{path.name} is an image; arrays are expected. Preprocess it as the model wants it "
            "and save the result as .npy (samples on axis 0)."
        )
    raise DataError(f"{path.name} is no .npy or .npz file. Save the samples with numpy.save.")


def _open_npz(path: Path) -> dict[str, Array]:
    """Map the members of an `.npz`, one array an input.

    They are unpacked to a temporary folder that is removed at once: the maps keep the bytes
    until they are dropped, so that nothing stays behind even if the process is killed.
    """
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
