from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gate.errors import EvidenceError, GateError, RegistryUnavailable, ResourceGone, StorageError
from gate.service import reconcile_loop
from gate.service.inbox import Inbox, Memory
from gate.service.monitoring import Failed, ServiceMetrics, StepResult
from gate.service.reconcile_loop import Intervals, ReconcileLoop
from tests.service.deliveries import MODEL, Recorder, delivery, until


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    opened = Inbox(f"sqlite:///{tmp_path}/inbox.db", lease_s=0.6)
    yield opened
    opened.close()


@contextmanager
def working(inbox: Inbox, recorder: Any, **rhythm: Any) -> Iterator[ReconcileLoop]:
    rhythm = {"models": (MODEL,), "interval_s": 3600.0, "poll_s": 0.05} | rhythm
    worker = ReconcileLoop(
        inbox, recorder, rhythm=Intervals(**rhythm), metrics=ServiceMetrics(inbox)
    )
    worker.start()
    try:
        yield worker
    finally:
        assert worker.stop(timeout_s=20)


def metric(worker: ReconcileLoop, line: str) -> bool:
    return line in worker._metrics.text().decode()


def test_it_looks_at_every_model_first(inbox: Inbox) -> None:
    recorder = Recorder()
    with working(inbox, recorder, models=("a", "b", "c")):
        until(lambda: len(recorder.ended) == 3)
    assert sorted(recorder.calls) == [(model, "timer") for model in "abc"]


def test_and_again_after_every_interval(inbox: Inbox) -> None:
    recorder = Recorder()
    with working(inbox, recorder, models=("a", "b"), interval_s=0.1):
        until(lambda: recorder.calls.count(("a", "timer")) >= 4)
    difference = recorder.calls.count(("a", "timer")) - recorder.calls.count(("b", "timer"))
    assert abs(difference) <= 1


def test_waking_is_immediate(inbox: Inbox) -> None:
    recorder = Recorder()
    with working(inbox, recorder, poll_s=3600) as worker:
        until(lambda: recorder.ended)
        for number in range(5):
            time.sleep(0.05)
            inbox.receive([delivery(str(number))])
            start = time.monotonic()
            worker.wake()
            until(lambda number=number: f"delivery {number}" in recorder.causes)
            assert time.monotonic() - start < 10


def test_what_another_process_received_is_found(inbox: Inbox) -> None:
    recorder = Recorder()
    with working(inbox, recorder):
        inbox.receive([delivery("1")])
        until(lambda: recorder.causes == ["delivery 1"])


def test_one_look_serves_all_that_came_before_it(inbox: Inbox) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def effect(_model: str, cause: str) -> None:
        if cause == "delivery 0":
            begun.set()
            go_on.wait(10)

    recorder = Recorder(effect)
    with working(inbox, recorder) as worker:
        inbox.receive([delivery("0")])
        worker.wake()
        begun.wait(10)
        for number in range(1, 4):
            inbox.receive([delivery(str(number))])
            worker.wake()
        go_on.set()
        until(lambda: inbox.depth() == 0)
    assert recorder.causes == ["delivery 0", "delivery 1 and 2 more"]


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
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch, error: Exception, label: str
) -> None:
    monkeypatch.setattr(reconcile_loop, "_backoff", lambda attempts: 0.05 * attempts)
    failures = iter([error, error, error])

    def effect(_model: str, _cause: str) -> None:
        if found := next(failures, None):
            raise found

    recorder = Recorder(effect)
    inbox.receive([delivery("1")])
    with working(inbox, recorder) as worker:
        until(lambda: inbox.depth() == 0)
        until(lambda: ("digits", "timer") in recorder.ended)
        assert worker.alive
        assert metric(worker, f'parity_gate_reconcile_failures_total{{error="{label}"}} 3.0')
    assert recorder.ended.count(("digits", "delivery 1")) == 1


