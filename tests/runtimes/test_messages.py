"""Arrays are unchanged in messages between the two processes; invalid messages are errors."""

from __future__ import annotations

import json
import socket
import threading
from multiprocessing.connection import Connection

import numpy as np
import pytest

from gate.errors import EvidenceError
from gate.sandbox.worker_process import receive, send


@pytest.fixture
def ends():
    pair = [Connection(end.detach()) for end in socket.socketpair()]
    yield pair
    for end in pair:
        end.close()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.int64).reshape(2, 3).T,
        np.float64(2.5).reshape(()),
        np.zeros((0, 4), np.float32),
        np.array([True, False]),
        np.array([[np.nan, np.inf]], np.float16),
        np.zeros((3, 1000, 100), np.float32),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_survive_transport(ends, array):
    first, second = ends
    sender = threading.Thread(target=send, args=(first, {"verb": "run"}, {"x": array}))
    sender.start()
    header, ((name, got),) = receive(second)
    sender.join()
    assert (header, name) == ({"verb": "run"}, "x")
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert np.array_equal(got, array, equal_nan=array.dtype.kind == "f")
    assert got.flags.writeable


@pytest.mark.parametrize(
    "parts",
    [
        [b"no json"],
        [b"[]"],
        [b"{}"],
        [{"arrays": [["x", "O", [1]]], "v": 1}, b"12345678"],
        [{"arrays": [["x", "<f4", [1 << 40]]]}, b""],
        [{"arrays": [["x", "<f4", [2]]]}, b"1234"],
        [{"arrays": [["x", "<f4", [2]]]}, b"123456789012"],
        [{"arrays": [["x", "<f4", [-1]]]}, b"1234"],
        [{"arrays": [["x", "<f4", "two"]]}, b"1234"],
        [{"arrays": [["x"]]}],
    ],
)
def test_invalid_message_is_an_evidence_error(ends, parts):
    first, second = ends
    for part in parts:
        first.send_bytes(part if isinstance(part, bytes) else json.dumps(part).encode())
    with pytest.raises(EvidenceError, match="sent an invalid message"):
        receive(second)


def test_closed_connection_raises_eof(ends):
    first, second = ends
    first.close()
    with pytest.raises(EOFError):
        receive(second)
