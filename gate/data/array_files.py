"""Memory-mapped `.npy`, `.npz` and folders of shards; label files."""

from __future__ import annotations

import math
import mmap
import shutil
import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gate.data.location import Stamp, check_kinds, is_shard, unexpected_file
from gate.data.reader import Block, SampleReader, rows_within, spec_of
from gate.errors import DataError, StorageError, first_line
from gate.storage.arrays import RowsArray, dtype_name
from gate.storage.files import temporary_folder
from gate.storage.untrusted_files import detect_pointer_file

SINGLE_NAME = "input"
"""Input name of the array of an `.npy` file, which has no name."""

SUFFIXES = (".npy", ".npz")

_IMAGES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class Shard:
    """The named arrays of one file or mapping, with the same number of samples each."""

    def __init__(self, arrays: Mapping[str, RowsArray], stamp: Stamp | None = None) -> None:
        """`stamp`: stamp of the mapped file."""
        self.arrays = dict(arrays)
        self.stamp = stamp

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each array."""
        return {name: array.shape for name, array in self.arrays.items()}

    def check(self, position: str) -> None:
        """Raise DataError if the mapped file was written to since it was opened."""
        if self.stamp is not None:
            self.stamp.check(position)

    def rearranged(self, axes: Mapping[str, int | None]) -> Shard:
        """Return views of the arrays with the batch axis on axis 0."""
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

    Raises DataError for files that are missing, unreadable, truncated, mixed or not arrays;
    StorageError if there is not enough space to unpack an `.npz`.
    """
    if path.is_dir():
        return [open_shard(file) for file in shard_files(path)]
    _check_content(path)
    if not path.exists():
        raise DataError(
            f"{path} does not exist. Name a .npy or .npz file, a folder of them, or another source "
            "of samples (docs/data.md)."
        )
    return [open_shard(path)]


def open_array(path: Path, *, name: str | None = None) -> RowsArray:
    """Memory-map one `.npy` file, read-only. `name`: its name in errors. Raises DataError."""
    _check_content(path)
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        reason = first_line(error, empty=type(error).__name__)
        raise DataError(
            f"cannot read {name or path.name} as a .npy array: {reason}. Expected a complete file "
            "of numbers as numpy.save writes it, without Python objects. "
            "Convert strings with x.astype(str); save calls of different shapes to separate files."
        ) from error


def forget_pages(array: RowsArray) -> None:
    """Release the mapped pages of `array`, which otherwise count as memory of this process."""
    mapping = array.base
    if isinstance(mapping, mmap.mmap) and hasattr(mapping, "madvise"):
        mapping.madvise(mmap.MADV_DONTNEED)


def shard_files(folder: Path, *, kinds: Sequence[str] = SUFFIXES) -> list[Path]:
    """Return the files of a folder of shards in the order of their names.

    kinds: allowed suffixes. Raises DataError for other files or more than one suffix.
    """
    files = sorted(file for file in folder.iterdir() if is_shard(file.name, kinds=kinds))
    if any(file.suffix.lower() in _IMAGES for file in folder.rglob("*")):
        raise DataError(
            f"{folder} contains images; expected arrays. Preprocess them for the model and save "
            "the result as .npy (samples on axis 0), or use a data set that lists them with a "
            "preprocessing spec (docs/data.md)."
        )
    folders = [file for file in files if not file.is_file()]
    if folders:
        raise unexpected_file(folder, folders[0].name)
    check_kinds([file.name for file in files], origin=str(folder), kinds=kinds)
    return files


def open_shard(path: Path) -> Shard:
    """Map one `.npy` or `.npz` file. Raises the exceptions of `open_shards`."""
    suffix = path.suffix.lower()
    if suffix == ".npy":
        array = open_array(path)
        return Shard({SINGLE_NAME: array}, Stamp.from_file(path))
    if suffix == ".npz":
        return Shard(open_npz(path))
    if suffix in _IMAGES:
        raise DataError(
            f"{path.name} is an image; expected arrays. Preprocess it for the model and save the "
            "result as .npy (samples on axis 0)."
        )
    raise DataError(
        f"{path.name} is not a .npy or .npz file or another source of samples (docs/data.md). Save "
        "the samples with numpy.save."
    )


