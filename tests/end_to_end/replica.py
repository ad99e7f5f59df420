"""A replica of the service on one host, look by look, each in a process of its own that is killed
or stopped before the step that an order names.

    python -m tests.end_to_end.replica SETTINGS

An order: `at`, the number of a step (none: nothing happens to it), and `signal`; or
`continue`, of the look that was stopped. `promote`: a seed, of a release that is promoted instead of
a look; `lease_s`: of the lock. Steps are all calls of the registry and of the database.
The answer: `steps`, `done` and `failed`, or `killed`, or `stopped`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Imported once by the process that forks.
import mlflow
import onnxruntime

import gate.ledger.lock
from gate.ledger.database import StateDatabase
from gate.mlflow_client.connection import quiet_process
from gate.mlflow_client.registry import MlflowRegistry
from gate.service.monitoring import Failed, StepResult
from gate.service.reconciler import open_ledger, reconciler
from gate.service.settings import ServiceSettings
from gate.signing.keys import SigningKey
from gate.signing.trust import Trust
from tests.end_to_end.ci import POLICY, signed_release
from tests.registry.promoting import promote
from tests.registry.servers import make_run
from tests.sandbox.in_process import always_read_here

__all__ = ["main", "mlflow", "onnxruntime"]

LEASE_S = 0.6
CALLS = (
    (MlflowRegistry, "_using"), (StateDatabase, "reading"), (StateDatabase, "writing"),
)  # fmt: skip
"""All that any of the registry and of the database is read and written by."""


def main() -> None:
    settings = ServiceSettings.from_options(**json.loads(sys.argv[1]))
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
    gate.ledger.lock.LEASE_S = order.get("lease_s", LEASE_S)
    steps: list[str] = []
    try:
        act = _promotion(settings, order["promote"]) if "promote" in order else _look(settings)
        with counted(order.get("at"), order.get("signal", signal.SIGKILL)) as steps:
            result = act()
        failed = [
            f"{type(item.error).__name__}: {item.error}"
            for item in result
            if isinstance(item, Failed)
        ]
        _answer(steps=steps, done=len(result) - len(failed), failed=failed)
    except Exception as error:
        _answer(steps=steps, done=0, failed=[f"{type(error).__name__}: {error}"])
    finally:
        os._exit(0)


def _look(settings: ServiceSettings) -> Callable[[], Sequence[StepResult | Failed]]:
    return lambda: reconciler(settings)(settings.models[0], cause="delivery 1")


def _promotion(settings: ServiceSettings, seed: int) -> Callable[[], list[StepResult]]:
    """What gate promote does in CI, with the ledger, of a release that was measured and signed."""
    uri, model = settings.tracking_uri, settings.models[0]
    trust = Trust.from_file(settings.trust)
    created = signed_release(
        MlflowRegistry(uri), "ci.pem", run_id=make_run(uri), seed=seed, model=model
    )

    def act() -> list[StepResult]:
        key = None if settings.key is None else SigningKey.load(settings.key)
        registry, ledger = MlflowRegistry(uri), open_ledger(settings, trust, key=key)
        result = promote(registry, created, policy=POLICY, ledger=ledger, trust=trust)
        return [StepResult("hand_in", "promoted", result.version, result.outcome)]

    return act


def _answer(**answer: Any) -> None:
    os.write(1, (json.dumps(answer) + "\n").encode())


@contextmanager
def counted(at: int | None, number: int) -> Iterator[list[str]]:
    """Keep the names of the steps of this thread, and not of the one that renews the lease;
    before that one a signal comes."""
    steps: list[str] = []
    ours = threading.get_ident()
    kept = [(owner, name, getattr(owner, name)) for owner, name in CALLS]

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == ours:
                if at == len(steps):
                    os.kill(os.getpid(), number)
                steps.append(name)
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
