"""Memory-mapped `.npy`, `.npz` and folders of shards; label files."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gate.data.reader import Block, SampleReader, rows_within, spec_of
from gate.errors import DataError, StorageError, first_line
from gate.storage.arrays import RowsArray, dtype_name
from gate.storage.files import temporary_folder
from gate.storage.untrusted_files import detect_pointer_file


@dataclass(frozen=True)
class Stamp:
    """Size and time of the last write of a file.

    A file that was exchanged by another of its name is no change: what is open stays as it is.
    """

    path: Path
    inode: int
    size: int
    written_ns: int

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Return the stamp of the file as it is now. Raises OSError."""
        status = path.stat()
        return cls(path, status.st_ino, status.st_size, status.st_mtime_ns)

    def fits(self, status: os.stat_result) -> bool:
        """Return whether the file is unchanged."""
        now = (status.st_ino, status.st_size, status.st_mtime_ns)
        return now == (self.inode, self.size, self.written_ns)

    def check(self, what: str) -> None:
        """Raise DataError if the file was written to. `what`: what is read of it."""
        try:
            status = self.path.stat()
        except OSError:  # deleted or away: what is open stays
            return
        if status.st_ino == self.inode and not self.fits(status):
            raise changed(f"{self.path} was written to while it was measured, at {what}")


def changed(how: str) -> DataError:
    """The error of samples that are no longer those that they were."""
    return DataError(
        f"{how}. What was computed belongs to no set of samples: measure again when no process "
        "writes there, or on a copy."
    )


SINGLE_NAME = "input"
"""Name of the only array of an `.npy` file, which carries no name itself."""

SUFFIXES = (".npy", ".npz")

_IMAGES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class Shard:
    """Named arrays that lie together, in memory or mapped, with the same number of samples each."""

    def __init__(self, arrays: Mapping[str, RowsArray], stamp: Stamp | None = None) -> None:
        """`stamp`: of the file that is mapped."""
        self.arrays = dict(arrays)
        self.stamp = stamp

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each array."""
        return {name: array.shape for name, array in self.arrays.items()}

    def check(self, what: str) -> None:
        """Raise DataError where the mapped file was written to since it was opened."""
        if self.stamp is not None:
            self.stamp.check(what)

    def rearranged(self, axes: Mapping[str, int | None]) -> Shard:
        """Return views of the arrays, with the samples on axis 0."""
        shapes = self.shapes
        count = max(
            (shapes[name][axis] for name, axis in axes.items() if axis is not None), default=1
        )
        views = {
            name: np.broadcast_to(array, (count, *array.shape))
            if (axis := axes[name]) is None
            else np.moveaxis(array, axis, 0)
            for name, array in self.arrays.items()
        }
        return Shard(views, self.stamp)


def open_shards(path: Path) -> list[Shard]:
    """Memory-map one file or every shard of a folder, in name order (pad numbers with zeros).

    Raises DataError for what is missing, unreadable, truncated, mixed or not an array;
    StorageError where there is no room to unpack an `.npz`.
    """
    if path.is_dir():
        return [open_shard(file) for file in shard_files(path)]
    _check_content(path)
    if not path.exists():
        raise DataError(
            f"{path} does not exist. Name a .npy or .npz file, a folder of them, or another source "
            "of samples: docs/data.md."
        )
    return [open_shard(path)]


def open_array(path: Path, *, name: str | None = None) -> RowsArray:
    """Memory-map one `.npy` file, read-only. `name`: what errors call it. Raises DataError."""
    _check_content(path)
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        reason = first_line(error, empty=type(error).__name__)
        raise DataError(
            f"cannot read {name or path.name} as a .npy array: {reason}. Expected a whole file of "
            "numbers as numpy.save writes it, without Python objects. "
            "Convert texts by x.astype(str); give calls of several shapes in a file for each shape."
        ) from error


def forget_pages(array: RowsArray) -> None:
    """Release the mapped pages of `array` to the system.

    Otherwise the pages that were read stay counted as memory of this process.
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
    """Return whether a file is a shard: not hidden, nor `_SUCCESS` or `_metadata`."""
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


