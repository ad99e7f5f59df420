"""A replica of the service that runs single passes in forked processes.

A process can be killed or stopped before a given step.

    python -m tests.end_to_end.replica SETTINGS

Each order is a line of JSON with `at`, the number of a step (none: no signal), and `signal`; or
`continue` for the stopped process. `promote`: the seed of a release to promote instead of a
reconcile pass; `lease_s`: the lease of the lock. Steps are all calls of the registry and the
database.

The answer has `steps`, `done` and `failed`, or `killed`, or `stopped`.
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

# Imported once by the parent of the forked processes.
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
from tests.end_to_end.ci import POLICY, make_signed_release
from tests.registry.promoting import promote
from tests.registry.servers import make_run
from tests.sandbox.in_process import always_read_here

__all__ = ["main", "mlflow", "onnxruntime"]

LEASE_S = 0.6
CALLS = (
    (MlflowRegistry, "_using"), (StateDatabase, "reading"), (StateDatabase, "writing"),
)  # fmt: skip
"""The methods that every read and write of the registry and the database goes through."""


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
        act = (
            _make_promotion(settings, order["promote"])
            if "promote" in order
            else _make_reconcile(settings)
        )
        with record_steps(order.get("at"), order.get("signal", signal.SIGKILL)) as steps:
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


def _make_reconcile(settings: ServiceSettings) -> Callable[[], Sequence[StepResult | Failed]]:
    return lambda: reconciler(settings)(settings.models[0], cause="delivery 1")


def _make_promotion(settings: ServiceSettings, seed: int) -> Callable[[], list[StepResult]]:
    """Return a function that promotes a signed release with the ledger, as `gate promote` does."""
    uri, model = settings.tracking_uri, settings.models[0]
    trust = Trust.from_file(settings.trust)
    created = make_signed_release(
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
def record_steps(at: int | None, number: int) -> Iterator[list[str]]:
    """Record the steps of this thread, without those of the thread that renews the lease.

    Send the signal `number` before step `at`.
    """
    steps: list[str] = []
    thread = threading.get_ident()
    originals = [(owner, name, getattr(owner, name)) for owner, name in CALLS]

    def with_recording(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == thread:
                if at == len(steps):
                    os.kill(os.getpid(), number)
                steps.append(name)
            return call(*arguments, **options)

        return step

    for owner, name, call in originals:
        setattr(owner, name, with_recording(name, call))
    try:
        yield steps
    finally:
        for owner, name, call in originals:
            setattr(owner, name, call)


if __name__ == "__main__":
    main()
