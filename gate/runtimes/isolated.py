"""Run a runtime in its own process (parent side)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from pydantic import BaseModel, ConfigDict

from gate import errors
from gate.errors import (
    EvidenceError,
    GateError,
    LimitExceeded,
    PolicyError,
    RuntimeUnusable,
    StorageError,
)
from gate.runtimes.runtime import Conditions, Promises, Proof, RunnableFile, Runtime, Session
from gate.sandbox.limits import time_text
from gate.storage.arrays import Batch, RuntimeArray

# The process is ended where it takes longer than the runtime allows itself. It is no prison:
# whoever installs a package lets its code run.


_LOOK_S = 120.0
"""To import what a runtime needs, and to say whether it can run: some libraries take half a
minute."""

_CLOSE_S = 10.0
"""To close a session: a browser takes a second."""

_TAIL = 4000

_NOT_LOADED = ("ImportError", "ModuleNotFoundError")
"""What a library raises that is broken, whatever the file is."""

_START = (
    "import sys; sys.path[:] = {path!r}; from {module} import {function}; {function}({descriptor})"
)

_WORKER = "gate.runtimes.isolated_worker:serve_runtime"
"""Named by a string: the worker imports what opens a runtime."""


class PlainOptions(BaseModel):
    """As the policy has them; the runtime validates them in its own process."""

    model_config = ConfigDict(extra="allow", frozen=True)


class IsolatedRuntime(Runtime):
    """Stands for a runtime in another process, which is started when it is first asked."""

    options = PlainOptions

    def __init__(self, place: str, *, limit_s: float | None = None) -> None:
        self._place = place
        self._limit_s = limit_s
        self._process: _Process | None = None
        self._looks: dict[str, Mapping[str, Any]] = {}

    def absent_reason(self, options: Any) -> str | None:
        """As the runtime says. Raises PolicyError for options that it does not take,
        RuntimeUnusable where it breaks."""
        reason = self._look(options)["absent"]
        return None if reason is None else str(reason)

    def promised(self, options: Any) -> Promises:
        """As `absent_reason`. A package that promises the bounds of `cuda` means a device, as
        before ONNX Runtime on CUDA had bounds of its own."""
        promises = Promises(**self._look(options)["promises"])
        return replace(promises, bounds="device") if promises.bounds == "cuda" else promises

    def found_versions(self, options: Any) -> dict[str, str]:
        """Of its libraries; empty where it is absent."""
        return dict(self._look(options)["versions"])

    def open(
        self, file: RunnableFile, *, options: Any, conditions: Conditions, example: Batch
    ) -> Session:
        """Raises what the runtime raises, as an error of the gate."""
        limit = self._limit_s or float(self._look(options)["limit_s"])
        header = {
            "verb": "open",
            "path": str(file.path.resolve()),
            "subject": file.subject.to_plain(),
            "options": options.model_dump(mode="json"),
            "conditions": conditions.to_plain(),
        }
        process = self._started()
        value, _ = process.ask(header, example, limit_s=limit)
        self._process = None  # the session's from here on
        return IsolatedSession(process, limit_s=limit, open_seconds=float(value["seconds"]))

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _look(self, options: Any) -> Mapping[str, Any]:
        plain = options.model_dump(mode="json")
        key = repr(sorted(plain.items()))
        if key not in self._looks:
            header = {"verb": "look", "options": plain}
            try:
                self._looks[key], _ = self._started().ask(header, limit_s=_LOOK_S)
            except PolicyError:
                raise
            except GateError as error:  # there is no file yet that could be to blame
                raise RuntimeUnusable(str(error)) from error
        return self._looks[key]

    def _started(self) -> _Process:
        if self._process is None:
            self._process = _Process(self._place)
        return self._process


class IsolatedSession(Session):
    """A file that is open in the other process."""

    def __init__(self, process: _Process, *, limit_s: float, open_seconds: float) -> None:
        self._process = process
        self._limit_s = limit_s
        self.open_seconds = open_seconds

    def run(self, batch: Batch) -> list[RuntimeArray]:
        """Run one batch in the process. Raises what the runtime raised there."""
        value, arrays = self._process.ask({"verb": "run"}, batch, limit_s=self._limit_s)
        self.seconds = float(value["seconds"])
        return arrays

    def proof(self) -> Proof:
        """Return the proof that the process read back."""
        value, _ = self._process.ask({"verb": "proof"}, limit_s=self._limit_s)
        for name in ("providers_active", "fallback_nodes"):
            value[name] = tuple(value[name])
        return Proof(**value)

    def close(self) -> None:
        """End the process."""
        self._process.end()


class _Process:
    """The other process, from its start to its end."""

    def __init__(self, place: str) -> None:
        from gate.runtimes import isolated_worker

        self._place = place
        ours, theirs = socket.socketpair()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        module, _, function = _WORKER.partition(":")
        start = _START.format(
            path=[entry or os.getcwd() for entry in sys.path],  # noqa: PTH109 - as Python does
            module=module,
            function=function,
            descriptor=theirs.fileno(),
        )
        try:
            with theirs:
                self._popen = subprocess.Popen(
                    [sys.executable, "-P", "-c", start],
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=self._printed,
                    stderr=self._printed,
                )
        except OSError as error:
            ours.close()
            self._printed.close()
            raise StorageError(
                f"cannot start a process for {place}: {error.strerror or error}. Free memory or "
                "processes, then repeat."
            ) from error
        self._connection = Connection(ours.detach())
        self._expired = False
        with contextlib.suppress(OSError):  # it died; the first question says so
            isolated_worker.send(self._connection, {"place": place, "parent": os.getpid()})

    def ask(
        self, header: Mapping[str, Any], arrays: Batch | None = None, *, limit_s: float
    ) -> tuple[dict[str, Any], list[RuntimeArray]]:
        """The answer to one message. Raises LimitExceeded where it takes too long, EvidenceError
        where the process ends, and what the runtime raised."""
        from gate.runtimes import isolated_worker

        try:
            with self._ended_after(limit_s):
                isolated_worker.send(self._connection, header, arrays)
                answer, numbers = isolated_worker.receive(self._connection)
        except (EOFError, OSError) as error:
            raise self._gone(limit_s) from error
        if "error" in answer:
            raise _raised(answer["error"])
        return answer["value"], [array for _, array in numbers]

    def end(self) -> None:
        """Let it close its session, then kill it with all that it started."""
        if self._connection.closed:
            return
        with contextlib.suppress(OSError):  # it is gone
            with socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
                ours.shutdown(socket.SHUT_WR)
            self._connection.poll(_CLOSE_S)  # its side closes when it has ended
        self._connection.close()
        self._kill()
        self._popen.wait()
        self._printed.close()

    @contextlib.contextmanager
    def _ended_after(self, limit_s: float) -> Iterator[None]:
        timer = threading.Timer(limit_s, self._expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._expired = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _gone(self, limit_s: float) -> GateError:
        self._kill()
        code = self._popen.wait()
        if self._expired:
            return LimitExceeded(
                f"{self._place} took longer than {time_text(limit_s)} and was ended. Give it less, "
                "or a larger limit_s of its class."
            )
        return EvidenceError(
            f"the process of {self._place} ended with code {code}.{self._last_line()} See whether "
            "it runs alone: gate runtimes."
        )

    def _last_line(self) -> str:
        size = self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, size - _TAIL))
        lines = self._printed.read().decode(errors="replace").strip().splitlines()
        return f" It last said: {lines[-1].strip()[:300]}" if lines else ""


def _raised(error: Any) -> GateError:
    name, message = (str(part)[:_TAIL] for part in (*error, "", "")[:2])
    kind = errors.by_name(name)
    if kind is not None:
        return kind(message)
    text = f"it raised {name}: {errors.first_line(Exception(message))}"
    return RuntimeUnusable(text) if name in _NOT_LOADED else EvidenceError(text)
