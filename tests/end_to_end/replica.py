"""A replica of the service on one host, look by look, each in a process of its own that is killed
or stopped before the step that an order names.

    python -m tests.end_to_end.replica SETTINGS

An order: `at`, the number or name of a step (none: nothing happens to it), and `signal`; or
`continue`, of the look that was stopped. The answer: `steps`, `done` and `failed`, or `killed`, or `stopped`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Imported once by the process that forks.
import mlflow
import onnxruntime

import gate.ledger.lock
from gate.ledger.database import StateDatabase
from gate.ledger.journal import Journal
from gate.ledger.ledger import Ledger
from gate.mlflow_client.connection import quiet_process
from gate.mlflow_client.registry import MlflowRegistry
from gate.service.monitoring import Failed
from gate.service.reconciler import reconciler
from gate.service.settings import ServiceSettings
from tests.bounded.here import always_read_here

__all__ = ["main", "mlflow", "onnxruntime"]

LEASE_S = 0.6
LASTING = (
    (os, "replace"), (os, "symlink"), (StateDatabase, "writing"), (Journal, "begin"), (Ledger, "append"),
    (MlflowRegistry, "set_alias"), (MlflowRegistry, "delete_alias"), (MlflowRegistry, "set_tag"),
    (MlflowRegistry, "set_description"),
)  # fmt: skip
"""Of the store there are more in tests/deploy/test_kills.py."""


def main() -> None:
    settings = ServiceSettings.of(**json.loads(sys.argv[1]))
    gate.ledger.lock.LEASE_S = gate.ledger.lock.LEASE_S = LEASE_S
    quiet_process()
    always_read_here()
    stopped = 0
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("continue"):
            os.kill(stopped, signal.SIGCONT)
            child = stopped
        else:
            child = os.fork()
            if child == 0:
                _child(settings, order)
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            stopped = child
            _answer(stopped=True)
        elif os.WIFSIGNALED(status):
            _answer(killed=True)


def _child(settings: ServiceSettings, order: dict[str, Any]) -> None:
    try:
        with counted(order.get("at"), order.get("signal", signal.SIGKILL)) as steps:
            done = reconciler(settings)(settings.models[0], cause="delivery 1")
        failed = [
            f"{type(one.error).__name__}: {one.error}" for one in done if isinstance(one, Failed)
        ]
        _answer(steps=steps, done=len(done) - len(failed), failed=failed)
    except Exception as error:
        _answer(steps=steps, done=0, failed=[f"{type(error).__name__}: {error}"])
    finally:
        os._exit(0)


def _answer(**answer: Any) -> None:
    os.write(1, (json.dumps(answer) + "\n").encode())


@contextmanager
def counted(at: int | str | None, number: int) -> Iterator[list[str]]:
    """Keep the names of the lasting steps of this thread, and not of the one that renews the lease;
    before that one a signal comes."""
    steps: list[str] = []
    ours = threading.get_ident()
    kept = [(owner, name, getattr(owner, name)) for owner, name in LASTING]

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == ours:
                detail = arguments[2] if name in ("set_alias", "delete_alias") else ""
                label = f"{name} {detail}".strip()
                if at == len(steps) or (at == label and label not in steps):
                    os.kill(os.getpid(), number)
                steps.append(label)
            return call(*arguments, **options)

        return step

    for owner, name, call in kept:
        setattr(owner, name, wrapped(name, call))
    try:
        yield steps
    finally:
        for owner, name, call in kept:
            setattr(owner, name, call)


if __name__ == "__main__":
    main()
