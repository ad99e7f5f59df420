"""Foreign files read in the process of a test, where a hundred children would take its minutes."""

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
    """From now on in this test; `tests/sandbox` and the tests of hostile files have children."""
    monkeypatch.setattr(gate.onnx_file.sandboxed_reading, "run_in_sandbox", _call)
    monkeypatch.setattr(gate.golden.verify, "run_in_sandbox", _call)


def always_read_here() -> None:
    """In a process that is made for one thing."""
    gate.onnx_file.sandboxed_reading.run_in_sandbox = _call
    gate.golden.verify.run_in_sandbox = _call


def _call(function: str, arguments: Mapping[str, Any], *, limits: SandboxLimits, task: str) -> Any:
    module, _, name = function.partition(":")
    value = getattr(importlib.import_module(module), name)(**json.loads(json.dumps(arguments)))
    return json.loads(json.dumps(value))
