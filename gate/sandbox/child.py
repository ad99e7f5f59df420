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
except ImportError:  # Windows, which has no such limits
    resource = None  # type: ignore[assignment]

_DEATH_OF_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""

OUT_OF_MEMORY = "MemoryError"

INTERRUPTED = 130
"""Exit code of a child that ended by itself because of SIGINT or SIGTERM."""


def serve_request(request: dict[str, Any], descriptor: int) -> None:
    """Call what the request names with its arguments, and write the answer to the descriptor.

    {"value": ...} is what it gives back; {"error": [name of the class, message]} what it raised.
    """
    os.set_inheritable(descriptor, False)
    kill_with_parent(request["parent"])
    _be_interrupted_once()
    for kind, limit in request["limits"].items() if resource is not None else ():
        _limit(getattr(resource, kind), limit)
    try:
        done = {"value": _function(request["function"])(**request["arguments"])}
    except MemoryError:
        done = {"error": [OUT_OF_MEMORY, ""]}
    except Exception as error:
        error = installation.missing(error) or error  # what foreign code lacks stays what it is
        done = {"error": [type(error).__name__, str(error)]}
    with os.fdopen(descriptor, "w") as stream:
        json.dump(done, stream)
    atexit.register(_leave)


def _leave() -> None:
    """End the process as Python would, but for taking PyTorch's modules apart, which costs a second
    of CPU. Threads have ended before it."""
    atexit.unregister(_leave)
    try:
        atexit._run_exitfuncs()  # what others have registered
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads, or none
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # C libraries have buffers of their own
    finally:
        os._exit(0)


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def kill_with_parent(parent: int) -> None:
    """Whoever kills the parent must not leave us behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)
        if os.getppid() != parent:  # it died before
            os._exit(1)


def _be_interrupted_once() -> None:
    """Ctrl-C reaches the whole group, and the parent passes on what may have reached it alone: a
    second one must not end what cleans up after the first."""

    def interrupt(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored: nohup
        signal.signal(signal.SIGINT, interrupt)


def _limit(kind: int, limit: int) -> None:
    _, most = resource.getrlimit(kind)
    lower = limit if most == resource.RLIM_INFINITY else min(limit, most)
    with contextlib.suppress(OSError, ValueError):  # what the system does not know
        resource.setrlimit(kind, (lower, lower))
