from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gate.errors import EvidenceError, GateError, RegistryUnavailable, ResourceGone, StorageError
from gate.service import reconcile_loop
from gate.service.monitoring import Failed, ServiceMetrics, StepResult
from gate.service.reconcile_loop import ReconcileLoop
from tests.service.deliveries import MODEL, Recorder, until


@contextmanager
def working(
    recorder: Any, *, models: tuple[str, ...] = (MODEL,), interval_s: float = 3600.0
) -> Iterator[ReconcileLoop]:
    worker = ReconcileLoop(recorder, models=models, interval_s=interval_s, metrics=ServiceMetrics())
    worker.start()
    try:
        yield worker
    finally:
        assert worker.stop(timeout_s=120)


def metric(worker: ReconcileLoop, line: str) -> bool:
    return line in worker._metrics.text().decode()


def test_it_looks_at_every_model_first() -> None:
    recorder = Recorder()
    with working(recorder, models=("a", "b", "c")):
        until(lambda: len(recorder.ended) == 3)
    assert sorted(recorder.calls) == [(model, "timer") for model in "abc"]


def test_and_again_after_every_interval() -> None:
    recorder = Recorder()
    with working(recorder, models=("a", "b"), interval_s=0.1):
        until(lambda: recorder.calls.count(("a", "timer")) >= 4)
    difference = recorder.calls.count(("a", "timer")) - recorder.calls.count(("b", "timer"))
    assert abs(difference) <= 1


def test_waking_is_immediate() -> None:
    recorder = Recorder()
    with working(recorder) as worker:
        until(lambda: recorder.ended)
        for number in range(1, 6):
            worker.wake(MODEL)
            until(lambda number=number: recorder.causes == ["webhook"] * number)


def test_a_model_that_is_not_looked_after_wakes_nothing() -> None:
    recorder = Recorder()
    with working(recorder) as worker:
        until(lambda: recorder.ended)
        worker.wake("another")
        time.sleep(0.1)
    assert recorder.calls == [(MODEL, "timer")]


def test_one_look_serves_all_that_came_before_it() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def effect(_model: str, cause: str) -> None:
        if cause == "webhook":
            begun.set()
            go_on.wait()

    recorder = Recorder(effect)
    with working(recorder) as worker:
        worker.wake(MODEL)
        begun.wait()
        for _ in range(1000):
            worker.wake(MODEL)
        go_on.set()
        until(lambda: len(recorder.ended) == 3)
        time.sleep(0.1)
    assert recorder.causes == ["webhook", "webhook"]


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (RegistryUnavailable("no server"), "RegistryUnavailable"),
        (EvidenceError("a torn record"), "EvidenceError"),
        (ValueError("a fault of ours"), "unexpected"),
        (RecursionError(), "unexpected"),
    ],
)
def test_what_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, label: str
) -> None:
    monkeypatch.setattr(reconcile_loop, "_backoff", lambda attempts: 0.05 * attempts)
    failures = iter([error, error, error])

    def effect(_model: str, _cause: str) -> None:
        if found := next(failures, None):
            raise found

    recorder = Recorder(effect)
    with working(recorder) as worker:
        until(lambda: recorder.ended)
        assert worker.alive
        assert metric(worker, f'parity_gate_reconcile_failures_total{{error="{label}"}} 3.0')
    assert len(recorder.calls) == 4


def test_what_is_gone_is_written_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reconcile_loop, "_backoff", lambda attempts: 0.01)

    def effect(_model: str, _cause: str) -> None:
        raise ResourceGone("version 2 was deleted")

    recorder = Recorder(effect)
    with working(recorder) as worker:
        until(lambda: "no retry" in caplog.text)
        worker.wake("another")  # a round in which it would be tried again
        time.sleep(0.1)
        assert worker.registry_silence_s() is not None
    assert len(recorder.calls) == 1
    assert "no retry: version 2 was deleted" in caplog.text


@pytest.mark.parametrize(
    ("errors", "waits"),
    [
        ([ResourceGone("deleted")], False),
        ([ResourceGone("deleted"), RegistryUnavailable("away")], True),
        ([StorageError("full"), KeyError("a fault")], True),
    ],
)
def test_what_was_done_counts_and_what_failed_beside_it_is_tried_again(
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

    with working(reconcile) as worker:
        until(
            lambda: metric(worker, 'parity_gate_actions_total{kind="guard",outcome="reverted"} 1.0')
        )
        for error in errors:
            label = type(error).__name__ if isinstance(error, GateError) else "unexpected"
            until(lambda label=label: metric(worker, f'{{error="{label}"}} 1.0'))
            until(lambda error=error: str(error) in caplog.text)
        time.sleep(0.3)
    assert len(calls) == 1 + waits
    assert "taken back" in caplog.text


@pytest.mark.parametrize(("attempts", "seconds"), [(1, 1), (2, 2), (3, 4), (7, 60), (5000, 60)])
def test_waiting_grows_to_a_minute(attempts: int, seconds: float) -> None:
    assert reconcile_loop._backoff(attempts) == seconds


def test_stopping_finishes_what_is_under_way_and_begins_nothing_more() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def effect(_model: str, cause: str) -> None:
        if cause == "webhook":
            begun.set()
            go_on.wait()

    recorder = Recorder(effect)
    with working(recorder, interval_s=0.2) as worker:
        worker.wake(MODEL)
        begun.wait()
        worker.wake(MODEL)
        assert not worker.stop(timeout_s=0.01)
        assert not worker.alive
        go_on.set()
        assert worker.stop(timeout_s=120)
    assert recorder.calls[-1] == (MODEL, "webhook")
    assert recorder.causes == ["webhook"]


def test_a_fault_of_its_own_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reconcile_loop, "_backoff", lambda attempts: 0.05)
    recorder, faults = Recorder(), iter([KeyError("a fault"), MemoryError()])
    look = ReconcileLoop._reconcile_model

    def faulty(self: ReconcileLoop, model: str, *, cause: str) -> str | None:
        if found := next(faults, None):
            raise found
        return look(self, model, cause=cause)

    monkeypatch.setattr(ReconcileLoop, "_reconcile_model", faulty)
    with working(recorder):
        until(lambda: recorder.ended)
    assert "an internal error" in caplog.text


def test_a_model_that_is_woken_again_and_again_starves_no_other() -> None:
    def wake_again(model: str, _cause: str) -> None:
        if model == MODEL:
            worker.wake(MODEL)

    recorder = Recorder(wake_again)
    worker = ReconcileLoop(recorder, models=("a", MODEL), interval_s=0.05, metrics=ServiceMetrics())
    worker.start()
    try:
        until(lambda: recorder.calls.count(("a", "timer")) >= 3)
    finally:
        assert worker.stop(timeout_s=120)
    assert recorder.causes


def test_what_was_done_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with working(Recorder()) as worker:
        worker.wake(MODEL)
        until(
            lambda: metric(
                worker, 'parity_gate_actions_total{kind="review",outcome="promoted"} 2.0'
            )
        )
    fields = [getattr(record, "fields", None) for record in caplog.records]
    assert {
        "model": MODEL, "cause": "webhook", "kind": "review", "outcome": "promoted", "to": "3",
    } in fields  # fmt: skip
    assert "approved by a test" in caplog.text


def test_it_rests_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, looked, due = Recorder(), [], ReconcileLoop._next_due
    monkeypatch.setattr(ReconcileLoop, "_next_due", lambda self: looked.append(1) or due(self))
    with working(recorder):
        until(lambda: recorder.ended)
        time.sleep(0.5)
    assert len(looked) < 6
