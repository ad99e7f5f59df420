"""The version of the measuring code, as recorded by Git."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import gate
from gate.signing import predicates
from gate.signing.predicates import code_version

VERSION = gate.__version__


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    completed = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return completed.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "-q")
    return tmp_path


def test_code_version_has_the_commit_and_a_dirty_flag(repository: Path) -> None:
    assert code_version(repository).commit is None  # the repository has no commit yet
    (repository / "model.py").write_text("1\n")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "first")
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "inside").mkdir()
    (repository / "notes.txt").write_text("of nobody's concern")
    clean = code_version(repository / "inside")
    assert (clean.parity_gate, clean.commit, clean.dirty) == (VERSION, commit, False)
    (repository / "model.py").write_text("2\n")
    assert code_version(repository).dirty is True


def test_code_version_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    version = code_version(tmp_path)
    assert (version.parity_gate, version.commit, version.dirty) == (VERSION, None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_version(tmp_path).commit is None


def test_hanging_git_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(predicates, "_TIMEOUT_S", 0.2)
    assert code_version(tmp_path).commit is None
