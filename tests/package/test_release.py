"""`make release` on a clone of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gate
from tests.exhaustive import exhaustive
from tests.hidden import ROOT

GIT_IDENTITY = {"NAME": "tests", "EMAIL": "tests@example.org"}
TAG = f"v{gate.__version__}"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    command = ["git", "clone", "-q", "--no-tags", str(ROOT), str(folder)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        pytest.skip(f"this is no checkout that git can clone: {completed.stderr.strip()}")
    for name, value in GIT_IDENTITY.items():
        git(folder, "config", f"user.{name.lower()}", value)
    return folder


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def release(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-m", "pipelines.release"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_unready_checkout_is_not_released(clone: Path) -> None:
    (clone / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
    for commit in (False, True):
        result = release(clone)
        assert result.returncode == 2
        if not commit:
            git(clone, "commit", "-qam", "Change")
    assert "[Unreleased]" in result.stderr
    git(clone, "tag", TAG)
    assert release(clone).returncode == 2
    assert not (clone / "dist").exists()


@pytest.mark.slow
@exhaustive
@pytest.mark.proof
def test_release_is_built_checked_installed_and_tagged(clone: Path) -> None:
    result = release(clone)
    assert result.returncode == 0, result.stderr
    assert git(clone, "rev-parse", f"{TAG}^{{commit}}") == git(clone, "rev-parse", "HEAD")
    names = {path.name for path in (clone / "dist").iterdir()}
    version = gate.__version__
    assert names == {f"parity_gate-{version}-py3-none-any.whl", f"parity_gate-{version}.tar.gz"}
