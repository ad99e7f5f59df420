"""Runs of the commands: how they end, and when a recorded run is trusted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gate.errors import RegistryUnavailable
from gate.mlflow_client.runs import (
    DECIDED_TAG,
    EXPERIMENT,
    RunLogger,
    RunReference,
    Runs,
    killed_by_signals,
)
from gate.records.layout import RUN
from tests.mlflow_client.conftest import get_run
from tests.report.samples import failed, passed


@pytest.mark.parametrize(
    ("error", "expected"),
    [(None, "FINISHED"), (ValueError(), "FAILED"), (KeyboardInterrupt(), "KILLED")],
)
def test_run_ends_with_its_work(runs: Runs, error: BaseException | None, expected: str) -> None:
    try:
        with runs.new("gate") as page:
            assert get_run(page).info.status == "RUNNING"
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert get_run(page).info.status == expected


def test_rejection_ends_the_run_as_failed(runs: Runs) -> None:
    with runs.new("gate") as page:
        page.ends = "FAILED"
    assert get_run(page).info.status == "FAILED"


def test_artifacts_are_stored_next_to_the_database(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with Runs(uri).new("gate") as page:
        page.text("x", "x.txt")
    assert list((tmp_path / "mlartifacts" / EXPERIMENT).rglob("x.txt"))


def record_run(runs: Runs, report: Path) -> RunLogger:
    """Record a run with the decision of `passed()` and a reference to it in the report."""
    with runs.new("gate") as page:
        page.tags({DECIDED_TAG: passed()[0].digest().hex})
    runs.save_reference(page, report)
    return page


def test_recorded_run_is_found(runs: Runs, tmp_path: Path) -> None:
    page = record_run(runs, tmp_path)
    result = runs.recorded(tmp_path, passed()[0])
    assert result is not None
    assert (result.run_id, result.ends) == (page.run_id, "FINISHED")


def _change(report: Path, **fields: str) -> None:
    path = report / RUN
    RunReference.load(path).model_copy(update=fields).save(path)


TAMPERED: dict[str, Callable[[RunLogger, Path], object]] = {
    "no file": lambda page, report: (report / RUN).unlink(),
    "a torn file": lambda page, report: (report / RUN).write_text('{"run_id": "'),
    "another server": lambda page, report: _change(report, tracking_uri="http://127.0.0.1:1"),
    "an unknown run": lambda page, report: _change(report, run_id="0" * 32),
    "a deleted run": lambda page, report: page.client.delete_run(page.run_id),
    "of another decision": lambda page, report: page.tags({DECIDED_TAG: failed()[0].digest().hex}),
    "promoted already": lambda page, report: page.tags({"gate.promotion": "promoted"}),
    "not whole": lambda page, report: page.client.delete_tag(page.run_id, DECIDED_TAG),
}


@pytest.mark.rows(4)
@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED)
def test_run_reference_is_verified(
    runs: Runs, tmp_path: Path, tamper: Callable[[RunLogger, Path], object]
) -> None:
    tamper(record_run(runs, tmp_path), tmp_path)
    assert runs.recorded(tmp_path, passed()[0]) is None


def test_unreachable_server_is_reported() -> None:
    with pytest.raises(RegistryUnavailable):
        Runs("http://127.0.0.1:1")


@pytest.mark.further
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_forked_process_keeps_its_signal_handlers() -> None:
    """A user's worker pool ends its workers by SIGTERM, which must not end the check."""
    handler = signal.getsignal(signal.SIGTERM)
    with killed_by_signals(lambda: None):
        child = os.fork()
        if child == 0:
            is_restored = (
                signal.getsignal(signal.SIGTERM) == handler and signal.set_wakeup_fd(-1) == -1
            )
            os._exit(0 if is_restored else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert signal.getsignal(signal.SIGTERM) == handler