def open_shard(path: Path) -> Shard:
    """Map one `.npy` or `.npz`. Raises as `open_shards`."""
    suffix = path.suffix.lower()
    if suffix == ".npy":
        array = open_array(path)
        return Shard({SINGLE_NAME: array}, Stamp.from_file(path))
    if suffix == ".npz":
        return Shard(open_npz(path))
    if suffix in _IMAGES:
        raise DataError(
            f"{path.name} is an image; arrays are expected. Preprocess it as the model wants it "
            "and save the result as .npy (samples on axis 0)."
        )
    raise DataError(
        f"{path.name} is no .npy or .npz file, nor another source of samples (docs/data.md). Save "
        "the samples with numpy.save."
    )


def open_npz(path: Path) -> dict[str, RowsArray]:
    """Map the members of an `.npz`, one array an input.

    They are unpacked to a temporary folder that is removed at once: the maps keep the bytes
    until they are dropped, so that nothing stays behind even if the process is killed.
    """
    _check_content(path)
    arrays: dict[str, RowsArray] = {}
    try:
        with (
            zipfile.ZipFile(path) as archive,
            temporary_folder() as folder,
        ):
            for number, member in enumerate(archive.infolist()):
                name = _member_name(path, member, taken=arrays)
                unpacked = Path(folder) / f"{number}.npy"
                _unpack(archive, member, unpacked)
                arrays[name] = open_array(unpacked, name=f"'{name}' of {path.name}")
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
    if (pointer := detect_pointer_file(path)) is not None:
        raise DataError(pointer)


def _member_name(path: Path, member: zipfile.ZipInfo, *, taken: dict[str, RowsArray]) -> str:
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


_LARGEST = np.iinfo(np.int64).max


def open_labels(path: Path, *, samples: int | None) -> NDArray[np.int64]:
    """Class indices of the samples, shape (samples,), from an integer `.npy` file. `samples`: None
    takes any number.

    Raises DataError on another length, rank or dtype, on negative labels and those beyond int64.
    """
    if path.suffix.lower() != ".npy":
        raise DataError(f"{path.name} is no .npy file. Save the labels with numpy.save.")
    labels = open_array(path)
    if samples is None and labels.ndim == 1:
        samples = len(labels)
    return np.array(check_labels(labels, samples=samples or 0))  # the file may change


def check_labels(labels: RowsArray, *, samples: int) -> NDArray[np.int64]:
    """`labels` as int64, shape (samples,), no copy if they are. Raises DataError if they don't fit
    the samples."""
    if labels.shape != (samples,):
        raise DataError(
            f"labels have shape {labels.shape}, the samples need ({samples},). "
            "Give one class index for each sample, in the same order."
        )
    return check_indices(labels, start=0)


def check_indices(labels: RowsArray, *, start: int) -> NDArray[np.int64]:
    """`labels` as int64, no copy if they are. `start`: the place of the first one's sample. Raises
    DataError."""
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"labels are {labels.dtype}, integers are expected. "
            "Give class indices, one for each sample."
        )
    given: NDArray[np.integer] = labels.view(np.ndarray)
    wrong = (given < 0) | (given > _LARGEST)
    if wrong.any():
        place = int(wrong.argmax())
        raise DataError(
            f"the label of sample {start + place} is {labels[place]}. "
            "Class indices start at 0, and are no larger than an int64."
        )
    return np.asarray(given, np.int64)


_CHUNK_BYTES = 1 << 24


