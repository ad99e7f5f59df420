"""The process of an isolated runtime, and its message format."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from multiprocessing import ProcessError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from gate.errors import EvidenceError, OutputMismatch, PolicyError
from gate.onnx_file.tested_file import TestedFile
from gate.records.evidence import Subject
from gate.runtimes.peak_memory import PeakMemory
from gate.runtimes.runtime import (
    Conditions,
    Proof,
    RunnableFile,
    Runtime,
    Session,
    count_of,
    load_runtime,
    seconds_of,
)
from gate.sandbox.child import kill_with_parent
from gate.storage.arrays import RuntimeArray

Numbers = Mapping[str, RuntimeArray]

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


def receive(connection: Connection) -> tuple[dict[str, Any], list[tuple[str, RuntimeArray]]]:
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
) -> tuple[str, RuntimeArray]:
    kind = np.dtype(dtype)
    if kind.kind not in _KINDS or kind.itemsize * math.prod(shape) > _MOST_BYTES:
        raise ValueError(f"an array of {dtype} {shape}")
    array = np.empty(shape, dtype=kind)
    into = array.reshape(-1).view(np.uint8)
    got = connection.recv_bytes_into(into.data) if array.size else len(connection.recv_bytes(1))
    if got != array.nbytes:
        raise ValueError(f"{got} bytes for an array of {dtype} {shape}")
    return name, array


# What the runtime raises goes back as its name and message; what it does to this process stays
# here.


_OF_RECORDINGS = ("live", "has_probe", "run_probe")

Header = dict[str, Any]

Answer = tuple[Header, dict[str, RuntimeArray]]


def serve_runtime(descriptor: int) -> None:
    """Answer the other side until it closes the connection."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    hello, _ = receive(connection)
    kill_with_parent(hello["parent"])
    worker = _Worker(hello["place"])
    while True:
        try:
            header, arrays = receive(connection)
        except (EOFError, OSError):
            worker.close()
            return
        try:
            value, numbers = worker.answer(header, dict(arrays))
        except BaseException as error:  # a plug-in may call sys.exit
            send(connection, {"error": [type(error).__name__, str(error)]})
            continue
        send(connection, {"value": value}, numbers)


class _Worker:
    """One runtime, and the file that it opened."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._runtime: Runtime | None = None
        self._session: Session | None = None
        self._subject: Subject | None = None
        self._memory = PeakMemory()

    def answer(self, header: Header, arrays: dict[str, RuntimeArray]) -> Answer:
        """Of one message, by its verb."""
        verbs: dict[str, Callable[[Header, dict[str, RuntimeArray]], Answer]] = {
            "look": self._look,
            "open": self._open,
            "run": self._run,
            "proof": self._proof,
        }
        return verbs[header["verb"]](header, arrays)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _loaded(self) -> Runtime:
        if self._runtime is None:
            self._runtime = load_runtime(self._place)
        return self._runtime

    def _look(self, header: Header, _: dict[str, RuntimeArray]) -> Answer:
        """What the runtime is, without opening anything."""
        runtime = self._loaded()
        options = _options(runtime, header["options"])
        absent = runtime.absent_reason(options)
        return {
            "promises": asdict(runtime.promised(options)),
            "limit_s": runtime.limit_s,
            "absent": absent,
            "versions": {} if absent else runtime.versions(),
        }, {}

    def _open(self, header: Header, arrays: dict[str, RuntimeArray]) -> Answer:
        runtime = self._loaded()
        self._subject = Subject.model_validate_json(json.dumps(header["subject"]))
        self._memory.begin()
        start = time.perf_counter()
        self._session = runtime.open(
            RunnableFile(TestedFile(Path(header["path"]), self._subject)),
            options=_options(runtime, header["options"]),
            conditions=Conditions.model_validate_json(json.dumps(header["conditions"])),
            example=arrays,
        )
        seconds = time.perf_counter() - start
        _check_live(self._session)
        return {"seconds": seconds_of(self._session.open_seconds) or seconds}, {}

    def _run(self, _: Header, arrays: dict[str, RuntimeArray]) -> Answer:
        session, subject = self._opened()
        start = time.perf_counter()
        outputs = session.run(arrays)
        seconds = time.perf_counter() - start
        return {"seconds": seconds_of(session.seconds) or seconds}, _numbers(outputs, subject)

    def _proof(self, _: Header, __: dict[str, RuntimeArray]) -> Answer:
        session, _subject = self._opened()
        proof = session.proof()
        if not isinstance(proof, Proof):
            raise EvidenceError(f"proof() gave {type(proof).__name__}, expected a Proof")
        plain = asdict(proof)
        del plain["cpu_nodes"]  # of ONNX Runtime in the gate's own process alone
        plain["versions"] = {**self._loaded().versions(), **proof.versions}
        if proof.memory_bytes is None and not proof.own_process:
            self._memory.end()
            plain["memory_bytes"], plain["peak_bytes"] = self._memory.grown, self._memory.peak
        for name in ("memory_bytes", "peak_bytes"):
            plain[name] = count_of(plain[name])
        return {**plain, "own_process": True}, {}

    def _opened(self) -> tuple[Session, Subject]:
        if self._session is None or self._subject is None:
            raise EvidenceError("no file is open")
        return self._session, self._subject


def _check_live(session: Session) -> None:
    """Raise EvidenceError for a session that answers from a recording: what it overrides for that
    is not asked for across processes."""
    own = [
        name
        for name in _OF_RECORDINGS
        if getattr(type(session), name, None) is not getattr(Session, name)
    ]
    if own or not session.live:
        raise EvidenceError(
            f"the session overrides {', '.join(own) or 'live'}, which only recordings do. "
            "Compute each batch in run; give outputs that were computed elsewhere to kind: "
            "recorded (docs/recorded.md)."
        )


def _options(runtime: Runtime, plain: Header) -> BaseModel:
    """Raises PolicyError for options that the runtime does not take."""
    try:
        return runtime.options.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "options"
        raise PolicyError(f"options: {place}: {first['msg']}") from error


def _numbers(outputs: Sequence[Any], subject: Subject) -> dict[str, RuntimeArray]:
    """By their place, because a runtime may return too few, or too many."""
    found = {}
    for place, output in enumerate(outputs):
        array = np.asarray(output)
        if array.dtype.kind not in "biuf":
            names = [spec.name for spec in subject.outputs]
            raise OutputMismatch(
                f"output {place} of {names} is {type(output).__name__} of {array.dtype}, expected "
                "an array of numbers. Return numpy arrays, in the file's order."
            )
        found[str(place)] = array
    return found
