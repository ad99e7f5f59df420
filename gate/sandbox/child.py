"""Child side: set the limits, call the function, return the result."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Any

from gate import installation

try:
    import resource
except ImportError:  # Windows does not have these limits.
    resource = None  # type: ignore[assignment]

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""

OUT_OF_MEMORY = "MemoryError"

INTERRUPTED = 130
"""Exit code of a child that exited because of SIGINT or SIGTERM."""


def serve_request(request: dict[str, Any], descriptor: int) -> None:
    """Call the function that the request names, and write the result to the descriptor.

    The result is {"value": return value} or {"error": [class name of the exception, message]}.
    """
    os.set_inheritable(descriptor, False)
    kill_with_parent(request["parent"])
    _ignore_second_interrupt()
    for kind, limit in request["limits"].items() if resource is not None else ():
        _set_limit(getattr(resource, kind), limit)
    try:
        result = {"value": _import_function(request["function"])(**request["arguments"])}
    except MemoryError:
        result = {"error": [OUT_OF_MEMORY, ""]}
    except Exception as error:
        error = installation.missing(error) or error  # PackageMissing if a package is missing.
        result = {"error": [type(error).__name__, str(error)]}
    with os.fdopen(descriptor, "w") as stream:
        json.dump(result, stream)
    atexit.register(_exit_quickly)


def _exit_quickly() -> None:
    """Exit without finalizing modules, which takes a second for PyTorch. Threads ended before."""
    atexit.unregister(_exit_quickly)
    try:
        atexit._run_exitfuncs()  # The remaining exit functions.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # Closed, or None.
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # The buffers of C libraries.
    finally:
        os._exit(0)


def _import_function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def kill_with_parent(parent: int) -> None:
    """Kill this process when its parent dies (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # The parent died before prctl.
            os._exit(1)


def _ignore_second_interrupt() -> None:
    """Ignore a second SIGINT, so that it does not interrupt the cleanup after the first.

    Ctrl-C reaches the whole process group, and the parent forwards the signal, too.
    """

    def interrupt(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Not ignored by nohup.
        signal.signal(signal.SIGINT, interrupt)


def _set_limit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    with contextlib.suppress(OSError, ValueError):  # The system does not support the limit.
        resource.setrlimit(kind, (lower, lower))
