"""Long output is written to a log, whose path is printed after a failure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipelines import one_line

LONG_OUTPUT = "print('Collecting x\\n' * 400); print('the end'); raise SystemExit({code})"


def _run_one_line(log: Path, code: int) -> int:
    return one_line.main([str(log), sys.executable, "-c", LONG_OUTPUT.format(code=code)])


def test_success_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "install.log"
    assert _run_one_line(log, 0) == 0
    assert capfd.readouterr() == ("", "")
    assert log.read_text().count("Collecting x\n") == 400


def test_failure_shows_the_end_of_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "install.log"
    assert _run_one_line(log, 3) == 3
    printed = capfd.readouterr().err
    assert "the end\n" in printed
    assert printed.endswith(f"Failed with exit code 3. All that it printed: {log}\n")
    assert len(printed.splitlines()) == one_line.SHOWN_LINES + 1
