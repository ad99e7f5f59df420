"""Whether packages that are installed load: what does not is named, and no file is blamed.

A shared library may be missing or cut, an upgrade broken off, half of a package removed.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from gate.errors import PackageBroken, PackageMissing, first_line
from gate.package import extras

_TITLES = {extras.TORCH: "PyTorch", extras.ONNX_RUNTIME: "ONNX Runtime"}
_WHOLE = {
    extras.TORCH: ("__version__", "Tensor", "nn"),
    extras.ONNX_RUNTIME: ("__version__", "SessionOptions", "InferenceSession"),
}
"""Without these, half of a package was removed: what is left of it may load."""
_LIMIT_S = 120.0
"""To load one in another process: PyTorch takes some seconds, half a minute from a cold disk."""


def onnx_runtime() -> Any:
    """The module. Raises PackageMissing, PackageBroken."""
    return _loaded(extras.ONNX_RUNTIME)


def find_broken(command: str) -> PackageBroken | None:
    """The first of the large packages that `command` needs, is installed and does not load."""
    for name in extras.COMMANDS.get(command, ()):
        try:
            if name in _TITLES:
                _loaded(name)
        except PackageBroken as error:
            return error
        except PackageMissing:
            continue
    return None


def deaths() -> dict[str, str]:
    """Of PyTorch and ONNX Runtime those whose import kills a process, and how: a library that was
    cut short does, and would take with it whoever only wants to say so."""
    found = {name: _death(name) for name in _TITLES if extras.is_installed(name)}
    return {name: how for name, how in found.items() if how}


@functools.cache
def _death(name: str) -> str:
    import subprocess
    import sys

    try:
        code = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"importing it takes longer than {_LIMIT_S:.0f} s"
    return f"importing it kills the process by {_signal(-code)}" if code < 0 else ""


def _loaded(name: str) -> Any:
    if not extras.is_installed(name):
        raise PackageMissing(extras.remedy(name))
    try:
        module = importlib.import_module(name)
        for part in _WHOLE[name]:
            getattr(module, part)
    except Exception as error:  # a broken binary package raises almost anything
        raise PackageBroken(
            f"needs {_TITLES[name]}, and the one that is installed does not load: "
            f"{type(error).__name__}: {first_line(error)}. Nothing was decided. Install the "
            "library that it names, or it again: pip install --force-reinstall "
            f"{extras.distribution(name)}; gate doctor says more"
        ) from error
    return module


def _signal(number: int) -> str:
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
