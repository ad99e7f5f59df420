"""What the two processes of a runtime that runs apart say to each other: a header as JSON, then
arrays as bytes. Nothing that is read here can run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from multiprocessing import ProcessError
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from gate.errors import EvidenceError
from gate.runtimes.runtime import Array

Numbers = Mapping[str, Array]
_MOST_BYTES = 1 << 34
_ARRAYS = "arrays"
_KINDS = "biuf"


def send(connection: Connection, header: Mapping[str, Any], arrays: Numbers | None = None) -> None:
    """One message. Raises OSError where the other side is gone."""
    whole = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    described = [
        [name, array.dtype.str, list(np.shape(arrays[name]))]
        for name, array in whole.items()
        if arrays
    ]
    connection.send_bytes(json.dumps({**header, _ARRAYS: described}).encode())
    for array in whole.values():
        connection.send_bytes(array.reshape(-1).view(np.uint8).data if array.size else b"")


def receive(connection: Connection) -> tuple[dict[str, Any], list[tuple[str, Array]]]:
    """The next message, its arrays in order. Raises EOFError and OSError where the other side is
    gone, EvidenceError where it is nonsense."""
    try:
        header = json.loads(connection.recv_bytes(_MOST_BYTES))
        return header, [_array(connection, *each) for each in header.pop(_ARRAYS)]
    except (ValueError, TypeError, KeyError, AttributeError, ProcessError) as error:
        raise EvidenceError(
            f"a runtime's process answered with nonsense ({type(error).__name__}: {error}). "
            "Nothing of it can be believed: update the package that it comes with."
        ) from error


def _array(
    connection: Connection, name: str, dtype: str, shape: Sequence[int]
) -> tuple[str, Array]:
    kind = np.dtype(dtype)
    if kind.kind not in _KINDS or kind.itemsize * math.prod(shape) > _MOST_BYTES:
        raise ValueError(f"an array of {dtype} {shape}")
    array = np.empty(shape, dtype=kind)
    into = array.reshape(-1).view(np.uint8)
    got = connection.recv_bytes_into(into.data) if array.size else len(connection.recv_bytes(1))
    if got != array.nbytes:
        raise ValueError(f"{got} bytes for an array of {dtype} {shape}")
    return name, array
