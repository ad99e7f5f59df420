"""The process of an isolated runtime, and its message format."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
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
from gate.sandbox.worker_process import receive, send
from gate.storage.arrays import RuntimeArray

_RECORDING_ATTRIBUTES = ("live", "has_probe", "run_probe")

Header = dict[str, Any]

Answer = tuple[Header, dict[str, RuntimeArray]]


def serve_runtime(descriptor: int) -> None:
    """Answer messages until the connection is closed. Exceptions of the runtime are sent back with
    class name and message."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    hello, _ = receive(connection)
    kill_with_parent(hello["parent"])
    worker = _Worker(hello["class_path"])
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
    """A runtime and its open file."""

    def __init__(self, class_path: str) -> None:
        self._class_path = class_path
        self._runtime: Runtime | None = None
        self._session: Session | None = None
        self._subject: Subject | None = None
        self._memory = PeakMemory()

    def answer(self, header: Header, arrays: dict[str, RuntimeArray]) -> Answer:
        """Return the reply to one message, by its verb."""
        verbs: dict[str, Callable[[Header, dict[str, RuntimeArray]], Answer]] = {
            "describe": self._describe,
            "open": self._open,
            "run": self._run,
            "run_at_once": self._run_at_once,
            "proof": self._proof,
        }
        return verbs[header["verb"]](header, arrays)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _load(self) -> Runtime:
        if self._runtime is None:
            self._runtime = load_runtime(self._class_path)
        return self._runtime

    def _describe(self, header: Header, _: dict[str, RuntimeArray]) -> Answer:
        """Describe the runtime without opening a file."""
        runtime = self._load()
        options = _options(runtime, header["options"])
        absent = runtime.absent_reason(options)
        return {
            "promises": asdict(runtime.promised(options)),
            "limit_s": runtime.limit_s,
            "absent": absent,
            "versions": {} if absent else runtime.versions(),
        }, {}

    def _open(self, header: Header, arrays: dict[str, RuntimeArray]) -> Answer:
        runtime = self._load()
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
        return {
            "seconds": seconds_of(self._session.open_seconds) or seconds,
            "connections": list(self._session.connections),
            "rate": self._session.rate,
        }, {}

    def _run(self, _: Header, arrays: dict[str, RuntimeArray]) -> Answer:
        session, subject = self._require_session()
        start = time.perf_counter()
        outputs = session.run(arrays)
        seconds = time.perf_counter() - start
        return {"seconds": seconds_of(session.seconds) or seconds}, _numbers(outputs, subject)

    def _run_at_once(self, header: Header, arrays: dict[str, RuntimeArray]) -> Answer:
        """Run several batches concurrently; arrays and outputs are named `<batch index>/<name>`."""
        session, subject = self._require_session()
        batches: list[dict[str, RuntimeArray]] = [{} for _ in range(header["batches"])]
        for key, array in arrays.items():
            index, _, name = key.partition("/")
            batches[int(index)][name] = array
        outputs, seconds, total = session.run_at_once(
            batches, header["connections"], header["rate"]
        )
        numbers = {
            f"{index}/{name}": array
            for index, output in enumerate(outputs)
            for name, array in _numbers(output, subject).items()
        }
        return {"seconds": seconds, "total": total, "outputs": [*map(len, outputs)]}, numbers

    def _proof(self, _: Header, __: dict[str, RuntimeArray]) -> Answer:
        session, _subject = self._require_session()
        proof = session.proof()
        if not isinstance(proof, Proof):
            raise EvidenceError(f"proof() gave {type(proof).__name__}, expected a Proof")
        plain = asdict(proof)
        del plain["cpu_nodes"]  # only for ONNX Runtime in the gate's process
        plain["versions"] = {**self._load().versions(), **proof.versions}
        if proof.memory_bytes is None and not proof.own_process:
            self._memory.end()
            plain["memory_bytes"], plain["peak_bytes"] = self._memory.grown, self._memory.peak
        for name in ("memory_bytes", "peak_bytes"):
            plain[name] = count_of(plain[name])
        return {**plain, "own_process": True}, {}

    def _require_session(self) -> tuple[Session, Subject]:
        if self._session is None or self._subject is None:
            raise EvidenceError("no file is open")
        return self._session, self._subject


def _check_live(session: Session) -> None:
    """Raise EvidenceError for a session that overrides attributes of recordings, which are not
    supported in another process."""
    overridden = [
        name
        for name in _RECORDING_ATTRIBUTES
        if getattr(type(session), name, None) is not getattr(Session, name)
    ]
    if overridden or not session.live:
        raise EvidenceError(
            f"the session overrides {', '.join(overridden) or 'live'}, which only recordings may "
            "do. Compute each batch in run; for outputs of another machine use kind: recorded "
            "(docs/recorded.md)."
        )


def _options(runtime: Runtime, plain: Header) -> BaseModel:
    """Validate the options. Raises PolicyError."""
    try:
        return runtime.options.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        name = "".join(f"{each}: " for each in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise PolicyError(f"options: {name}{message}") from error


def _numbers(outputs: Sequence[Any], subject: Subject) -> dict[str, RuntimeArray]:
    """Return the outputs by position, because a runtime may return too few or too many."""
    arrays = {}
    for index, output in enumerate(outputs):
        array = np.asarray(output)
        if array.dtype.kind not in "biuf":
            names = [spec.name for spec in subject.outputs]
            raise OutputMismatch(
                f"output {index} of {names} is {type(output).__name__} of {array.dtype}, expected "
                "an array of numbers. Return numpy arrays, in the file's order."
            )
        arrays[str(index)] = array
    return arrays
