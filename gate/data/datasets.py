"""A torch `Dataset` (map or iterable) as arrays; decode pictures."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from gate.data.array_files import SINGLE_NAME, MappedRows, Shard, as_texts, check_dtype
from gate.data.location import LABEL, Fields
from gate.data.reader import Block, SampleReader, spec_of
from gate.errors import DataError, ModelError, StorageError, first_line
from gate.preprocess.spec import PreprocessSpec
from gate.records.evidence import TensorSpec
from gate.storage.arrays import STRING, RowsArray, dtype_name

MAX_PIXELS = 89_478_485
"""Maximum size of a picture: above it, Pillow warns of decompression bombs."""

MAX_BYTES = 1 << 28
"""Maximum size of a picture's file."""

_BYTES, _PATH = "bytes", "path"


class PictureDecoder:
    """Converts a picture to the model's input."""

    def __init__(self, spec: PreprocessSpec | None) -> None:
        """Without a spec, `tensor` raises DataError."""
        self._spec = spec

    def takes_texts(self, name: str, fields: Fields) -> bool:
        """Return whether strings of this field are inputs, not paths of pictures: the user named
        the field as an input, and there is no spec."""
        return self._spec is None and name in (fields.inputs or ())

    def tensor(self, picture: Any, *, label: str) -> RowsArray:
        """Return the tensor of a PIL image, encoded bytes, a path, or {"bytes": ..., "path": ...}.

        Raises DataError for anything but a complete picture of at most MAX_PIXELS, and without a
        spec.
        """
        from gate.preprocess.implementations import pillow_preprocess

        if self._spec is None:
            raise DataError(
                f"{label} is a picture or a string; expected an array. For pictures, use "
                "--preprocessing SPEC. For strings, name the inputs: append #inputs=FIELD to the "
                "source."
            )
        return pillow_preprocess(_pixels(picture, label=label), self._spec)


def is_picture(value: Any) -> bool:
    """Return whether `tensor` accepts an item. A string is a path."""
    if isinstance(value, bytes | bytearray | memoryview | str | Path):
        return True
    if isinstance(value, Mapping):
        return set(value) == {_BYTES, _PATH}
    return _is_image(value)


def _pixels(picture: Any, *, label: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    from gate.preprocess.pictures import decoded

    if _is_image(picture):
        return _image_pixels(picture, label=label)
    if isinstance(picture, Mapping):
        picture = picture[_PATH] if picture[_BYTES] is None else picture[_BYTES]
    if isinstance(picture, str | Path):
        label = f"{label}, {picture},"
        data = _read_picture(Path(picture), label=label)
    else:
        data = bytes(picture)
    return decoded(data, name=label, max_pixels=MAX_PIXELS)


def _read_picture(path: Path, *, label: str) -> bytes:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{label} can't be read: {getattr(error, 'strerror', None) or error}. Paths are "
            "relative to the current folder."
        ) from error
    if len(data) > MAX_BYTES:
        raise DataError(f"{label} has more than {MAX_BYTES} bytes. Use a smaller picture.")
    return data


