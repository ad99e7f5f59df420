"""Run a runtime in its own process (parent side)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from gate import errors
from gate.errors import EvidenceError, GateError, PolicyError, RuntimeUnusable
from gate.runtimes.runtime import Conditions, Promises, Proof, RunnableFile, Runtime, Session
from gate.sandbox.worker_process import Remedies, WorkerProcess
from gate.storage.arrays import Batch, RuntimeArray

_DESCRIBE_S = 120.0
"""Time limit for importing a runtime and describing it: some libraries take half a minute."""

_MESSAGE_LIMIT = 4000

_NOT_LOADED = ("ImportError", "ModuleNotFoundError")
"""Exceptions of broken libraries, which are not caused by the file."""

_WORKER = "gate.runtimes.isolated_worker:serve_runtime"
"""Imported only in the worker."""

_REMEDIES = Remedies(
    slow="Give it less, or a larger limit_s of its class.",
    dead="See whether it runs alone: gate runtimes.",
)


class PlainOptions(BaseModel):
    """The options in the policy; the runtime validates them in its own process."""

    model_config = ConfigDict(extra="allow", frozen=True)


class IsolatedRuntime(Runtime):
    """A runtime in another process, started on first use and ended after the runtime's time limit.

    It is not a sandbox: the code of an installed package is trusted.
    """

    options = PlainOptions

    def __init__(self, class_path: str, *, limit_s: float | None = None) -> None:
        self._class_path = class_path
        self._limit_s = limit_s
        self._process: _Process | None = None
        self._descriptions: dict[str, Mapping[str, Any]] = {}

    def absent_reason(self, options: Any) -> str | None:
        """Return the runtime's own reason.

        Raises PolicyError for options that it does not accept, RuntimeUnusable if it fails.
        """
        reason = self._describe(options)["absent"]
        return None if reason is None else str(reason)

    def promised(self, options: Any) -> Promises:
        """Return the claims of the runtime. Raises the exceptions of `absent_reason`.

        `cuda` bounds of another package mean `device`, for compatibility with older versions.
        """
        promises = Promises(**self._describe(options)["promises"])
        return replace(promises, bounds="device") if promises.bounds == "cuda" else promises

    def installed_versions(self, options: Any) -> dict[str, str]:
        """Return the versions of its libraries; empty if it is absent."""
        return dict(self._describe(options)["versions"])

    def open(
        self, file: RunnableFile, *, options: Any, conditions: Conditions, example: Batch
    ) -> Session:
        """Open the file in the process. Raises the runtime's exceptions as GateErrors."""
        limit = self._limit_s or float(self._describe(options)["limit_s"])
        header = {
            "verb": "open",
            "path": str(file.path.resolve()),
            "subject": file.subject.to_plain(),
            "options": options.model_dump(mode="json"),
            "conditions": conditions.to_plain(),
        }
        process = self._start_process()
        value, _ = process.request(header, example, limit_s=limit)
        self._process = None  # the session now owns the process
        session = IsolatedSession(process, limit_s=limit, open_seconds=float(value["seconds"]))
        session.connections, session.rate = tuple(value["connections"]), value["rate"]
        return session

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _describe(self, options: Any) -> Mapping[str, Any]:
        plain = options.model_dump(mode="json")
        key = repr(sorted(plain.items()))
        if key not in self._descriptions:
            header = {"verb": "describe", "options": plain}
            try:
                process = self._start_process()
                self._descriptions[key], _ = process.request(header, limit_s=_DESCRIBE_S)
            except PolicyError:
                raise
            except GateError as error:  # not caused by a file, because none is open
                raise RuntimeUnusable(str(error)) from error
        return self._descriptions[key]

    def _start_process(self) -> _Process:
        if self._process is None:
            self._process = _Process(self._class_path)
        return self._process


class IsolatedSession(Session):
    """A file that is open in the process."""

    def __init__(self, process: _Process, *, limit_s: float, open_seconds: float) -> None:
        self._process = process
        self._limit_s = limit_s
        self.open_seconds = open_seconds

    def run(self, batch: Batch) -> list[RuntimeArray]:
        """Run one batch in the process. Raises the runtime's exceptions as GateErrors."""
        value, arrays = self._process.request({"verb": "run"}, batch, limit_s=self._limit_s)
        self.seconds = float(value["seconds"])
        return arrays

    def run_at_once(
        self, batches: Sequence[Batch], connections: int, rate: float | None = None
    ) -> tuple[list[list[RuntimeArray]], list[float], float]:
        """Run the batches from `connections` clients in the process. Raises as `run`."""
        header = {
            "verb": "run_at_once",
            "batches": len(batches),
            "connections": connections,
            "rate": rate,
        }
        arrays = {f"{n}/{name}": a for n, batch in enumerate(batches) for name, a in batch.items()}
        # Each client sends its batches sequentially.
        limit = self._limit_s * math.ceil(len(batches) / connections)
        limit += len(batches) / rate if rate else 0.0
        value, numbers = self._process.request(header, arrays, limit_s=limit)
        remaining = iter(numbers)
        outputs = [list(itertools.islice(remaining, count)) for count in value["outputs"]]
        return outputs, [float(seconds) for seconds in value["seconds"]], float(value["total"])

    def proof(self) -> Proof:
        """Return the proof from the process."""
        value, _ = self._process.request({"verb": "proof"}, limit_s=self._limit_s)
        for name in ("providers_active", "fallback_nodes"):
            value[name] = tuple(value[name])
        return Proof(**value)

    def close(self) -> None:
        """End the process."""
        self._process.end()


class _Process(WorkerProcess):
    """The process of one runtime."""

    def __init__(self, class_path: str) -> None:
        super().__init__(_WORKER, {"class_path": class_path}, label=class_path, remedies=_REMEDIES)

    def request(
        self, header: Mapping[str, Any], arrays: Batch | None = None, *, limit_s: float
    ) -> tuple[dict[str, Any], list[RuntimeArray]]:
        """Return value and arrays of the answer. Raises as `ask`, and the runtime's exceptions."""
        answer, numbers = self.ask(header, arrays, limit_s=limit_s)
        if "error" in answer:
            raise _to_gate_error(answer["error"])
        return answer["value"], [array for _, array in numbers]


def _to_gate_error(error: Any) -> GateError:
    name, message = (str(part)[:_MESSAGE_LIMIT] for part in (*error, "", "")[:2])
    kind = errors.by_name(name)
    if kind is not None:
        return kind(message)
    text = f"it raised {name}: {errors.first_line(Exception(message))}"
    return RuntimeUnusable(text) if name in _NOT_LOADED else EvidenceError(text)