def test_what_is_gone_is_written_off(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    def effect(_model: str, _cause: str) -> None:
        raise ResourceGone("version 2 was deleted")

    recorder = Recorder(effect)
    inbox.receive([delivery("1")])
    with working(inbox, recorder) as worker:
        until(lambda: inbox.depth() == 0)
        until(lambda: len(recorder.calls) == 2)
        time.sleep(0.3)
        assert worker.registry_silence_s() is not None
        assert metric(worker, 'parity_gate_reconcile_failures_total{error="ResourceGone"} 2.0')
    assert recorder.causes == ["delivery 1"]
    assert "written off: version 2 was deleted" in caplog.text


@pytest.mark.parametrize(
    ("errors", "waits"),
    [
        ([ResourceGone("deleted")], 0),
        ([ResourceGone("deleted"), RegistryUnavailable("away")], 1),
        ([StorageError("full"), KeyError("a fault")], 1),
    ],
)
def test_what_was_done_counts_and_what_failed_beside_it_is_tried_again(
    inbox: Inbox, caplog: pytest.LogCaptureFixture, errors: list[Exception], waits: int
) -> None:
    caplog.set_level(logging.INFO)
    calls = []

    def reconcile(model: str, *, cause: str) -> list[StepResult | Failed]:
        calls.append(cause)
        if cause == "timer":
            return []
        failed = [Failed("review", error) for error in errors]
        return [StepResult("guard", "reverted", "1", "taken back"), *failed]

    inbox.receive([delivery("1")])
    with working(inbox, reconcile) as worker:
        until(lambda: len(calls) == 2)
        until(
            lambda: metric(worker, 'parity_gate_actions_total{kind="guard",outcome="reverted"} 1.0')
        )
        for error in errors:
            label = type(error).__name__ if isinstance(error, GateError) else "unexpected"
            until(lambda label=label: metric(worker, f'{{error="{label}"}} 1.0'))
            assert str(error) in caplog.text
        time.sleep(0.2)
        assert inbox.depth() == waits
    assert "taken back" in caplog.text


@pytest.mark.parametrize(("attempts", "seconds"), [(1, 1), (2, 2), (3, 4), (7, 60), (5000, 60)])
def test_waiting_grows_to_a_minute(attempts: int, seconds: float) -> None:
    assert reconcile_loop._backoff(attempts) == seconds


def test_a_failing_delivery_does_not_spin(inbox: Inbox) -> None:
    def effect(_model: str, cause: str) -> None:
        if cause != "timer":
            raise RegistryUnavailable("no server")

    recorder = Recorder(effect)
    inbox.receive([delivery("1")])
    with working(inbox, recorder):
        until(lambda: recorder.causes)
        time.sleep(0.7)
    assert len(recorder.causes) == 1
    assert inbox.depth() == 1


def test_stopping_finishes_what_is_under_way_and_takes_nothing_more(inbox: Inbox) -> None:
    begun = threading.Event()

    def effect(_model: str, cause: str) -> None:
        if cause != "timer":
            begun.set()
            time.sleep(0.5)

    recorder = Recorder(effect)
    with working(inbox, recorder) as worker:
        inbox.receive([delivery("1")])
        begun.wait(10)
        inbox.receive([delivery("2")])
        assert not worker.stop(timeout_s=0.01)
        assert not worker.alive
        assert worker.stop(timeout_s=10)
    assert recorder.causes == ["delivery 1"]
    assert inbox.depth() == 1


def test_a_long_look_keeps_its_lease(tmp_path: Path) -> None:
    begun = threading.Event()
    inbox = Inbox(f"sqlite:///{tmp_path}/long.db", lease_s=3.0)  # a busy machine renews it in time

    def effect(_model: str, cause: str) -> None:
        if cause != "timer":
            begun.set()
            time.sleep(4.5)

    recorder = Recorder(effect)
    with closing(inbox), working(inbox, recorder):
        inbox.receive([delivery("1")])
        begun.wait(10)
        while inbox.depth():
            assert inbox.claim("another", models=(MODEL,)) is None
            time.sleep(0.05)
    assert recorder.causes == ["delivery 1"]


def test_the_timer_goes_on_without_the_inbox(
    inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    with working(inbox, recorder, interval_s=0.1) as worker:
        with inbox._writing() as connection:
            connection.exec_driver_sql("ALTER TABLE gate_inbox RENAME TO away")
        seen = len(recorder.calls)
        until(lambda: len(recorder.calls) > seen + 2)
        with inbox._writing() as connection:
            connection.exec_driver_sql("ALTER TABLE away RENAME TO gate_inbox")
        inbox.receive([delivery("1")])
        until(lambda: "delivery 1" in recorder.causes)
        assert worker.alive
    assert "Look at the database" in caplog.text


def test_a_fault_of_the_inbox_does_not_end_it(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, claim = Recorder(), inbox.claim
    faults = iter([KeyError("a fault"), MemoryError()])

    def faulty(*arguments: Any, **options: Any) -> Any:
        if found := next(faults, None):
            raise found
        return claim(*arguments, **options)

    monkeypatch.setattr(inbox, "claim", faulty)
    inbox.receive([delivery("1")])
    with working(inbox, recorder):
        until(lambda: recorder.causes == ["delivery 1"])
    assert "a fault of its own" in caplog.text


def test_a_slow_model_does_not_starve_the_timer(inbox: Inbox) -> None:
    recorder = Recorder(lambda _model, cause: time.sleep(0.05 if cause != "timer" else 0))
    numbers = iter(range(10_000))
    with working(inbox, recorder, models=("a", "digits"), interval_s=0.2):
        for _ in range(60):
            inbox.receive([delivery(str(next(numbers)))])
            time.sleep(0.02)
        assert recorder.calls.count(("a", "timer")) >= 3


def test_old_deliveries_are_forgotten(inbox: Inbox) -> None:
    """A batch at a time, all of them at once."""
    inbox.receive([delivery(str(number), model="another") for number in range(2500)])
    time.sleep(0.05)
    with working(inbox, Recorder(), memory=Memory(keep_s=0.01)):
        until(lambda: inbox.depth() == 0)


def test_what_was_done_is_logged_and_counted(
    inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    inbox.receive([delivery("1")])
    with working(inbox, Recorder()) as worker:
        until(
            lambda: metric(
                worker, 'parity_gate_actions_total{kind="review",outcome="promoted"} 2.0'
            )
        )
    fields = [getattr(record, "fields", None) for record in caplog.records]
    assert {
        "model": MODEL, "cause": "delivery 1", "kind": "review", "outcome": "promoted", "to": "3",
    } in fields  # fmt: skip
    assert "approved by a test" in caplog.text


def test_it_rests_when_there_is_nothing_to_do(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, claim, looked = Recorder(), inbox.claim, []
    monkeypatch.setattr(inbox, "claim", lambda *a, **o: looked.append(a) or claim(*a, **o))
    with working(inbox, recorder, poll_s=3600) as worker:
        until(lambda: recorder.ended)
        for _ in range(3):
            worker.wake()
            time.sleep(0.1)
    assert len(looked) < 12


def test_no_other_step_begins_once_it_is_stopping(inbox: Inbox) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def effect(_model: str, cause: str) -> None:
        if cause != "timer":
            begun.set()
            go_on.wait(10)

    recorder = Recorder(effect)
    with working(inbox, recorder, interval_s=0.05) as worker:
        inbox.receive([delivery("1")])
        begun.wait(10)
        time.sleep(0.1)  # the timer is due now
        assert not worker.stop(timeout_s=0.01)
        go_on.set()
        assert worker.stop(timeout_s=10)
    assert recorder.calls[-1] == (MODEL, "delivery 1")