class MappedRows(SampleReader):
    """Named arrays of bool, int, float or str, shape (samples, ...)."""

    def __init__(
        self, shards: Sequence[Shard], *, origin: str, labels: NDArray[np.int64] | None = None
    ) -> None:
        """`labels`: one of each sample.

        Several arrays of one shard may be in the layout of a model, with the samples on another
        axis or none: see `rearranged`. Raises DataError for what is no whole set of samples.
        """
        if not shards or not shards[0].arrays:
            raise DataError(f"{origin} holds no array. Give at least one array of samples.")
        for shard in shards:
            _check_shard(shard, shards[0], origin=origin)
        arrays = shards[0].arrays
        self._uneven = next(filter(None, (_uneven(shard, origin) for shard in shards)), None)
        if self._uneven is not None and (len(shards) > 1 or len(arrays) == 1):
            raise self._uneven
        self.origin = origin
        self.specs = tuple(
            spec_of(name, array.dtype, array.shape[1:]) for name, array in arrays.items()
        )
        self.labelled = labels is not None
        self._shards, self._labels = list(shards), labels
        if self._uneven is None:
            lengths = (len(shard.arrays[self.names[0]]) for shard in self._shards)
            self._ends = list(accumulate(lengths))

    def __len__(self) -> int:
        """Number of samples. Raises DataError where axis 0 is not the sample of every array."""
        if self._uneven is not None:
            raise self._uneven
        return self._ends[-1]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the whole array of each input."""
        if self._uneven is None:
            return super().shapes
        return self._shards[0].shapes

    def rearranged(self, axes: Mapping[str, int | None]) -> MappedRows:
        """Return views of the samples, with the samples on axis 0."""
        shards = [shard.rearranged(axes) for shard in self._shards]
        return MappedRows(shards, origin=self.origin, labels=self._labels)

    def read(self, places: Sequence[int]) -> Block:
        """The samples at these places."""
        labels = None if self._labels is None else np.array(self._labels[list(places)])
        if isinstance(places, range) and places.step == 1:
            span = (places.start, places.stop)
            return Block({name: self._rows(name, *span) for name in self.names}, labels)
        return Block(
            {
                name: np.concatenate([self._rows(name, place, place + 1) for place in places])
                for name in self.names
            },
            labels,
        )

    def column(self, name: str, places: range) -> Iterator[RowsArray]:
        """The rows of one input, without a look at the others."""
        (spec,) = (spec for spec in self.specs if spec.name == name)
        step = rows_within(_CHUNK_BYTES, [spec])
        for start in range(places.start, places.stop, step):
            yield self._rows(name, start, min(start + step, places.stop))

    def labels(self, places: range) -> NDArray[np.int64] | None:
        """Class indices of a range."""
        return None if self._labels is None else np.array(self._labels[places.start : places.stop])

    def _rows(self, name: str, start: int, stop: int) -> RowsArray:
        parts = []
        what = f"samples {start} to {stop - 1}" if stop - start > 1 else f"sample {start}"
        for number in range(bisect_right(self._ends, start), len(self._shards)):
            shard = self._shards[number]
            array = shard.arrays[name]
            begin = self._ends[number] - len(array)
            if begin >= stop:
                break
            shard.check(what)  # a map of a file that was cut off ends the process
            inside = array[max(start - begin, 0) : stop - begin]
            native = array.dtype.newbyteorder("=")
            parts.append(np.array(inside, dtype=native, order="C", subok=False))
            forget_pages(array)
            shard.check(what)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_shard(shard: Shard, first: Shard, *, origin: str) -> None:
    if list(shard.arrays) != list(first.arrays):
        raise DataError(
            f"shards of {origin} hold different arrays: {list(shard.arrays)} and "
            f"{list(first.arrays)}. Save every shard with the same names in the same order."
        )
    for name, array in shard.arrays.items():
        check_dtype(name, array.dtype, origin=origin)
        like = first.arrays[name]
        dtypes = (dtype_name(array.dtype), dtype_name(like.dtype))
        if len(set(dtypes)) > 1 or array.shape[1:] != like.shape[1:]:
            raise DataError(
                f"shards of {origin} differ in '{name}': {dtypes[0]} {array.shape[1:]} a sample, "
                f"elsewhere {dtypes[1]} {like.shape[1:]}. Save all shards alike."
            )
    if not any(math.prod(shape) for shape in shard.shapes.values()):
        name, shape = next(iter(shard.shapes.items()))
        raise DataError(
            f"'{name}' of {origin} has shape {shape}: nothing to measure. Give samples."
        )


def _uneven(shard: Shard, origin: str) -> DataError | None:
    """Return why axis 0 is not the sample of every array; None if it is."""
    for name, shape in shard.shapes.items():
        if not shape:
            return DataError(f"'{name}' of {origin} is a scalar. Axis 0 must be the samples.")
    lengths = {name: shape[0] for name, shape in shard.shapes.items()}
    if len(set(lengths.values())) > 1:
        return DataError(
            f"arrays of {origin} have different numbers of samples: {lengths}. "
            "Axis 0 is the sample and must be equal for all inputs."
        )
    return None


def check_dtype(name: str, dtype: np.dtype[np.generic], *, origin: str) -> None:
    """Raise DataError unless it is one that samples may have."""
    if dtype.kind != "U" and (dtype.kind not in "biuf" or dtype.itemsize > 8):
        raise DataError(
            f"'{name}' of {origin} has dtype {dtype}. Expected bool, integers, floats of at most "
            "64 bits, or texts (x.astype(str))."
        )


def as_texts(array: RowsArray) -> RowsArray:
    """Return an array of Python strings in NumPy's own dtype of texts; any other as it is."""
    if array.dtype.kind == "O" and all(isinstance(item, str) for item in array.flat):
        return array.astype(np.str_)
    return array
