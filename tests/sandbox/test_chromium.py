"""A missing requirement of Chromium is reported with the install command."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate import installation

STUB = "echo 'Command requires the chromium snap to be installed.' >&2; exit 1"
"""Ubuntu's transitional package."""


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Create these programs as the only ones on the path; `_` replaces a dash."""
    for name, script in scripts.items():
        program = folder / name.replace("_", "-")
        program.write_text(f"#!/bin/sh\necho run >> {folder}/runs\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(installation, "find_spec", lambda _: "there")


def test_missing_playwright_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda _: None)
    reason = installation.chromium_missing("browser")
    assert reason == "Playwright is not installed: pip install 'parity-gate[browser]'"


def test_any_browser_name_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch)
    assert installation.chromium_missing("browser") == (
        "no Chromium is installed: apt-get install chromium"
    )
    programs(tmp_path, monkeypatch, google_chrome="echo Google Chrome 140.0")
    assert installation.chromium_path() == str(tmp_path / "google-chrome")
    assert installation.chromium_missing("browser") is None
    assert (tmp_path / "runs").read_text() == "run\n"  # the program runs once


@pytest.mark.parametrize("script", [STUB, "exec /bin/sleep 60"])
def test_browser_that_does_not_start_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(installation, "_ANSWER_S", 0.3)
    programs(tmp_path, monkeypatch, chromium_browser=script)
    assert installation.chromium_path() is None
    assert "no Chromium is installed" in str(installation.chromium_missing("browser"))
    programs(tmp_path, monkeypatch, google_chrome="echo Google Chrome 140.0")
    assert installation.chromium_path() == str(tmp_path / "google-chrome")


def test_non_executable_browser_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chromium").write_bytes(b"\x7fELF nothing")
    (tmp_path / "chromium").chmod(0o755)
    programs(tmp_path, monkeypatch)
    assert installation.chromium_path() is None
