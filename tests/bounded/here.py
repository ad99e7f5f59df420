"""Foreign files read in the process of a test, where a hundred children would take its minutes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import pytest

import gate.golden.foreign
import gate.onnxfile.foreign
from gate.bounded.limits import ChildLimits

READERS = (gate.onnxfile.foreign, gate.golden.foreign)


def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on in this test; `tests/bounded` and the tests of hostile files have children."""
    for reader in READERS:
        monkeypatch.setattr(reader, "call", _call)


def always_read_here() -> None:
    """In a process that is made for one thing."""
    for reader in READERS:
        reader.call = _call


def _call(function: str, arguments: Mapping[str, Any], *, limits: ChildLimits, what: str) -> Any:
    module, _, name = function.partition(":")
    value = getattr(importlib.import_module(module), name)(**json.loads(json.dumps(arguments)))
    return json.loads(json.dumps(value))
