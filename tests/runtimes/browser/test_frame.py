"""Arrays are converted to bytes for the page and back."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from gate.errors import EvidenceError, OutputMismatch
from gate.runtimes.browser_page import DTYPES, pack, unpack


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (2, 3, 5)])
def test_arrays_survive_packing(dtype, shape):
    rng = np.random.default_rng(0)
    array = rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)
    result = unpack(pack({"a": array, "ä 2": array.T, "c": array}))
    assert list(result) == ["a", "ä 2", "c"]
    assert all(each.dtype == array.dtype for each in result.values())
    np.testing.assert_array_equal(result["a"], array)
    np.testing.assert_array_equal(result["ä 2"], array.T)


def test_arrays_are_aligned():
    frame = pack({"odd": np.zeros(3, np.uint8), "next": np.zeros(1, np.float64)})
    (length,) = struct.unpack_from("<I", frame)
    assert (4 + length) % 8 == 0
    assert len(frame) == 4 + length + 8 + 8


def test_unsupported_dtype_is_refused():
    with pytest.raises(EvidenceError, match="'a' is complex64: a page has no array for that"):
        pack({"a": np.zeros(1, np.complex64)})


def framed(header):
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + b"\0" * 16


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff\xff\xff\xff",
        struct.pack("<I", 2) + b"\xff\xff",
        framed({"a": 1}),
        framed([["a", "object", [1], 8]]),
        framed([["a", "float32", [2], 4]]),
        framed([["a", "float32", [-1], -4]]),
        framed([["a", "float32", [400], 1600]]),
        framed([["a", "float32", None, 4]]),
        framed([["a", "float32"]]),
    ],
)
def test_invalid_frame_is_refused(frame):
    with pytest.raises(OutputMismatch, match="the page returned an invalid frame"):
        unpack(frame)