def _is_image(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # If it is not imported, there is no image.
    return pillow is not None and isinstance(value, pillow.Image)


def _image_pixels(image: Any, *, label: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if image.width * image.height > MAX_PIXELS:
        raise DataError(
            f"{label} has {image.width} x {image.height} pixels, the maximum is {MAX_PIXELS}. "
            "Use a smaller picture."
        )
    try:
        return np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:  # Pillow reads the file only here.
        raise DataError(
            f"{label} is not a complete picture ({first_line(error)}). Replace or remove it."
        ) from error


@dataclass(frozen=True)
class Sample:
    """One sample."""

    arrays: dict[str, RowsArray]
    """Arrays by input name, without a batch axis."""
    label: int | None


class ItemConverter:
    """Converts items to samples. All must have the names, dtypes and shapes of the first one.

    An item is a tensor or an array, `(x, label)`, or a mapping of arrays by input name. Pictures
    are preprocessed. Nothing is unpickled, and Python objects are refused.
    """

    def __init__(
        self, first: Any, fields: Fields, pictures: PictureDecoder, *, origin: str
    ) -> None:
        """Raises DataError."""
        self._fields, self._pictures, self._origin = fields, pictures, origin
        sample = self._sample(first, 0)
        self.labelled = sample.label is not None
        self.specs: tuple[TensorSpec, ...] = tuple(
            spec_of(name, array.dtype, array.shape) for name, array in sample.arrays.items()
        )

    def sample(self, item: Any, index: int) -> Sample:
        """Convert an item. Raises DataError if it differs from the first sample."""
        sample = self._sample(item, index)
        names = [spec.name for spec in self.specs]
        if sample.arrays.keys() != set(names):
            raise self._error(index, f"has {sorted(sample.arrays)}, sample 0 has {sorted(names)}")
        if (sample.label is not None) != self.labelled:
            labels = ("a label", "none") if sample.label is not None else ("no label", "one")
            raise self._error(index, f"has {labels[0]}, sample 0 has {labels[1]}")
        for spec in self.specs:
            array = sample.arrays[spec.name]
            if (dtype_name(array.dtype), array.shape) != (spec.dtype, spec.shape[1:]):
                raise self._error(
                    index,
                    f"has '{spec.name}' of {array.dtype} {array.shape}, sample 0 of "
                    f"{spec.dtype} {tuple(spec.shape[1:])}",
                )
        return sample

    def block(self, item: Callable[[int], Any], indices: Sequence[int]) -> Block:
        """Collate the samples with these indices, one by one: a list of small items would need many
        times the memory. `item`: returns the item at an index. Raises DataError."""
        arrays = {
            spec.name: np.empty(
                (len(indices), *map(int, spec.shape[1:])),
                object if spec.dtype == STRING else spec.dtype,
            )
            for spec in self.specs
        }
        labels = np.empty(len(indices), np.int64)
        for row, index in enumerate(indices):
            sample = self.sample(item(index), index)
            for name, array in arrays.items():
                array[row] = sample.arrays[name][()]
            if sample.label is not None:
                labels[row] = sample.label
        texts = {name: as_texts(array) for name, array in arrays.items()}
        return Block(texts, labels if self.labelled else None)

    def _sample(self, item: Any, index: int) -> Sample:
        label = None
        if isinstance(item, tuple | list) and len(item) in (1, 2):
            item, *rest = item
            has_label = rest and self._fields.label != ""
            label = self._label(rest[0], index) if has_label else None
        if isinstance(item, Mapping) and not is_picture(item):
            return self._mapping_sample(item, index, label)
        return Sample({SINGLE_NAME: self._array(item, SINGLE_NAME, index)}, label)

    def _mapping_sample(self, item: Mapping[Any, Any], index: int, label: int | None) -> Sample:
        names = [str(name) for name in item]
        inputs, field = self._fields.select(names)
        if field is not None and label is None:
            if _is_index(item[field]):
                label = self._label(item[field], index)
            elif self._fields.label is not None:
                raise self._error(index, f"has a label '{field}' that is not an integer")
            elif self._fields.inputs is None:  # A field named "label" that is an input.
                inputs = tuple(names)
        if not inputs:
            raise self._error(index, "has no input")
        return Sample({name: self._array(item[name], name, index) for name in inputs}, label)

    def _label(self, value: Any, index: int) -> int:
        if not _is_index(value):
            raise self._error(
                index,
                f"is a pair whose second item is {_describe(value)}, not a class index. Return "
                "several inputs as a dict by name, or append #label= to the source to ignore it",
            )
        label = int(value)
        if not 0 <= label <= np.iinfo(np.int64).max:
            raise self._error(
                index,
                f"has the label {label}: class indices start at 0 and fit into an int64. To use no "
                "labels, append #label= to the source",
            )
        return label

    def _array(self, value: Any, name: str, index: int) -> RowsArray:
        texts = self._pictures.takes_texts(name, self._fields)
        if is_picture(value) and not (texts and isinstance(value, str)):
            return self._pictures.tensor(value, label=f"sample {index} of {self._origin}")
        array = _as_array(value)
        if array is None:
            raise self._error(index, f"has {_describe(value)} as '{name}'")
        check_dtype(name, array.dtype, origin=f"sample {index} of {self._origin}")
        if not array.size:
            raise self._error(index, f"has '{name}' of shape {array.shape}: nothing to measure")
        return np.asarray(array, dtype=array.dtype.newbyteorder("="))

    def _error(self, index: int, problem: str) -> DataError:
        return DataError(
            f"sample {index} of {self._origin} {problem}. Expected the same form for all items: a "
            "tensor or an array of numbers, (x, label), or a dict of arrays by input name "
            f"('{LABEL}': its class index)."
        )


def call_user_code(call: Callable[[], Any], *, label: str) -> Any:
    """Call the user's code. Turns all errors but StopIteration into DataError."""
    try:
        return call()
    except (DataError, StopIteration):
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            f"{label} raised {type(error).__name__}: {error}. Fix the data set, or remove the "
            "sample."
        ) from error


def _as_array(value: Any) -> RowsArray | None:
    """Return an item as an array; None if a DataLoader would not collate it to a tensor."""
    if isinstance(value, np.ndarray | np.generic | bool | int | float | str):
        return as_texts(np.asarray(value))
    torch = sys.modules.get("torch")  # Not imported here: it takes 0.5 GB.
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            array: RowsArray = value.detach().cpu().resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError):  # NumPy does not support the dtype or layout.
            return None
        return array
    return None


