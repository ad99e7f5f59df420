"""The Dockerfile's steps without a container engine.

A folder replaces the root, and a new virtual environment the image's environment. `make exhaustive`
runs these tests: each downloads hundreds of megabytes. docs/container.md lists what they can't
show.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from pip._internal.models.index import PyPI

from benchmarks.install_size import Installation
from tests.ci.test_container import ROOT, STAGES
from tests.end_to_end.stack import (
    deploy_approved_version,
    run_mlflow_server_with_webhooks,
    run_stack,
    wait_for,
)
from tests.exhaustive import exhaustive
from tests.free_ports import free_port
from tests.small_project import create_project as small_project

pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.timeout(3600)]
SERVICE_MB, BASE_MB = 900, 160
"""Size limits of the service's image and of its base image, in MB."""
FOLDERS = re.compile(r"(?<![\w.~-])/(?=(?:opt/gate|wheels|src|var/lib/gate|run/gate|work)\b)")
"""The beginnings of image paths in a step."""
NOBODY = 10001


@pytest.fixture
def root() -> Iterator[Path]:
    """A temporary folder in place of the image's root, readable by its user."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def run_stage(root: Path, name: str, arguments: Mapping[str, str]) -> Path:
    """Run the steps of a stage and of its base stages below `root`; return the working folder."""
    stage = STAGES[name]
    folder = run_stage(root, stage.base, arguments) if stage.base in STAGES else root
    environment = _create_environment(root)
    for step in stage.steps:
        if step.word == "WORKDIR":
            folder = root / step.rest.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif step.word == "COPY":
            *sources, target = step.rest.split()
            for source in sources:
                _copy(ROOT / source, folder / target, whole=len(sources) > 1)
        elif step.word == "RUN":
            line = FOLDERS.sub(f"{root}/", step.rest)
            subprocess.run(["sh", "-c", line], cwd=folder, env=environment, check=True)
        else:
            assert step.word == "ARG"
            environment[step.rest] = arguments[step.rest]
    return folder


def _create_environment(root: Path) -> dict[str, str]:
    """Return the environment of a step, with only the base image's Python on the path."""
    first = root / "usr" / "bin"
    first.mkdir(parents=True, exist_ok=True)
    python = first / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys._base_executable)} "$@"\n')
    python.chmod(0o755)
    pips = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    return pips | {"PATH": f"{first}{os.pathsep}/usr/bin{os.pathsep}/bin", "HOME": str(root)}


def _copy(source: Path, target: Path, *, whole: bool) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target / source.name if whole else target)


def create_image(root: Path, name: str, **arguments: str) -> Installation:
    """Run an image's packages stage; return its environment. Also creates the user's home."""
    run_stage(root, f"{name}-packages", arguments)
    home = root / "var" / "lib" / "gate"
    home.mkdir(parents=True)
    if os.getuid() == 0:
        os.chown(home, NOBODY, NOBODY)
    return Installation(root / "opt" / "gate", name, 0.0)


def variables(root: Path) -> dict[str, str]:
    """Return the environment variables of all images."""
    stated = STAGES["plain"].last("ENV") or ""
    arguments = dict(word.split("=", 1) for word in shlex.split(stated))
    path = os.pathsep.join(("/usr/bin", "/bin"))
    return {
        name: FOLDERS.sub(f"{root}/", value).replace("$PATH", path)
        for name, value in arguments.items()
    }