def open_npz(path: Path) -> dict[str, RowsArray]:
    """Map the members of an `.npz`, one array for each input.

    They are unpacked to a temporary folder that is removed at once. The mappings keep the content,
    and no file is left even if the process is killed.
    """
    _check_content(path)
    arrays: dict[str, RowsArray] = {}
    try:
        with (
            zipfile.ZipFile(path) as archive,
            temporary_folder() as folder,
        ):
            for number, member in enumerate(archive.infolist()):
                name = _member_name(path, member, arrays=arrays)
                unpacked = Path(folder) / f"{number}.npy"
                _unpack(archive, member, unpacked)
                arrays[name] = open_array(unpacked, name=f"'{name}' of {path.name}")
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, NotImplementedError) as error:
        raise DataError(
            f"cannot read {path.name} as .npz: {error}. Expected a complete file as numpy.savez "
            "writes it; save it again."
        ) from error
    except RuntimeError as error:  # An encrypted member.
        raise DataError(f"cannot read {path.name}: {error}. Save it without a password.") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}.") from error
    if not arrays:
        raise DataError(f"{path.name} has no array. Save one array for each input of the model.")
    return arrays


def _check_content(path: Path) -> None:
    if (pointer := detect_pointer_file(path)) is not None:
        raise DataError(pointer)


def _member_name(path: Path, member: zipfile.ZipInfo, *, arrays: dict[str, RowsArray]) -> str:
    name = member.filename.removesuffix(".npy")
    if name == member.filename or name in arrays:
        raise DataError(
            f"{path.name} contains '{member.filename}', which is not an array or occurs twice. "
            "Expected one .npy member for each input, as numpy.savez writes it."
        )
    return name


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    free = shutil.disk_usage(target.parent).free
    if member.file_size > free:
        raise StorageError(
            f"not enough space to unpack '{member.filename}' ({member.file_size} bytes) to "
            f"{target.parent}: {free} bytes are free. Free space, set TMPDIR, or use .npy files."
        )
    import zlib

    try:
        with archive.open(member) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except zlib.error as error:
        raise zipfile.BadZipFile(str(error)) from error


_LARGEST = np.iinfo(np.int64).max


def open_labels(path: Path, *, samples: int | None) -> NDArray[np.int64]:
    """Read class indices, shape (samples,), from an integer `.npy` file.

    samples: expected number; None accepts any. Raises DataError for another length, rank or dtype,
    and for labels that are negative or beyond int64.
    """
    if path.suffix.lower() != ".npy":
        raise DataError(
            f"{path.name} is not a .npy file. Save class labels with numpy.save; other labels are "
            "for the metrics of a policy (--policy)."
        )
    labels = open_array(path)
    if samples is None and labels.ndim == 1:
        samples = len(labels)
    return np.array(check_labels(labels, samples=samples or 0))  # A copy: the file may change.


def check_labels(labels: RowsArray, *, samples: int) -> NDArray[np.int64]:
    """Return `labels` as int64, shape (samples,), without a copy if possible. Raises DataError if
    they don't fit the samples."""
    if labels.shape != (samples,):
        raise DataError(
            f"labels have shape {labels.shape}, expected ({samples},). "
            "Save one class index for each sample, in the same order."
        )
    return check_indices(labels, start=0)


def check_indices(labels: RowsArray, *, start: int) -> NDArray[np.int64]:
    """Return `labels` as int64, without a copy if possible. `start`: index of the first sample.
    Raises DataError."""
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"labels are {labels.dtype}, expected integers. Save one class index for each sample."
        )
    values: NDArray[np.integer] = labels.view(np.ndarray)
    invalid = (values < 0) | (values > _LARGEST)
    if invalid.any():
        row = int(invalid.argmax())
        raise DataError(
            f"the label of sample {start + row} is {labels[row]}. "
            "Class indices start at 0 and must fit into an int64."
        )
    return np.asarray(values, np.int64)


_CHUNK_BYTES = 1 << 24


