"""The version, the supported versions of dependencies, and `make release`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import gate
from gate import cli, installation
from gate.commands import doctor
from gate.errors import PackageMissing
from tests.exhaustive import exhaustive
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


PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def minimum_versions() -> dict[str, str]:
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    result = (re.match(r"([a-z-]+)(?:\[.*\])?>=([\d.]+)", line) for line in lines)
    return {match[1]: match[2] for match in result if match}


def test_minimum_versions_match_pyproject() -> None:
    assert {name: minimum_versions()[name] for name in installation.OLDEST} == installation.OLDEST


@pytest.mark.parametrize(
    ("module", "version", "refused"),
    [
        ("torch", "2.8.0", True),
        ("torch", "1.13.1+cpu", True),
        ("torch", "2.9.0a0+git1", False),
        ("torch", "2.9.1+cu128", False),
        ("torch", "2.15.0", False),
        ("torch", "3.0", False),
        ("onnx", "1.9.0", True),
    ],
)
def test_older_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: str, version: str, refused: bool
) -> None:
    real = metadata.version
    named = installation.distribution(module)
    monkeypatch.setattr(metadata, "version", lambda name: version if name == named else real(name))
    if not refused:
        installation.require("check")
        return
    with pytest.raises(PackageMissing, match=re.escape(version)) as error:
        installation.require("check")
    assert installation.OLDEST[module] in str(error.value)
    symptoms = {item.name: item for item in doctor._modules({})}
    assert symptoms[module].state == "missing"


def test_package_from_another_distribution(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "__all__", ["open", "close"])
    monkeypatch.setattr(sys, "argv", ["gate", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.run()
    assert ended.value.code == 2
    assert "not parity-gate's" in capsys.readouterr().err


WINDOWS = """
import builtins
whole = builtins.__import__

def windows(name, globals=None, *rest, **named):
    if name in ("fcntl", "resource") and (globals or {}).get("__name__", "").startswith("gate."):
        raise ImportError(name)
    return whole(name, globals, *rest, **named)

builtins.__import__ = windows
import gate.api, gate.cli, gate.commands.check, gate.sandbox.child, gate.service.app
from gate.storage.files import temporary_folder
with temporary_folder() as folder:
    assert folder.is_dir()
"""


@pytest.mark.further
def test_imports_work_without_posix_modules() -> None:
    subprocess.run([sys.executable, "-c", WINDOWS], check=True, capture_output=True)


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
