"""uv installs with pip's settings; long output is written to a log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import one_line
from pipelines.install import uv_settings

CONFIG = """\
:env:.find-links='/wheels'
global.cert='/certs.pem'
global.extra-index-url='file:///one file:///two'
global.no-index='true'
global.timeout='60'
"""


def test_indexes_and_certificates_of_pip_are_given_to_uv() -> None:
    assert uv_settings(CONFIG) == {
        "SSL_CERT_FILE": "/certs.pem",
        "UV_FIND_LINKS": "/wheels",
        "UV_INDEX": "file:///one file:///two",
        "UV_NO_INDEX": "true",
    }


@pytest.mark.further
def test_pip_is_tried_after_uv_and_its_exit_code_counts(monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "true")  # uv itself is already installed
    command = [sys.executable, "pipelines/install.py", "no-such-package"]
    completed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert completed.returncode == 1
    assert "Installing with pip, because uv failed" in completed.stdout
    assert "No matching distribution found for no-such-package" in completed.stderr


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