def is_healthy(root: Path, name: str, port: int) -> bool:
    """Run an image's health check for a server on another port; return whether it passes."""
    check = STAGES[name].last("HEALTHCHECK") or ""
    words = json.loads(check[check.index("[") :])
    words = [re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", word) for word in words]
    assert words[0] == "python"
    python = root / "opt" / "gate" / "bin" / "python"
    return subprocess.run([python, *words[1:]], check=False, capture_output=True).returncode == 0


def files(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def run_as_nobody(root: Path, *line: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as the image's user, who can write only to the volume.

    Run it as the current user if this is not root, or if only root can read this Python's folder.
    """
    reached = all(part.stat().st_mode & 0o001 for part in Path(sys._base_executable).parents)
    another = os.getuid() == 0 and reached
    who = {"user": NOBODY, "group": NOBODY, "extra_groups": ()} if another else {}
    return subprocess.run(
        line, cwd=folder, env=variables(root), capture_output=True, text=True, check=False, **who
    )


@exhaustive
def test_service_image_is_small_serves_and_writes_only_its_volumes(
    root: Path, tmp_path: Path
) -> None:
    created = create_image(root, "service")
    lacks = {"torch", "dvc", "scikit-learn", "matplotlib", "mlflow", "pandas"}
    assert not lacks & created.packages.keys()
    assert {"onnxruntime", "psycopg", "starlette"} <= created.packages.keys()
    print(f"the packages of the service: {created.size_bytes / 1e6:.0f} MB")
    assert created.size_bytes < (SERVICE_MB - BASE_MB) * 1e6
    before = files(created.folder)
    result = run_as_nobody(root, created.gate, "--version", folder=root)
    assert (result.returncode, result.stdout[:5]) == (0, "gate "), result.stderr
    settings = [f"{name}={value}" for name, value in variables(root).items()]
    gate = ("env", "-i", *settings, f"HOME={tmp_path}", str(created.gate))
    folder, registry = tmp_path / "service", tmp_path / "registry"
    folder.mkdir()
    registry.mkdir()
    with (
        run_mlflow_server_with_webhooks(registry) as server,
        run_stack(folder, server, "m", gate=gate) as complete,
    ):
        number = deploy_approved_version(complete)
        assert complete.deployed() == complete.digest(number)
        port = int(complete.address.rpartition(":")[2])
        assert is_healthy(root, "service", port)
        assert complete.stop() == 0
        assert not is_healthy(root, "service", port)
    assert files(created.folder) == before


@exhaustive
def test_registry_image_starts_and_is_healthy(root: Path, tmp_path: Path) -> None:
    created = create_image(root, "registry")
    assert {"mlflow", "psycopg"} <= created.packages.keys()
    port = free_port()
    words = json.loads(STAGES["registry"].last("CMD") or "[]")
    words[words.index("0.0.0.0")] = "127.0.0.1"
    words[words.index("5000")] = str(port)
    custom = variables(root) | {"HOME": str(tmp_path)}
    words[0] = str(created.folder / "bin" / words[0])
    with subprocess.Popen(words, cwd=tmp_path, env=custom, start_new_session=True) as server:
        try:
            assert wait_for(lambda: is_healthy(root, "registry", port), 90)
        finally:
            os.killpg(server.pid, signal.SIGTERM)


@exhaustive
def test_check_image_runs_gate_check(root: Path, tmp_path: Path) -> None:
    """Install PyTorch from pip's configured index instead of the index for CPU builds."""
    requests = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    index = subprocess.run(requests, check=False, capture_output=True, text=True).stdout.strip()
    created = create_image(root, "judge", TORCH_INDEX=index or PyPI.simple_url)
    assert {"torch", "onnxruntime", "matplotlib", "onnxscript"} <= created.packages.keys()
    before = files(created.folder)
    work = tmp_path / "work"
    shutil.copytree(small_project(), work)
    (work / "report").mkdir(mode=0o777)
    (work / "report").chmod(0o777)
    for folder in (tmp_path, *tmp_path.parents[:2], work):
        folder.chmod(0o755)
    entry = json.loads(STAGES["judge"].last("ENTRYPOINT") or "[]")
    words = ["check", "good.onnx", "--reference", "small_models:build", "--inputs", "images.npy"]
    program = created.folder / "bin" / entry[0]
    result = run_as_nobody(root, program, *words, "--report", "report", folder=work)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (work / "report" / "report.html").is_file()
    assert files(created.folder) == before
