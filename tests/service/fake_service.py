"""Run `gate serve` without a registry and with a `Reconcile` that only records its calls.

    python -m tests.service.fake_service FILE [--slow SECONDS] -- serve …

Write `ready ADDRESS` to FILE first, then a line when a reconcile pass begins, its time, and a line
when it ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gate.service.monitoring import StepResult


def _write(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def main() -> None:
    separator = sys.argv.index("--")
    path, slow = Path(sys.argv[1]), float(sys.argv[3]) if separator > 2 else 0.0

    def reconcile(model: str, *, cause: str) -> list[StepResult]:
        _write(path, f"begin {model} {cause}")
        _write(path, f"begun-at {time.monotonic()}")
        if cause != "timer":
            time.sleep(slow)
        _write(path, f"end {model} {cause}")
        return []

    reconcile.report_damage = lambda model: _write(path, f"doubt {model}")  # type: ignore[attr-defined]

    from gate import cli
    from gate.mlflow_client import connection
    from gate.service import app, reconciler

    reconciler.reconciler = lambda settings, is_service: reconcile
    connection.check_server = lambda uri: None

    serve: Callable[..., None] = app.serve

    def serve_and_report(*arguments: object, **options: object) -> None:
        serve(*arguments, **options, ready=lambda address: _write(path, f"ready {address}"))

    app.serve = serve_and_report
    status = cli.main(sys.argv[separator + 1 :])
    heavy = {"torch", "torchvision"} & set(sys.modules)
    _write(path, f"exit {status} {sorted(heavy)}")
    sys.exit(status)


if __name__ == "__main__":
    main()
