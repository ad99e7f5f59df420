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


_FORMAT = np.lib.format
_READERS = {(1, 0): _FORMAT.read_array_header_1_0, (2, 0): _FORMAT.read_array_header_2_0}


def npy_array(data: bytes, *, name: str) -> RowsArray:
    """Return the array in `.npy` bytes, without a copy or pickle. Raises DataError unless the size
    matches the header."""
    stream = io.BytesIO(data)
    try:
        version = _FORMAT.read_magic(stream)
        shape, fortran, dtype = _READERS[version](stream)
    except (ValueError, KeyError, SyntaxError, EOFError, TypeError) as error:
        raise DataError(
            f"cannot read {name} as a .npy array: {first_line(error, empty=type(error).__name__)}. "
            "Expected a complete file as numpy.save writes it."
        ) from error
    rest = memoryview(data)[stream.tell() :]
    expected = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or len(rest) != expected:
        content = "Python objects" if dtype.hasobject else f"{expected} bytes of numbers"
        raise DataError(
            f"the header of {name} declares {content}, but {len(rest)} bytes follow. Expected a "
            "complete array of numbers as numpy.save writes it, without Python objects."
        )
    values = np.frombuffer(rest, dtype)
    return values.reshape(shape, order="F" if fortran else "C")


OutputArray = NDArray[np.generic]


RuntimeArray = NDArray[Any]

STRING = "string"
"""Name of the dtype of strings of any length."""


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype for records."""
    return STRING if dtype.kind == "U" else dtype.name


def value_bytes(array: OutputArray) -> memoryview | bytes:
    """Return the values of an array for a digest: little-endian numbers, or strings in UTF-8,
    independent of the itemsize of the dtype."""
    if array.dtype.kind == "U":
        texts = [str(text).encode("utf-8", "surrogatepass") for text in array.ravel()]
        return b"".join(len(text).to_bytes(8, "little") + text for text in texts)
    return little_endian(array).reshape(-1).view(np.uint8).data


def text_digests(array: RuntimeArray) -> RuntimeArray:
    """Replace strings by 48 bits of their SHA-256, as uint64 (exact in float64), in the same shape.
    Arrays of other types are returned unchanged."""
    if array.dtype.kind not in "OU" or not all(isinstance(text, str) for text in array.flat):
        return array
    numbers = {
        text: int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:6])
        for text in set(array.flat)
    }
    return np.array([numbers[text] for text in array.flat], np.uint64).reshape(array.shape)


def little_endian(array: RuntimeArray) -> RuntimeArray:
    """Return an array in C order and little-endian, with a copy only if needed."""
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


HALF = ("float16", "bfloat16")
"""Names of the dtypes of files in reduced precision."""


def rounded(array: OutputArray, half: str) -> RuntimeArray:
    """Convert floats to the dtype `half`, one of `HALF`. Finite values beyond its range are clipped
    to it."""
    array = array.astype(np.float32) if array.dtype.itemsize < 4 else array
    clipped = np.where(np.isinf(array), array, np.clip(array, -largest(half), largest(half)))
    return clipped.astype(half_dtype(half))


def largest(half: str) -> float:
    """Return the largest finite number of a dtype of `HALF`."""
    import ml_dtypes

    return float(ml_dtypes.finfo(half_dtype(half)).max)  # type: ignore[no-untyped-call]


def half_dtype(half: str) -> np.dtype[Any]:
    """Return the dtype for a name in `HALF`. NumPy itself lacks bfloat16."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, half, half))


def resized(array: RuntimeArray, axis: int, size: int) -> RuntimeArray:
    """Truncate or repeat an array along an axis. An empty one, such as an initial cache, is filled
    with zeros."""
    if array.shape[axis] == 0:
        return np.zeros((*array.shape[:axis], size, *array.shape[axis + 1 :]), array.dtype)
    return np.ascontiguousarray(array.take(np.arange(size) % array.shape[axis], axis=axis))


def whole_batches(count: int, size: int) -> NDArray[np.int64]:
    """Return the indices of `count` samples, shape (batches, size). The last sample fills up the
    last batch."""
    return np.minimum(np.arange(-(-count // size) * size), count - 1).reshape(-1, size)


Batch = Mapping[str, RuntimeArray]
"""Arrays by name, shape (batch, ...)."""

Pixels = NDArray[np.uint8]
"""A picture, RGB, shape (height, width, 3)."""

Tensor = NDArray[np.generic]
"""A model input of one picture, without a batch axis."""
