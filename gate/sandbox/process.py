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
"""After which its own children are looked for anew: that means a look at all processes."""


class ProcessMonitor:
    """A monitor of one running child.

    Memory is what the kernel allocated, not what was requested: PyTorch reserves 0.8 GB to use 0.3,
    and CUDA terabytes, so no limit of the address space (RLIMIT_AS, RLIMIT_DATA) would fit.
    """

    def __init__(self, pid: int, limits: SandboxLimits) -> None:
        self._child = psutil.Process(pid)
        self._limits = limits
        self._began = time.monotonic()
        self._descendants: list[psutil.Process] = []
        self._looked = self._began

    def check(self, what: str) -> None:
        """Raise LimitExceeded where too much was taken."""
        now, limits = time.monotonic(), self._limits
        if now - self._looked > _DESCENDANTS_S:
            self._looked = now
            with contextlib.suppress(psutil.Error):
                self._descendants = self._child.children(recursive=True)
        if now - self._began > limits.time_s:
            raise LimitExceeded(
                f"{what} took more than the {time_text(limits.time_s)} that are allowed. Nothing "
                "was decided. If the file is trusted, allow more with --time-limit."
            )
        taken = sum(map(private_memory, (self._child, *self._descendants)))
        if taken > limits.memory_bytes:
            error = LimitExceeded(too_much_memory(what, limits))
            # A note, because the message of the same fault is the same each time.
            error.add_note(f"seen: {memory_text(taken)} after {time_text(now - self._began)}")
            raise error

    def kill(self) -> None:
        """End the child and all that it started."""
        for process in (*self._tree(), *self._tree()):  # what was started meanwhile, too
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _tree(self) -> Iterator[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            self._child.suspend()  # it starts no more
            yield from self._child.children(recursive=True)
        yield from (*self._descendants, self._child)


def too_much_memory(what: str, limits: SandboxLimits) -> str:
    """The message."""
    return (
        f"{what} took more than the {memory_text(limits.memory_bytes)} of memory that are allowed, "
        "or than there is. Nothing was decided. If the file is trusted, allow more with "
        "--memory-limit."
    )


def private_memory(process: psutil.Process) -> int:
    """Return the bytes of a process's own memory; 0 where it ended."""
    try:
        taken = process.memory_info()
    except psutil.Error:
        return 0
    return int(taken.rss - getattr(taken, "shared", 0))


# What it hands back is JSON, and is read as a stranger's: the child parsed hostile bytes, and may
# be theirs by now.
_LOOK_S = 0.05

_LAST_S = 10.0
"""For a child that has answered, or was interrupted, to end by itself."""

_TAIL = 4000
"""Characters of a message, and bytes of what a child printed, that are kept."""

_CHUNK = 1 << 16
_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_KEPT = ("PATH", "HOME", "LANG", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_KEPT_PREFIXES = ("LC_", "PYTHON", "OMP_", "ORT_", "CUDA_")

_START = (
    "import json, os, sys\n"
    "with os.fdopen({request}) as stream: request = json.load(stream)\n"
    "sys.path[:] = request['path']\n"
    "from {module} import {function}\n"
    "{function}(request, {result})\n"
)

_ANSWER = "gate.sandbox.child:serve_request"
"""What the child calls."""


def run_in_sandbox(
    function: str, arguments: Mapping[str, Any], *, limits: SandboxLimits, what: str
) -> Any:
    """The value of `package.module:function` for these arguments; both are JSON.

    The child gets nothing of this process: no secret of its environment, no file but its own
    temporary folder, which is removed. It dies with us. Raises LimitExceeded, whose message begins
    with `what`, where it takes more than the limits or dies; StorageError where this machine can't
    start it, or somebody else ended it; the GateError that the function raises; EvidenceError where
    it raises anything else, or answers nonsense.
    """
    return _call(function, arguments, limits=limits, what=what, terminal=False)


def run_in_child(
    function: str, arguments: Mapping[str, Any], *, limits: SandboxLimits, what: str
) -> Any:
    """Run a child like `call`, in place of this very process: it has our terminal, environment and
    process group, so that Ctrl-C reaches it and a debugger works. Raises KeyboardInterrupt if we
    or it were interrupted, also by SIGTERM, and it has no reply to that."""
    return _call(function, arguments, limits=limits, what=what, terminal=True)


def _call(
    function: str, arguments: Mapping[str, Any], *, limits: SandboxLimits, what: str, terminal: bool
) -> Any:
    rlimits = {"RLIMIT_CORE": 0, "RLIMIT_CPU": int(limits.time_s * (os.cpu_count() or 1)) + 60}
    if not terminal:
        # A backstop: one step can allocate more between two looks than there is. Addresses of ONNX
        # Runtime's threads and arenas are some hundred MB.
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
        except OSError as error:  # which says nothing about the file
            raise StorageError(
                f"cannot start a process for {what}: {error.strerror or error}. Free memory, "
                "processes or space, then repeat."
            ) from error
        with child:
            child.wait(what)
        return _value(child, what=what, limits=limits)


class _Child:
    """One process, from its start to its end."""

    def __init__(
        self, request: Mapping[str, Any], limits: SandboxLimits, *, terminal: bool, folder: Path
    ) -> None:
        self.answer = bytearray()
        self.printed = b""
        self._terminal = terminal
        with contextlib.ExitStack() as stack:
            given: IO[str] = stack.enter_context(tempfile.TemporaryFile("w+"))
            json.dump(request, given)
            given.seek(0)
            self._result, writer = os.pipe()
            stack.callback(os.close, writer)
            module, _, function = _ANSWER.partition(":")
            start = _START.format(
                request=given.fileno(), result=writer, module=module, function=function
            )
            try:
                # -P: a module beside the foreign file must not be taken for one of Python's.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", start],
                    pass_fds=(given.fileno(), writer),
                    env=_environment(folder, whole=terminal),
                    start_new_session=not terminal,
                    stdin=None if terminal else subprocess.DEVNULL,
                    stdout=None if terminal else subprocess.DEVNULL,
                    stderr=None if terminal else subprocess.PIPE,
                )
            except BaseException:
                os.close(self._result)
                raise
        self._watch = ProcessMonitor(self._process.pid, limits)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._watch.kill()
        if not self._terminal:  # whatever it left behind in its group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        os.close(self._result)

    @property
    def ended(self) -> str:
        """How it ended, for people."""
        code = self._process.returncode
        if code >= 0:
            return f"ended with code {code}"
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-code).name}"
        return f"died of signal {-code}"

    @property
    def was_interrupted(self) -> bool:
        """Return True if SIGINT or SIGTERM ended it."""
        return self._terminal and self._process.returncode == child.INTERRUPTED

    @property
    def was_ended_from_outside(self) -> bool:
        """Return True if a signal of people and service managers ended it, which no file raises by
        itself."""
        return -self._process.returncode in _FROM_OUTSIDE

    def wait(self, what: str) -> None:
        """Until it ended, or answered and had a moment to end. Raises LimitExceeded,
        KeyboardInterrupt."""
        sent = [signal.SIGINT]

        def terminate(number: int, _frame: object) -> None:
            sent[0] = signal.Signals(number)
            raise KeyboardInterrupt

        with _handling(signal.SIGTERM, terminate) if self._terminal else contextlib.nullcontext():
            self._wait(what, sent)

    def _wait(self, what: str, sent: list[signal.Signals]) -> None:
        """`sent`: the signal that interrupts us."""
        try:
            had_ended = False
            for came in self._reading():
                if had_ended and not came:  # in a look that began after its end
                    return
                had_ended = self._process.poll() is not None
                self._watch.check(what)
            self._finish()
        except KeyboardInterrupt:
            if self._terminal:  # it may have got the signal too, and says what became of it
                self._process.send_signal(sent[0])
                for _ in self._reading(for_s=_LAST_S):
                    pass
                self._finish()
            if not self.answer:
                raise

    def _finish(self) -> None:
        if len(self.answer) > RECORD_LIMIT:  # it would write on
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_S)

    def _reading(self, *, for_s: float = math.inf) -> Iterator[bool]:
        """Read what comes until the answer is whole; whether something came, look by look."""
        end = time.monotonic() + for_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._result, selectors.EVENT_READ)
            if self._process.stderr is not None:
                selector.register(self._process.stderr, selectors.EVENT_READ)
            while time.monotonic() < end:
                ready = selector.select(_LOOK_S)
                for key, _ in ready:
                    data = os.read(key.fd, _CHUNK)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fd == self._result:
                        self.answer += data
                    else:
                        self.printed = (self.printed + data)[-_TAIL:]
                if self._result not in selector.get_map() or len(self.answer) > RECORD_LIMIT:
                    return
                yield bool(ready)


