"""Parent side: start the child, watch it, read its JSON result."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from gate.errors import EvidenceError, GateError, LimitExceeded, StorageError, by_name
from gate.sandbox import child
from gate.sandbox.limits import SandboxLimits, memory_text, time_text
from gate.storage.files import temporary_folder
from gate.storage.untrusted_files import RECORD_LIMIT, parse_strict_json

_DESCENDANTS_S = 1.0
"""Interval at which the descendants are listed, which requires reading all processes."""


class ProcessMonitor:
    """Monitors the time and memory of a running child.

    Measures resident memory. A limit of the address space (RLIMIT_AS, RLIMIT_DATA) is not suitable:
    PyTorch reserves 0.8 GB to use 0.3, and CUDA reserves terabytes.
    """

    def __init__(self, pid: int, limits: SandboxLimits) -> None:
        self._child = psutil.Process(pid)
        self._limits = limits
        self._started = time.monotonic()
        self._descendants: list[psutil.Process] = []
        self._listed = self._started

    def check(self, task: str) -> None:
        """Raise LimitExceeded if the child exceeded a limit. `task`: its task, for the message."""
        now, limits = time.monotonic(), self._limits
        if now - self._listed > _DESCENDANTS_S:
            self._listed = now
            with contextlib.suppress(psutil.Error):
                self._descendants = self._child.children(recursive=True)
        if now - self._started > limits.time_s:
            raise LimitExceeded(
                f"{task} took more than the time limit of {time_text(limits.time_s)}. Nothing was "
                "decided. If the file is trusted, allow more with --time-limit."
            )
        used = sum(map(private_memory, (self._child, *self._descendants)))
        if used > limits.memory_bytes:
            error = LimitExceeded(too_much_memory(task, limits))
            # In a note, so that the message is the same each time.
            error.add_note(f"seen: {memory_text(used)} after {time_text(now - self._started)}")
            raise error

    def kill(self) -> None:
        """Kill the child and its descendants."""
        for process in (*self._tree(), *self._tree()):  # Twice, for those started meanwhile.
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _tree(self) -> Iterator[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            self._child.suspend()  # So that it starts no more processes.
            yield from self._child.children(recursive=True)
        yield from (*self._descendants, self._child)


def too_much_memory(task: str, limits: SandboxLimits) -> str:
    """Return the message for a task that exceeded its memory limit."""
    return (
        f"{task} took more than the memory limit of {memory_text(limits.memory_bytes)}, or more "
        "than is available. Nothing was decided. If the file is trusted, allow more with "
        "--memory-limit."
    )


def private_memory(process: psutil.Process) -> int:
    """Return the private resident memory of a process in bytes; 0 if it has ended."""
    try:
        memory = process.memory_info()
    except psutil.Error:
        return 0
    return int(memory.rss - getattr(memory, "shared", 0))


_POLL_S = 0.05

_EXIT_S = 10.0
"""Time to exit for a child that has returned its result or was interrupted."""

_TAIL = 4000
"""Maximum length of a message, and of the output that is kept, in characters and bytes."""

_CHUNK = 1 << 16
_TERMINATING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_INHERITED = ("PATH", "HOME", "LANG", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_INHERITED_PREFIXES = ("LC_", "PYTHON", "OMP_", "ORT_", "CUDA_")

_START = (
    "import os, signal\n"
    "try:\n"
    "  import json, sys\n"
    "  with os.fdopen({request}) as stream: request = json.load(stream)\n"
    "  sys.path[:] = request['path']\n"
    "  from {module} import {function}\n"
    "  {function}(request, {result})\n"
    "except KeyboardInterrupt:\n"  # During the imports: end without a traceback.
    "  signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "  signal.raise_signal(signal.SIGINT)\n"
)

_ENTRY_POINT = "gate.sandbox.child:serve_request"


def run_in_sandbox(
    function: str, arguments: Mapping[str, Any], *, limits: SandboxLimits, task: str
) -> Any:
    """Call `package.module:function` in a child; return its result. Arguments and result are JSON.

    The child gets no secrets of the environment and a temporary folder of its own, and is killed
    with this process. It parses untrusted files and may be compromised: its result is parsed as
    untrusted input. Raises LimitExceeded, whose message begins with `task`, if the child exceeds a
    limit or dies; StorageError if it can't be started or a signal ended it; the GateError that the
    function raises; EvidenceError for other exceptions and invalid results.
    """
    return _call(function, arguments, limits=limits, task=task, terminal=False)


def run_in_child(
    function: str, arguments: Mapping[str, Any], *, limits: SandboxLimits, task: str
) -> Any:
    """Call a function in a child like `run_in_sandbox`, but with the terminal, environment and
    process group of this process, so that Ctrl-C and debuggers work. Raises KeyboardInterrupt if
    SIGINT or SIGTERM interrupted one of them and there is no result."""
    return _call(function, arguments, limits=limits, task=task, terminal=True)


def _call(
    function: str, arguments: Mapping[str, Any], *, limits: SandboxLimits, task: str, terminal: bool
) -> Any:
    rlimits = {"RLIMIT_CORE": 0, "RLIMIT_CPU": int(limits.time_s * (os.cpu_count() or 1)) + 60}
    if not terminal:
        # A second limit, because a child may exhaust the memory between two checks. ONNX Runtime
        # reserves some hundred MB for threads and arenas.
        rlimits["RLIMIT_DATA"] = 2 * limits.memory_bytes + (1 << 30)
    request = {
        "path": sys.path,
        "parent": os.getpid(),
        "limits": rlimits,
        "function": function,
        "arguments": dict(arguments),
    }
    with temporary_folder() as folder:
        try:
            child = _Child(request, limits, terminal=terminal, folder=folder)
        except OSError as error:  # Not caused by the file.
            raise StorageError(
                f"cannot start a process for {task}: {error.strerror or error}. Free memory, "
                "processes or disk space, then retry."
            ) from error
        with child:
            child.wait(task)
        return _read_result(child, task=task, limits=limits)


class _Child:
    """A child process, from its start to its end."""

    def __init__(
        self, request: Mapping[str, Any], limits: SandboxLimits, *, terminal: bool, folder: Path
    ) -> None:
        self.response = bytearray()
        self.stderr_tail = b""
        self._terminal = terminal
        with contextlib.ExitStack() as stack:
            stream: IO[str] = stack.enter_context(tempfile.TemporaryFile("w+"))
            json.dump(request, stream)
            stream.seek(0)
            self._result_pipe, writer = os.pipe()
            stack.callback(os.close, writer)
            module, _, function = _ENTRY_POINT.partition(":")
            start = _START.format(
                request=stream.fileno(), result=writer, module=module, function=function
            )
            try:
                # -P: do not import modules from the folder of the untrusted file.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", start],
                    pass_fds=(stream.fileno(), writer),
                    env=_environment(folder, inherit_all=terminal),
                    start_new_session=not terminal,
                    stdin=None if terminal else subprocess.DEVNULL,
                    stdout=None if terminal else subprocess.DEVNULL,
                    stderr=None if terminal else subprocess.PIPE,
                )
            except BaseException:
                os.close(self._result_pipe)
                raise
        self._monitor = ProcessMonitor(self._process.pid, limits)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._monitor.kill()
        if not self._terminal:  # Kill the remaining processes of its group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        os.close(self._result_pipe)

    @property
    def exit_text(self) -> str:
        """Return how the process ended, for messages."""
        code = self._process.returncode
        if code >= 0:
            return f"ended with code {code}"
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-code).name}"
        return f"died of signal {-code}"

    @property
    def was_interrupted(self) -> bool:
        """Return whether SIGINT or SIGTERM ended the process."""
        return self._terminal and self._process.returncode == child.INTERRUPTED

    @property
    def was_terminated(self) -> bool:
        """Return whether a signal ended it that users and service managers send."""
        return -self._process.returncode in _TERMINATING_SIGNALS

    def wait(self, task: str) -> None:
        """Wait until the process ends, or `_EXIT_S` longer than for its result. Raises
        LimitExceeded, KeyboardInterrupt."""
        sent = [signal.SIGINT]

        def terminate(number: int, _frame: object) -> None:
            sent[0] = signal.Signals(number)
            raise KeyboardInterrupt

        with _handling(signal.SIGTERM, terminate) if self._terminal else contextlib.nullcontext():
            self._wait(task, sent)

    def _wait(self, task: str, sent: list[signal.Signals]) -> None:
        """`sent`: the signal that interrupts this process."""
        try:
            had_ended = False
            for has_data in self._reading():
                if had_ended and not has_data:  # No data in a poll that began after its end.
                    return
                had_ended = self._process.poll() is not None
                self._monitor.check(task)
            self._finish()
        except KeyboardInterrupt:
            if self._terminal:  # Forward the signal, then wait for a result.
                self._process.send_signal(sent[0])
                for _ in self._reading(for_s=_EXIT_S):
                    pass
                self._finish()
            if not self.response:
                raise

    def _finish(self) -> None:
        if len(self.response) > RECORD_LIMIT:  # It may still be writing.
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)

    def _reading(self, *, for_s: float = math.inf) -> Iterator[bool]:
        """Read until the result is complete; yield after each poll whether there was data."""
        end = time.monotonic() + for_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._result_pipe, selectors.EVENT_READ)
            if self._process.stderr is not None:
                selector.register(self._process.stderr, selectors.EVENT_READ)
            while time.monotonic() < end:
                ready = selector.select(_POLL_S)
                for key, _ in ready:
                    data = os.read(key.fd, _CHUNK)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fd == self._result_pipe:
                        self.response += data
                    else:
                        self.stderr_tail = (self.stderr_tail + data)[-_TAIL:]
                if self._result_pipe not in selector.get_map() or len(self.response) > RECORD_LIMIT:
                    return
                yield bool(ready)


@contextlib.contextmanager
def _handling(number: int, handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Set a signal handler while the context is open. Does nothing outside of the main thread, or
    if the signal is ignored."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(number) is signal.SIG_IGN:
        yield
        return
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


def _read_result(child: _Child, *, task: str, limits: SandboxLimits) -> Any:
    if not child.response and child.was_interrupted:
        raise KeyboardInterrupt
    if not child.response and child.was_terminated:
        raise StorageError(
            f"{task} was not finished: another process sent a signal, and its process "
            f"{child.exit_text}. Nothing was decided: retry."
        )
    if not child.response:
        raise LimitExceeded(
            f"{task} was not finished: its process {child.exit_text}."
            f"{last_line(child.stderr_tail)} Nothing was decided. If it ran out of memory, use a "
            "machine with more, and --memory-limit. gate doctor detects broken libraries."
        )
    if len(child.response) > RECORD_LIMIT:
        raise LimitExceeded(
            f"{task} returned more than {RECORD_LIMIT} bytes. Nothing was decided: do not trust "
            "the file."
        )
    result = parse_strict_json(bytes(child.response), label=f"the result of the process for {task}")
    if not isinstance(result, dict) or not result.keys() & {"value", "error"}:
        raise EvidenceError(f"{task} returned an invalid result. Do not trust the file.")
    if "error" in result:
        raise _to_exception(result["error"], task=task, limits=limits)
    return result["value"]


def _to_exception(error: Any, *, task: str, limits: SandboxLimits) -> GateError:
    name, message = (str(part)[:_TAIL] for part in (*error, "", "")[:2])
    if name == child.OUT_OF_MEMORY:
        return LimitExceeded(too_much_memory(task, limits))
    kind = by_name(name)
    if kind is not None:
        return kind(message)
    return EvidenceError(f"{task} failed unexpectedly: {name}: {message}")


def last_line(printed: bytes) -> str:
    """Return the last line of a process's output, as a sentence for an error message."""
    lines = printed.decode(errors="replace").strip().splitlines()
    return f" Its last output: {lines[-1].strip()[:300]}" if lines else ""


def _environment(folder: Path, *, inherit_all: bool) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if inherit_all or name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }
    return inherited | {"TMPDIR": str(folder)}
