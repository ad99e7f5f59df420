"""Read untrusted files in the test's process, because a hundred child processes take minutes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import pytest

import gate.golden.verify
import gate.onnx_file.sandboxed_reading
from gate.sandbox.limits import SandboxLimits


def read_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in this process during this test; tests/sandbox and tests of hostile files use
    children."""
    monkeypatch.setattr(gate.onnx_file.sandboxed_reading, "run_in_sandbox", _call)
    monkeypatch.setattr(gate.golden.verify, "run_in_sandbox", _call)


def always_read_here() -> None:
    """Read in this process until it ends."""
    gate.onnx_file.sandboxed_reading.run_in_sandbox = _call
    gate.golden.verify.run_in_sandbox = _call


def _call(function: str, arguments: Mapping[str, Any], *, limits: SandboxLimits, task: str) -> Any:
    module, _, name = function.partition(":")
    value = getattr(importlib.import_module(module), name)(**json.loads(json.dumps(arguments)))
    return json.loads(json.dumps(value))