class MappedRows(SampleReader):
    """Reads mapped arrays of bool, int, float or str, shape (samples, ...)."""

    def __init__(
        self, shards: Sequence[Shard], *, origin: str, labels: NDArray[np.int64] | None = None
    ) -> None:
        """`labels`: shape (samples,).

        The arrays of a single shard may be in the layout of a model, with the batch axis elsewhere
        or without one (`rearranged`). Raises DataError if the shards are not a set of samples.
        """
        if not shards or not shards[0].arrays:
            raise DataError(f"{origin} has no array. Save at least one array of samples.")
        for shard in shards:
            _check_shard(shard, shards[0], origin=origin)
        arrays = shards[0].arrays
        errors = filter(None, (_length_error(shard, origin) for shard in shards))
        self._length_error = next(errors, None)
        if self._length_error is not None and (len(shards) > 1 or len(arrays) == 1):
            raise self._length_error
        self.origin = origin
        self.specs = tuple(
            spec_of(name, array.dtype, array.shape[1:]) for name, array in arrays.items()
        )
        self.labelled = labels is not None
        self._shards, self._labels = list(shards), labels
        if self._length_error is None:
            lengths = (len(shard.arrays[self.names[0]]) for shard in self._shards)
            self._ends = list(accumulate(lengths))

    def __len__(self) -> int:
        """Return the number of samples. Raises DataError if axis 0 is not the batch axis yet."""
        if self._length_error is not None:
            raise self._length_error
        return self._ends[-1]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the whole array of each input."""
        if self._length_error is None:
            return super().shapes
        return self._shards[0].shapes

    def rearranged(self, axes: Mapping[str, int | None]) -> MappedRows:
        """Return the same samples with the batch axis on axis 0, without a copy."""
        shards = [shard.rearranged(axes) for shard in self._shards]
        return MappedRows(shards, origin=self.origin, labels=self._labels)

    def read(self, indices: Sequence[int]) -> Block:
        """Return the samples with these indices."""
        labels = None if self._labels is None else np.array(self._labels[list(indices)])
        if isinstance(indices, range) and indices.step == 1:
            span = (indices.start, indices.stop)
            return Block({name: self._rows(name, *span) for name in self.names}, labels)
        return Block(
            {
                name: np.concatenate([self._rows(name, index, index + 1) for index in indices])
                for name in self.names
            },
            labels,
        )

    def column(self, name: str, indices: range) -> Iterator[RowsArray]:
        """Yield the rows of one input, in chunks. Reads no other input."""
        (spec,) = (spec for spec in self.specs if spec.name == name)
        step = rows_within(_CHUNK_BYTES, [spec])
        for start in range(indices.start, indices.stop, step):
            yield self._rows(name, start, min(start + step, indices.stop))

    def labels(self, indices: range) -> NDArray[np.int64] | None:
        """Return the class indices of a range."""
        return (
            None if self._labels is None else np.array(self._labels[indices.start : indices.stop])
        )

    def _rows(self, name: str, start: int, stop: int) -> RowsArray:
        parts = []
        position = f"samples {start} to {stop - 1}" if stop - start > 1 else f"sample {start}"
        for number in range(bisect_right(self._ends, start), len(self._shards)):
            shard = self._shards[number]
            array = shard.arrays[name]
            begin = self._ends[number] - len(array)
            if begin >= stop:
                break
            shard.check(position)  # Reading a mapping of a truncated file would end the process.
            rows = array[max(start - begin, 0) : stop - begin]
            native = array.dtype.newbyteorder("=")
            parts.append(np.array(rows, dtype=native, order="C", subok=False))
            forget_pages(array)
            shard.check(position)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_shard(shard: Shard, first: Shard, *, origin: str) -> None:
    if list(shard.arrays) != list(first.arrays):
        raise DataError(
            f"shards of {origin} have different arrays: {list(shard.arrays)} and "
            f"{list(first.arrays)}. Save every shard with the same names in the same order."
        )
    for name, array in shard.arrays.items():
        check_dtype(name, array.dtype, origin=origin)
        expected = first.arrays[name]
        dtypes = (dtype_name(array.dtype), dtype_name(expected.dtype))
        if len(set(dtypes)) > 1 or array.shape[1:] != expected.shape[1:]:
            raise DataError(
                f"shards of {origin} differ in '{name}': a sample is {dtypes[0]} "
                f"{array.shape[1:]}, in another shard {dtypes[1]} {expected.shape[1:]}. Save all "
                "shards with the same dtypes and shapes."
            )
    if not any(math.prod(shape) for shape in shard.shapes.values()):
        name, shape = next(iter(shard.shapes.items()))
        raise DataError(f"'{name}' of {origin} has shape {shape}: nothing to measure. Add samples.")


def _length_error(shard: Shard, origin: str) -> DataError | None:
    """Return why axis 0 can't be the batch axis of every array, or None."""
    for name, shape in shard.shapes.items():
        if not shape:
            return DataError(f"'{name}' of {origin} is a scalar. Axis 0 must be the batch axis.")
    lengths = {name: shape[0] for name, shape in shard.shapes.items()}
    if len(set(lengths.values())) > 1:
        return DataError(
            f"arrays of {origin} have different numbers of samples: {lengths}. "
            "Axis 0 is the batch axis and must have the same length in all arrays."
        )
    return None


def check_dtype(name: str, dtype: np.dtype[np.generic], *, origin: str) -> None:
    """Raise DataError unless samples may have this dtype."""
    if dtype.kind != "U" and (dtype.kind not in "biuf" or dtype.itemsize > 8):
        raise DataError(
            f"'{name}' of {origin} has dtype {dtype}. Expected bool, integers, floats of at most "
            "64 bits, or strings (x.astype(str))."
        )


def as_texts(array: RowsArray) -> RowsArray:
    """Convert an array of Python strings to NumPy's string dtype; return others unchanged."""
    if array.dtype.kind == "O" and all(isinstance(item, str) for item in array.flat):
        return array.astype(np.str_)
    return array
