"""Array types; read untrusted `.npy` bytes without pickle."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError, first_line

RowsArray = NDArray[np.generic]


# Nothing is unpickled, and no array is read whole.
_FORMAT = np.lib.format
_READERS = {(1, 0): _FORMAT.read_array_header_1_0, (2, 0): _FORMAT.read_array_header_2_0}


def npy_array(data: bytes, *, name: str) -> RowsArray:
    """The array. Raises DataError unless the bytes are exactly those that the header says, before
    memory is taken for them."""
    stream = io.BytesIO(data)
    try:
        version = _FORMAT.read_magic(stream)
        shape, fortran, dtype = _READERS[version](stream)
    except (ValueError, KeyError, SyntaxError, EOFError, TypeError) as error:
        raise DataError(
            f"cannot read {name} as a .npy array: {first_line(error, empty=type(error).__name__)}. "
            "Expected a whole file as numpy.save writes it."
        ) from error
    rest = memoryview(data)[stream.tell() :]
    wanted = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or len(rest) != wanted:
        what = "Python objects" if dtype.hasobject else f"{wanted} bytes of numbers"
        raise DataError(
            f"{name} says that it holds {what}, and has {len(rest)} bytes. Expected a whole array "
            "of numbers as numpy.save writes it, without Python objects."
        )
    values = np.frombuffer(rest, dtype)
    return values.reshape(shape, order="F" if fortran else "C")


OutputArray = NDArray[np.generic]


RuntimeArray = NDArray[Any]

STRING = "string"
"""Name of the dtype of texts, whatever their length."""


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype as records have it."""
    return STRING if dtype.kind == "U" else dtype.name


def value_bytes(array: OutputArray) -> memoryview | bytes:
    """Return the values of an array for a digest: little-endian numbers, or texts in UTF-8 that do
    not depend on the length that the array allows."""
    if array.dtype.kind == "U":
        texts = [str(text).encode("utf-8", "surrogatepass") for text in array.ravel()]
        return b"".join(len(text).to_bytes(8, "little") + text for text in texts)
    return little_endian(array).reshape(-1).view(np.uint8).data


def text_digests(array: RuntimeArray) -> RuntimeArray:
    """Return texts as 48 bits of their SHA-256, as uint64 that float64 holds exactly, in the same
    shape. Arrays of other types stay as they are."""
    if array.dtype.kind not in "OU" or not all(isinstance(text, str) for text in array.flat):
        return array
    numbers = {
        text: int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:6])
        for text in set(array.flat)
    }
    return np.array([numbers[text] for text in array.flat], np.uint64).reshape(array.shape)


def little_endian(array: RuntimeArray) -> RuntimeArray:
    """Return an array in C order and little-endian; a copy only where it is not so already."""
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


HALF = ("float16", "bfloat16")
"""Names of the dtypes that files in reduced precision take and return."""


def rounded(array: OutputArray, half: str) -> RuntimeArray:
    """Return an array of floats in the dtype `half`, one of `HALF`. Numbers beyond its range
    become its largest ones."""
    array = array.astype(np.float32) if array.dtype.itemsize < 4 else array
    kept = np.where(np.isinf(array), array, np.clip(array, -largest(half), largest(half)))
    return kept.astype(half_dtype(half))


def largest(half: str) -> float:
    """Return the largest finite number of a dtype of `HALF`."""
    import ml_dtypes

    return float(ml_dtypes.finfo(half_dtype(half)).max)  # type: ignore[no-untyped-call]


def half_dtype(half: str) -> np.dtype[Any]:
    """Return the dtype of a name of `HALF`, of which NumPy knows one only."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, half, half))


def resized(array: RuntimeArray, axis: int, size: int) -> RuntimeArray:
    """Return the array cut off or repeated along an axis; with zeros where it is empty, as a cache
    is at first."""
    if array.shape[axis] == 0:
        return np.zeros((*array.shape[:axis], size, *array.shape[axis + 1 :]), array.dtype)
    return np.ascontiguousarray(array.take(np.arange(size) % array.shape[axis], axis=axis))


Batch = Mapping[str, RuntimeArray]
"""Arrays by name, shape (batch, ...)."""

Pixels = NDArray[np.uint8]
"""A picture, RGB, shape (height, width, 3)."""

Tensor = NDArray[np.generic]
"""The model's input for one picture, without the batch axis."""
