"""Supported versions of dependencies, and errors for older ones."""

from __future__ import annotations

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
        ("onnxruntime", "1.21.1", True),
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