def _is_index(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    array = value if isinstance(value, int) else _as_array(value)
    return isinstance(array, int) or (
        array is not None and array.shape == () and array.dtype.kind in "iu"
    )


def _describe(value: Any) -> str:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None:
        return f"{type(value).__name__} of {dtype} {tuple(shape)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


_RESERVED_BYTES = 1 << 26
"""Disk space that is left free. It is checked each time this many bytes were written."""

_NOTHING = object()


def spooled(
    data: Iterable[Any], make_converter: Callable[[Any], ItemConverter], *, origin: str
) -> MappedRows:
    """Copy the samples of an iterable to disk: its order may differ at each iteration.

    make_converter: takes the first item. Raises DataError if the items are not samples,
    StorageError if they do not fit into the temporary folder.
    """
    stream = _stream(data, origin)
    first = next(stream, _NOTHING)
    if first is _NOTHING:
        raise DataError(f"{origin} returned no sample: nothing to measure. Add samples.")
    items = make_converter(first)
    if any(spec.dtype == STRING for spec in items.specs):
        raise DataError(
            f"{origin} is an iterable of strings, which can't be spooled to disk. Save them as an "
            "array (.npy, .npz) or Parquet, or use a data set with __len__ and __getitem__."
        )
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(tempfile.TemporaryFile()) for _ in items.specs]
            labels = opened.enter_context(tempfile.TemporaryFile())
            count = unchecked = 0
            for count, item in enumerate(chain([first], stream), start=1):
                sample = items.sample(item, count - 1)
                for spec, file in zip(items.specs, files, strict=True):
                    unchecked += file.write(sample.arrays[spec.name].tobytes())
                if sample.label is not None:
                    labels.write(np.int64(sample.label).tobytes())
                if unchecked > _RESERVED_BYTES:
                    unchecked = 0
                    _require_space(count)
            arrays = {
                spec.name: _map(file, spec.dtype, (count, *spec.shape[1:]))
                for spec, file in zip(items.specs, files, strict=True)
            }
            indices = _map(labels, "int64", (count,)).astype(np.int64) if items.labelled else None
        except OSError as error:
            raise StorageError(
                f"cannot spool the samples of {origin}: {error.strerror or error}. {_REMEDY}"
            ) from error
    return MappedRows([Shard(arrays)], origin=origin, labels=indices)


_REMEDY = (
    "An iterable is copied to disk once; check that it ends. Free space, set TMPDIR, or use a data "
    "set with __len__ and __getitem__, Parquet or .tar shards, which are not copied."
)


def _require_space(count: int) -> None:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < _RESERVED_BYTES:
        raise StorageError(
            f"not enough space to spool samples to {tempfile.gettempdir()} after {count} of them: "
            f"{free} bytes are free. {_REMEDY}"
        )


