"""Arrays as bytes between Python and the page: a header as JSON, then the numbers as they lie in
memory. `page.mjs` has the other side.

Four bytes with the header's length, the header ([name, dtype, shape, bytes] each), then the arrays,
each from a multiple of eight bytes on, so that the page can look at them without a copy.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping

import numpy as np

from gate.errors import EvidenceError, OutputMismatch
from gate.runtimes.runtime import Array

DTYPES = frozenset(
    {
        "float16", "float32", "float64", "bool", "int8", "uint8", "int16", "uint16", "int32",
        "uint32", "int64", "uint64",
    }
)  # fmt: skip
"""By the names of numpy, which are those of onnxruntime-web."""
_ALIGNED = 8
_LENGTH = struct.Struct("<I")


def pack(arrays: Mapping[str, Array]) -> bytes:
    """Raises EvidenceError for a dtype that a page has no array for."""
    header = []
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise EvidenceError(
                f"'{name}' is {array.dtype.name}: a page has no array for that. It takes "
                f"{', '.join(sorted(DTYPES))}."
            )
        header.append([name, array.dtype.name, list(array.shape), array.nbytes])
    text = json.dumps(header).encode()
    text += b" " * _padding(_LENGTH.size + len(text))
    parts = [_LENGTH.pack(len(text)), text]
    for array in arrays.values():
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        parts += [little.tobytes(), b"\0" * _padding(array.nbytes)]
    return b"".join(parts)


def unpack(frame: bytes) -> dict[str, Array]:
    """Arrays by name, in order. Raises OutputMismatch for what is no frame."""
    try:
        (length,) = _LENGTH.unpack_from(frame)
        start, arrays = _LENGTH.size + length, {}
        for name, dtype, shape, size in json.loads(frame[_LENGTH.size : start]):
            if dtype not in DTYPES:
                raise ValueError(f"'{name}' is {dtype}")
            kind = np.dtype(dtype).newbyteorder("<")
            fits = min(shape, default=0) >= 0 and size == math.prod(shape) * kind.itemsize
            if not fits or start + size > len(frame):
                raise ValueError(f"'{name}' of shape {shape} came as {size} bytes of {dtype}")
            array = np.frombuffer(frame, kind, math.prod(shape), start).reshape(shape)
            arrays[str(name)] = array.astype(kind.newbyteorder("="), copy=False)
            start += size + _padding(size)
    except (ValueError, TypeError, struct.error) as error:
        raise OutputMismatch(
            f"the page answered with nonsense ({type(error).__name__}: {error}), expected arrays "
            "of numbers. Install onnxruntime-web anew: gate runtimes install browser-wasm."
        ) from error
    return arrays


def _padding(length: int) -> int:
    return -length % _ALIGNED
