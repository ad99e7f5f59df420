"""The commit in the version is read from git's files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import gate
from gate import installation
from tests.hidden import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _checkout(folder: Path, head: str, **files: str) -> Path:
    git = folder / ".git"
    git.mkdir()
    (git / "HEAD").write_text(f"{head}\n")
    for name, text in files.items():
        path = git / name.replace("__", "/").replace("_refs", "-refs")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("head", "files", "commit"),
    [
        (COMMIT, {}, COMMIT),
        ("ref: refs/heads/main", {"refs__heads__main": f"{COMMIT}\n"}, COMMIT),
        ("ref: refs/heads/main", {"packed_refs": f"# pack-refs\n{COMMIT} refs/heads/main\n"}, COMMIT),
        ("ref: refs/heads/main", {"packed_refs": f"{COMMIT} refs/heads/other\n"}, None),
        ("ref: refs/heads/main", {}, None),
        ("ref: refs/heads/main", {"refs__heads__main": "<script>"}, None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_checked_out_commit(
    tmp_path: Path, head: str, files: dict[str, str], commit: str | None
) -> None:
    assert installation.commit_of(_checkout(tmp_path, head, **files)) == commit


def test_commit_matches_git() -> None:
    completed = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if completed.returncode != 0:
        pytest.skip("no checkout")
    assert installation.commit_of(ROOT) == completed.stdout.strip()


def test_wheel_records_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package_folder = tmp_path / "gate" / "package"
    monkeypatch.setattr(installation, "_HERE", package_folder)
    assert re.fullmatch(r"\d+\.\d+\.\d+", installation.version_text())
    package_folder.mkdir(parents=True)
    (package_folder / installation.COMMIT_FILE).write_text(f"{COMMIT}\n")
    assert installation.version_text() == f"{gate.__version__}, commit {COMMIT[:12]}"