@contextlib.contextmanager
def _handling(number: int, handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle a signal in another way meanwhile; not outside of the main thread, nor one that is
    ignored."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(number) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _value(child: _Child, *, what: str, limits: SandboxLimits) -> Any:
    if not child.answer and child.was_interrupted:
        raise KeyboardInterrupt
    if not child.answer and child.was_ended_from_outside:
        raise StorageError(
            f"{what} was not finished: the process that did it {child.ended}, which somebody else "
            "sent. Nothing was decided: repeat."
        )
    if not child.answer:
        raise LimitExceeded(
            f"{what} was not finished: the process that did it {child.ended}."
            f"{last_line(child.printed)} Nothing was decided. If it was killed for its memory, "
            "allow more with --memory-limit on a machine that has it; gate doctor says whether a "
            "library is broken."
        )
    if len(child.answer) > RECORD_LIMIT:
        raise LimitExceeded(
            f"{what} gave more than {RECORD_LIMIT} bytes. Nothing was decided: do not trust it."
        )
    done = parse_strict_json(
        bytes(child.answer), what=f"the answer of the process that did: {what}"
    )
    if not isinstance(done, dict) or not done.keys() & {"value", "error"}:
        raise EvidenceError(f"{what} was answered with nonsense. Do not trust this file.")
    if "error" in done:
        raise _raised(done["error"], what=what, limits=limits)
    return done["value"]


def _raised(error: Any, *, what: str, limits: SandboxLimits) -> GateError:
    name, message = (str(part)[:_TAIL] for part in (*error, "", "")[:2])
    if name == child.OUT_OF_MEMORY:
        return LimitExceeded(too_much_memory(what, limits))
    kind = by_name(name)
    if kind is not None:
        return kind(message)
    return EvidenceError(f"{what} failed unexpectedly: {name}: {message}")


def last_line(printed: bytes) -> str:
    """Return the last line that a process printed, as a sentence for its message."""
    lines = printed.decode(errors="replace").strip().splitlines()
    return f" It last said: {lines[-1].strip()[:300]}" if lines else ""


def _environment(folder: Path, *, whole: bool) -> dict[str, str]:
    ours = {
        name: value
        for name, value in os.environ.items()
        if whole or name in _KEPT or name.startswith(_KEPT_PREFIXES)
    }
    return ours | {"TMPDIR": str(folder)}
