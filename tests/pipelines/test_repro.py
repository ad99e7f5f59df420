from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines import paths, repro
from pipelines.promotion_report import PromotionReport
from pipelines.repro import last_promotion, promotion_is_due
from pipelines.stage import Stopped, exit_code
from pipelines.stage_results import StageResults


@pytest.fixture
def promoted(promoted_project: Path) -> PromotionReport:
    report = last_promotion()
    assert report is not None
    return report


@pytest.mark.proof
def test_promotion_is_due_when_the_version_is_missing(
    promoted: PromotionReport, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(empty_database, "other.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other.db")
    assert "has no version 1 of tiny" in str(promotion_is_due())


@pytest.mark.parametrize(
    ("fields", "due"),
    [
        ({"outcome": "dry_run", "version": None}, True),
        ({"outcome": "refused", "version": None}, False),
        ({"outcome": "unchanged"}, False),
    ],
)
def test_due_by_outcome(promoted: PromotionReport, fields: dict[str, Any], due: bool) -> None:
    promoted.model_copy(update=fields).save(paths.PROMOTION)
    assert (promotion_is_due() is not None) is due


@pytest.fixture
def fake_dvc(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A fake `dvc`. The list contains its action, its exit code and the recorded stages."""
    plan: list[Any] = []

    def run(_arguments: list[str], results: StageResults) -> int:
        act, code, *stages = plan
        act()
        lines = "".join(f"{stage}\n" for stage in stages)
        Path(results.environment["PARITY_GATE_RAN"]).write_text(lines)
        return int(code)

    monkeypatch.setattr(repro, "_dvc", run)
    monkeypatch.setattr(sys, "argv", ["repro"])
    return plan


def refuse(report: PromotionReport) -> None:
    report.model_copy(update={"outcome": "refused"}).save(paths.PROMOTION)


def test_exit_codes_of_make_repro(
    promoted: PromotionReport, fake_dvc: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_dvc[:] = [lambda: None, 0, "parity 0", "promote 0"]
    assert repro.main() == 0
    assert "Result:    Promoted" in capsys.readouterr().out
    fake_dvc[:] = [lambda: refuse(promoted), 255, "promote 1"]
    assert repro.main() == 1
    fake_dvc[:] = [lambda: None, 255, "prepare 0", "export 1"]
    assert repro.main() == 1
    assert "Rejected by the stage 'export'" in capsys.readouterr().err
    # An earlier rejection is not the reason for a later failure.
    fake_dvc[:] = [lambda: None, 255]
    assert repro.main() == 2
    assert "a stage failed" in capsys.readouterr().err
    fake_dvc[:] = [lambda: None, 255, "prepare 0", "train 2"]
    assert repro.main() == 2
    assert "the stage 'train' failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ((), "Result:    no stage had to run"),
        (("export 0", "parity 0"), "Result:    ran export, parity; nothing was decided"),
    ],
)
def test_earlier_decision_is_not_reported(
    promoted: PromotionReport, fake_dvc: list[Any], capsys: pytest.CaptureFixture[str],
    stages: tuple[str, ...], says: str,
) -> None:  # fmt: skip
    fake_dvc[:] = [lambda: None, 0, *stages]
    assert repro.main() == 0
    printed = capsys.readouterr().out
    assert says in printed
    assert "Promoted" not in printed
    assert str(paths.DECISION) not in printed
    assert not list(paths.state().glob("ran-*"))


def test_due_promotion_removes_the_decision(promoted: PromotionReport, fake_dvc: list[Any]) -> None:
    promoted.model_copy(update={"outcome": "dry_run"}).save(paths.PROMOTION)
    observed: list[bool] = []
    fake_dvc[:] = [lambda: observed.append(paths.DECISION.exists()), 0]
    repro.main()
    assert observed == [False]


def test_untrusted_measurement_is_repeated(
    promoted: PromotionReport, fake_dvc: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    there: list[bool] = []
    fake_dvc[:] = [lambda: there.append(paths.EVIDENCE_STATEMENT.exists()), 0]
    assert repro.main() == 0
    assert "measured again" not in capsys.readouterr().out
    shutil.rmtree(paths.state())  # the key is in this folder
    assert repro.main() == 0
    assert there == [True, False]
    printed = capsys.readouterr()
    assert "reports/evidence.json is measured again: the statement on the evidence" in printed.out
    assert "created " in printed.err


def create_failing_stage(error: BaseException) -> Any:
    def main() -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (Stopped(), 143),
        (OSError(28, "No space left on device"), 2),
        (OSError(5, "Input/output error"), 2),
        (RuntimeError("boom"), 2),
    ],
)
def test_errors_do_not_have_the_exit_code_of_a_rejection(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(create_failing_stage(error)) == code
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_sigterm_runs_cleanup() -> None:
    code = (
        "import os, signal\n"
        "from pipelines import stage\n"
        "def main():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    finally:\n"
        "        print('closed')\n"
        "    return 0\n"
        "stage.run(main)\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert completed.returncode == 143
    assert completed.stdout == "closed\n"