def _map(file: IO[bytes], dtype: str, shape: tuple[Any, ...]) -> RowsArray:
    file.flush()
    return np.memmap(file, np.dtype(dtype), mode="r", shape=shape)


def _stream(data: Iterable[Any], origin: str) -> Iterator[Any]:
    stream = call_user_code(lambda: iter(data), label=f"the iterable of {origin}")
    index = 0
    while True:
        try:
            item = call_user_code(lambda: next(stream), label=f"sample {index} of {origin}")
        except StopIteration:
            return
        yield item
        index += 1


_EXPECTED = (
    "a callable without arguments that returns a torch.utils.data.Dataset, a sequence, or an "
    "iterable of samples"
)


def rows_of_factory(factory: str, fields: Fields, pictures: PictureDecoder) -> SampleReader:
    """Return the samples of `package.module:factory`. Raises DataError, StorageError."""
    from torch.utils.data import DataLoader

    from gate.model.loading import call_factory

    try:
        data = call_factory(factory, expected=_EXPECTED)
    except ModelError as error:
        raise DataError(str(error)) from error
    if isinstance(data, DataLoader | Mapping | str | bytes):
        raise DataError(
            f"{factory} returned a {type(data).__name__}, expected single samples. "
            "Return the data set itself, or a list of samples."
        )
    if not (hasattr(data, "__getitem__") or hasattr(data, "__iter__")):
        raise DataError(f"{factory} returned {type(data).__name__}, expected {_EXPECTED}.")
    return rows_of_data(data, fields, pictures, origin=factory)


def rows_of_data(
    data: Any, fields: Fields, pictures: PictureDecoder, *, origin: str
) -> SampleReader:
    """Return the samples of a data set, a sequence, an iterable or a DataLoader, whose batches are
    split. Raises DataError, StorageError."""
    from torch.utils.data import DataLoader, IterableDataset

    make_converter = partial(ItemConverter, fields=fields, pictures=pictures, origin=origin)
    if isinstance(data, DataLoader):
        # Without automatic batching it yields single samples.
        items = data if data.batch_size is None and data.batch_sampler is None else _rows(data)
        return spooled(items, make_converter, origin=origin)
    is_indexed = hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
    count = _length(data, origin) if is_indexed else None
    if count is not None:
        return DatasetReader(data, count, make_converter, origin=origin)
    return spooled(data, make_converter, origin=origin)


def _rows(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the samples of collated batches: axis 0 of every tensor is the batch axis."""
    for batch in batches:
        if isinstance(batch, Mapping):
            columns = list(batch.values())
            for row in zip(*columns, strict=True):
                yield dict(zip(batch, row, strict=True))
        elif isinstance(batch, tuple | list):
            yield from zip(*batch, strict=True)
        else:
            yield from batch


class DatasetReader(SampleReader):
    """Reads items of a data set by index, each when it is needed."""

    def __init__(
        self, data: Any, count: int, make_converter: Callable[[Any], ItemConverter], *, origin: str
    ) -> None:
        """`make_converter`: takes the first item. Raises DataError."""
        if count < 1:
            raise DataError(f"{origin} has {count} samples: nothing to measure. Add samples.")
        self.origin = origin
        self._data, self._count = data, count
        self._items = make_converter(self._item(0))
        self.specs, self.labelled = self._items.specs, self._items.labelled

    def __len__(self) -> int:
        return self._count

    def read(self, indices: Sequence[int]) -> Block:
        """Return the samples with these indices."""
        return self._items.block(self._item, indices)

    def _item(self, index: int) -> Any:
        label = f"sample {index} of {self.origin}"
        try:
            return call_user_code(lambda: self._data[index], label=label)
        except StopIteration as error:
            raise DataError(f"{label} raised StopIteration. Fix the data set.") from error


def _length(data: Any, origin: str) -> int | None:
    """Return the length, or None if the data set does not define one."""
    if not hasattr(data, "__len__"):
        return None
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
    except Exception as error:
        raise DataError(
            f"len() of {origin} raised {type(error).__name__}: {error}. Fix the data set."
        ) from error
