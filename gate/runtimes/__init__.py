"""Runtimes that execute a file: one module per runtime, found by name.

A third-party package adds one by an entry point of the group `parity_gate.runtimes`
(docs/runtimes.md); what it needs for that is listed here.
"""

from __future__ import annotations

from gate.policy.runtime_options import NoOptions
from gate.runtimes.runtime import Conditions, Promises, Proof, RunnableFile, Runtime, Session
from gate.storage.arrays import Batch

__all__ = [
    "Batch",
    "Conditions",
    "RunnableFile",
    "NoOptions",
    "Promises",
    "Proof",
    "Runtime",
    "Session",
]
