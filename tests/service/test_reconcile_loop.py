from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gate import GateError
from gate.errors import RegistryUnavailable, ResourceGone, StorageError
from gate.service import reconcile_loop
from gate.service.monitoring import Failed, StepResult
from gate.service.reconcile_loop import ReconcileLoop
from tests.service.deliveries import MODEL, Recorder, wait_until


@contextmanager
def run_loop(
    recorder: Any, *, models: tuple[str, ...] = (MODEL,), interval_s: float = 3600.0
) -> Iterator[ReconcileLoop]:
    worker = ReconcileLoop(recorder, models=models, interval_s=interval_s)
    worker.start()
    try:
        yield worker
    finally:
        assert worker.stop(timeout_s=120)


def has_metric(worker: ReconcileLoop, line: str) -> bool:
    return line in worker.metrics.text().decode()


def test_each_interval_reconciles_every_model() -> None:
    recorder = Recorder()
    with run_loop(recorder, models=("a", "b"), interval_s=0.1):
        wait_until(lambda: recorder.calls.count(("a", "timer")) >= 4)
    difference = recorder.calls.count(("a", "timer")) - recorder.calls.count(("b", "timer"))
    assert abs(difference) <= 1


def test_loop_without_a_finished_reconcile_has_a_problem() -> None:
    down, stuck, resume = threading.Event(), threading.Event(), threading.Event()
    down.set()

    def effect(_model: str, _cause: str) -> None:
        if down.is_set():
            raise RegistryUnavailable("no server answers")
        if stuck.is_set():
            resume.wait()

    with run_loop(Recorder(effect), interval_s=0.01) as worker:
        assert worker.problem() == "has not reconciled a model yet"
        down.clear()
        wait_until(lambda: worker.problem() is None)
        stuck.set()
        wait_until(lambda: "has not reconciled a model for" in (worker.problem() or ""))
        resume.set()
    assert worker.problem() == "is not running"


def test_wake_of_an_unserved_model_is_ignored() -> None:
    recorder = Recorder()
    with run_loop(recorder) as worker:
        wait_until(lambda: recorder.ended)
        worker.wake("another")
        time.sleep(0.1)
    assert recorder.calls == [(MODEL, "timer")]


def test_wakes_during_a_reconcile_are_merged() -> None:
    started, resume = threading.Event(), threading.Event()

    def effect(_model: str, cause: str) -> None:
        if cause == "webhook":
            started.set()
            resume.wait()

    recorder = Recorder(effect)
    with run_loop(recorder) as worker:
        worker.wake(MODEL)
        started.wait()
        for _ in range(1000):
            worker.wake(MODEL)
        resume.set()
        wait_until(lambda: len(recorder.ended) == 3)
        time.sleep(0.1)
    assert recorder.causes == ["webhook", "webhook"]


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (RegistryUnavailable("no server"), "RegistryUnavailable"),
        (RecursionError("a defect"), "unexpected"),
    ],
)
def test_failed_reconcile_is_retried(
    monkeypatch: pytest.MonkeyPatch, error: Exception, label: str
) -> None:
    monkeypatch.setattr(reconcile_loop, "_backoff", lambda attempts: 0.05 * attempts)
    failures = iter([error, error, error])

    def effect(_model: str, _cause: str) -> None:
        if result := next(failures, None):
            raise result

    recorder = Recorder(effect)
    with run_loop(recorder) as worker:
        wait_until(lambda: recorder.ended)
        assert worker.alive
        assert has_metric(worker, f'parity_gate_reconcile_failures_total{{error="{label}"}} 3.0')
    assert len(recorder.calls) == 4


@pytest.mark.parametrize(
    ("errors", "waits"),
    [
        ([ResourceGone("deleted")], False),
        ([ResourceGone("deleted"), RegistryUnavailable("away")], True),
        ([StorageError("full"), KeyError("a fault")], True),
    ],
)
def test_partial_failure_records_results_and_retries(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    errors: list[Exception],
    waits: bool,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(reconcile_loop, "_backoff", lambda attempts: 0.05)
    calls = []

    def reconcile(model: str, *, cause: str) -> list[StepResult | Failed]:
        calls.append(cause)
        if len(calls) > 1:
            return []
        failed = [Failed("review", error) for error in errors]
        return [StepResult("guard", "reverted", "1", "taken back"), *failed]

    with run_loop(reconcile) as worker:
        wait_until(
            lambda: has_metric(
                worker, 'parity_gate_actions_total{kind="guard",outcome="reverted"} 1.0'
            )
        )
        for error in errors:
            label = type(error).__name__ if isinstance(error, GateError) else "unexpected"
            wait_until(lambda label=label: has_metric(worker, f'{{error="{label}"}} 1.0'))
            wait_until(lambda error=error: str(error) in caplog.text)
        time.sleep(0.3)
    assert len(calls) == 1 + waits
    assert "taken back" in caplog.text


@pytest.mark.parametrize(("attempts", "seconds"), [(1, 1), (2, 2), (3, 4), (7, 60), (5000, 60)])
def test_backoff_grows_to_a_minute(attempts: int, seconds: float) -> None:
    assert reconcile_loop._backoff(attempts) == seconds


def test_stop_finishes_the_running_reconcile_only() -> None:
    started, resume = threading.Event(), threading.Event()

    def effect(_model: str, cause: str) -> None:
        if cause == "webhook":
            started.set()
            resume.wait()

    recorder = Recorder(effect)
    with run_loop(recorder, interval_s=0.2) as worker:
        worker.wake(MODEL)
        started.wait()
        worker.wake(MODEL)
        assert not worker.stop(timeout_s=0.01)
        assert not worker.alive
        resume.set()
        assert worker.stop(timeout_s=120)
    assert recorder.calls[-1] == (MODEL, "webhook")
    assert recorder.causes == ["webhook"]


def test_internal_error_does_not_end_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reconcile_loop, "_backoff", lambda attempts: 0.05)
    recorder, faults = Recorder(), iter([KeyError("a fault"), MemoryError()])
    original = ReconcileLoop._reconcile_model

    def fail_first(self: ReconcileLoop, model: str, *, cause: str) -> bool:
        if result := next(faults, None):
            raise result
        return original(self, model, cause=cause)

    monkeypatch.setattr(ReconcileLoop, "_reconcile_model", fail_first)
    with run_loop(recorder):
        wait_until(lambda: recorder.ended)
    assert "an internal error" in caplog.text


def test_frequent_wakes_of_one_model_do_not_starve_others() -> None:
    def wake_again(model: str, _cause: str) -> None:
        if model == MODEL:
            worker.wake(MODEL)

    recorder = Recorder(wake_again)
    worker = ReconcileLoop(recorder, models=("a", MODEL), interval_s=0.05)
    worker.start()
    try:
        wait_until(lambda: recorder.calls.count(("a", "timer")) >= 3)
    finally:
        assert worker.stop(timeout_s=120)
    assert recorder.causes
