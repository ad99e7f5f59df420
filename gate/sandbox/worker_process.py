"""A child process that answers messages one after another, and its message format."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import ProcessError
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import psutil

from gate.errors import EvidenceError, GateError, LimitExceeded, StorageError
from gate.sandbox.limits import memory_text, time_text
from gate.sandbox.process import last_line, private_memory
from gate.storage.arrays import RuntimeArray

Numbers = Mapping[str, RuntimeArray]

_MAX_BYTES = 1 << 34
_ARRAYS = "arrays"
_KINDS = "biuf"

_CLOSE_S = 10.0
"""Time to exit: a browser takes a second."""

_POLL_S = 0.1
"""Interval between two checks of the time and memory of a process."""

PROGRESS = {"progress": True}
"""A message without arrays: a part of the result was computed."""

_TAIL = 4000

_START = (
    "import sys; sys.path[:] = {path!r}; from {module} import {function}; {function}({descriptor})"
)


def send(connection: Connection, header: Mapping[str, Any], arrays: Numbers | None = None) -> None:
    """Send one message. Raises OSError if the other process has ended."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    described = [
        [name, array.dtype.str, list(np.shape(arrays[name]))]
        for name, array in contiguous.items()
        if arrays
    ]
    connection.send_bytes(json.dumps({**header, _ARRAYS: described}).encode())
    for array in contiguous.values():
        connection.send_bytes(array.reshape(-1).view(np.uint8).data if array.size else b"")


def receive(connection: Connection) -> tuple[dict[str, Any], list[tuple[str, RuntimeArray]]]:
    """Return the next message and its arrays in order. Raises EOFError and OSError if the other
    process has ended, EvidenceError if the message is not valid."""
    try:
        header = json.loads(connection.recv_bytes(_MAX_BYTES))
        return header, [_receive_array(connection, *each) for each in header.pop(_ARRAYS)]
    except (ValueError, TypeError, KeyError, AttributeError, ProcessError) as error:
        raise EvidenceError(
            f"a child process sent an invalid message ({type(error).__name__}: {error}). "
            "Its results can't be trusted: update the package that it belongs to."
        ) from error


def _receive_array(
    connection: Connection, name: str, dtype: str, shape: Sequence[int]
) -> tuple[str, RuntimeArray]:
    kind = np.dtype(dtype)
    if kind.kind not in _KINDS or kind.itemsize * math.prod(shape) > _MAX_BYTES:
        raise ValueError(f"an array of {dtype} {shape}")
    array = np.empty(shape, dtype=kind)
    buffer = array.reshape(-1).view(np.uint8).data
    count = connection.recv_bytes_into(buffer) if array.size else len(connection.recv_bytes(1))
    if count != array.nbytes:
        raise ValueError(f"{count} bytes for an array of {dtype} {shape}")
    return name, array


class Remedies(NamedTuple):
    """The remedies in the error messages of a process: too slow or large, or ended."""

    slow: str
    dead: str


class WorkerProcess:
    """A child process that runs `package.module:function(descriptor)`.

    The function reads messages from the descriptor's connection and answers them (`receive`,
    `send`). This isolates failures, not untrusted code: an installed package can run its code.
    """

    def __init__(
        self,
        function: str,
        first_message: Mapping[str, Any],
        *,
        label: str,
        remedies: Remedies,
        memory_bytes: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process. `first_message` gets no reply. `label`: the process's name in errors.
        `memory_bytes`: limit of its private memory. `environment`: additional variables. Raises
        StorageError."""
        self._label, self._remedies = label, remedies
        parent_socket, child_socket = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        module, _, name = function.partition(":")
        start = _START.format(
            path=[entry or os.getcwd() for entry in sys.path],  # noqa: PTH109 - as Python does
            module=module,
            function=name,
            descriptor=child_socket.fileno(),
        )
        try:
            with child_socket:
                self._popen = subprocess.Popen(
                    [sys.executable, "-P", "-c", start],
                    pass_fds=(child_socket.fileno(),),
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                )
        except OSError as error:
            parent_socket.close()
            self._output.close()
            raise StorageError(
                f"cannot start a process for {label}: {error.strerror or error}. Free memory or "
                "processes, then retry."
            ) from error
        self._connection = Connection(parent_socket.detach())
        self._deadline, self._expired = math.inf, False
        self._memory_bytes, self._excess_bytes = memory_bytes, 0
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()
        with contextlib.suppress(OSError):  # If it died, the first `ask` raises.
            send(self._connection, {**first_message, "parent": os.getpid()})

    def ask(
        self, header: Mapping[str, Any], arrays: Numbers | None = None, *, limit_s: float
    ) -> tuple[dict[str, Any], list[tuple[str, RuntimeArray]]]:
        """Send a message and return the reply. Each message `PROGRESS` before it restarts the time
        limit. Raises LimitExceeded if the process exceeds its time or memory, EvidenceError if it
        ends."""
        try:
            self._deadline = time.monotonic() + limit_s
            send(self._connection, header, arrays)
            reply = receive(self._connection)
            while reply[0] == PROGRESS:
                self._deadline = time.monotonic() + limit_s
                reply = receive(self._connection)
            return reply
        except (EOFError, OSError) as error:
            raise self._failure(limit_s) from error
        finally:
            self._deadline = math.inf

    def end(self) -> None:
        """Let the process exit, then kill it and its process group."""
        if self._connection.closed:
            return
        with contextlib.suppress(OSError):  # It has ended already.
            with socket.socket(fileno=os.dup(self._connection.fileno())) as parent_socket:
                parent_socket.shutdown(socket.SHUT_WR)
            self._connection.poll(_CLOSE_S)  # Ready when the other side closes.
        self._connection.close()
        self._kill()
        self._popen.wait()
        self._output.close()

    def _watch(self) -> None:
        """Kill the process if it exceeds its time or memory."""
        with contextlib.suppress(psutil.Error):  # It has ended.
            process = psutil.Process(self._popen.pid)
            while not self._ended.wait(_POLL_S):
                if time.monotonic() > self._deadline:
                    self._expired = True
                    self._kill()
                if self._memory_bytes is None:
                    continue
                used = private_memory(process)
                if used > self._memory_bytes:
                    self._excess_bytes = used
                    self._kill()

    def _kill(self) -> None:
        self._ended.set()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _failure(self, limit_s: float) -> GateError:
        self._kill()
        code = self._popen.wait()
        if self._excess_bytes and self._memory_bytes is not None:
            return LimitExceeded(
                f"{self._label} took more than {memory_text(self._memory_bytes)} of memory and was "
                f"killed. {self._remedies.slow}"
            )
        if self._expired:
            return LimitExceeded(
                f"{self._label} took longer than {time_text(limit_s)} and was killed. "
                f"{self._remedies.slow}"
            )
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _TAIL))
        return EvidenceError(
            f"the process of {self._label} ended with code {code}."
            f"{last_line(self._output.read())} {self._remedies.dead}"
        )
