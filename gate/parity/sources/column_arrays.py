"""One column of Arrow as an array with the samples on axis 0, or as pictures."""

from __future__ import annotations

from typing import Any

import numpy as np

from gate.errors import DataError
from gate.parity.arrays.labels import check_indices
from gate.parity.arrays.mapped import check_dtype
from gate.parity.arrays.rows import Array
from gate.parity.sources.pictures import Pictures, is_picture

_PICTURE_FIELDS = {"bytes", "path"}


def is_picture_column(kind: Any) -> bool:
    """Whether a column of this type may hold pictures: bytes, texts, or structs of both, as
    Hugging Face writes them."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return {field.name for field in kind} == _PICTURE_FIELDS
    return any(
        of(kind)
        for of in (
            pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary,
            pa.types.is_string, pa.types.is_large_string,
        )
    )  # fmt: skip


def numbers(column: Any, *, name: str, start: int) -> Array:
    """The values of a `pyarrow.Array`: primitives, (fixed-size) lists of them, or tensors.

    `start`: the place of its first sample, which errors go by. Raises DataError for nulls, ragged
    lists, and what is no number.
    """
    array = _numbers(column, name, np.arange(start, start + len(column)))
    check_dtype(name, array.dtype, origin=f"the column of sample {start}")
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def indices(column: Any, *, name: str, start: int) -> Array:
    """The labels of a column. Raises DataError."""
    try:
        return check_indices(numbers(column, name=name, start=start), start=start)
    except DataError as error:
        raise DataError(f"{error} #label= behind the source leaves labels out.") from error


def picture_tensors(column: Any, *, name: str, start: int, pictures: Pictures) -> Array:
    """The model's inputs of a column of pictures. Raises DataError."""
    tensors: list[Array] = []
    for place, value in enumerate(column, start):
        picture = value.as_py()
        if picture is None or not is_picture(picture):
            raise DataError(f"sample {place} has no picture in '{name}'. Leave it out.")
        tensor = pictures.tensor(picture, what=f"'{name}' of sample {place}")
        if tensors and tensor.shape != tensors[0].shape:
            raise _ragged(name, place, str(tensor.shape), str(tensors[0].shape))
        tensors.append(tensor)
    return np.stack(tensors)


def _numbers(column: Any, name: str, places: Array) -> Array:
    """`places`: of the sample that each element belongs to."""
    import pyarrow as pa

    kind = column.type
    if column.null_count:
        empty = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(
            f"sample {places[empty]} has no value in '{name}'. Fill it, or leave the sample out."
        )
    if isinstance(kind, pa.FixedShapeTensorType):
        _numbers(column.storage, name, places)  # which finds empty values
        array: Array = column.to_numpy_ndarray()
        return array
    if isinstance(kind, pa.BaseExtensionType):
        return _numbers(column.storage, name, places)
    if pa.types.is_dictionary(kind):
        return _numbers(column.dictionary_decode(), name, places)
    if pa.types.is_fixed_size_list(kind):
        return _inner(column, kind.list_size, name, places)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if len(set(lengths)) > 1:
            other = int(np.argmax(lengths != lengths[0]))
            raise _ragged(name, places[other], str(lengths[other]), str(lengths[0]))
        return _inner(column, int(lengths[0]), name, places)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        values: Array = column.to_numpy(zero_copy_only=False)
        return values
    raise DataError(
        f"column '{name}' holds {kind}; numbers, lists of them or tensors are expected. Name the "
        "columns that are inputs: #inputs=COLUMN,COLUMN&label=COLUMN behind the source."
    )


def _inner(column: Any, size: int, name: str, places: Array) -> Array:
    if size == 0:
        raise DataError(f"sample {places[0]} has an empty list in '{name}': nothing to measure.")
    values = _numbers(column.flatten(), name, np.repeat(places, size))
    return values.reshape(len(column), size, *values.shape[1:])


def _ragged(name: str, place: int, shape: str, first: str) -> DataError:
    return DataError(
        f"'{name}' of sample {place} has shape {shape}, of the samples before it {first}. Give all "
        "samples one shape: pad, crop or resize them."
    )
