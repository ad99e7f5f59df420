"""The Dockerfile's steps, run without a container engine: a folder stands in for the root, a clean
virtual environment in it for the image's. By `make exhaustive`: each downloads hundreds of megabytes.

What this can't show is said in docs/container.md.
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
from tests.small_project import made as small_project

pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.timeout(3600)]
SERVICE_MB, BASE_MB = 900, 160
"""What the image of the service may take; of which its base image takes less than this."""
FOLDERS = re.compile(r"(?<![\w.~-])/(?=(?:opt/gate|wheels|src|var/lib/gate|run/gate|work)\b)")
"""Where paths of an image begin in a step."""
NOBODY = 10001


@pytest.fixture
def root() -> Iterator[Path]:
    """In place of an image's, on a disk, readable by its user; gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def ran(root: Path, name: str, arguments: Mapping[str, str]) -> Path:
    """Run the steps of a stage below `root`, before them those of the stage that it is made from; the
    folder in which the next one would run."""
    stage = STAGES[name]
    folder = ran(root, stage.base, arguments) if stage.base in STAGES else root
    environment = _as_the_image(root)
    for step in stage.steps:
        if step.word == "WORKDIR":
            folder = root / step.rest.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif step.word == "COPY":
            *sources, target = step.rest.split()
            for source in sources:
                _copied(ROOT / source, folder / target, whole=len(sources) > 1)
        elif step.word == "RUN":
            line = FOLDERS.sub(f"{root}/", step.rest)
            subprocess.run(["sh", "-c", line], cwd=folder, env=environment, check=True)
        else:
            assert step.word == "ARG"
            environment[step.rest] = arguments[step.rest]
    return folder


def _as_the_image(root: Path) -> dict[str, str]:
    """The environment of a step: no Python but the one that the base image would bring."""
    first = root / "usr" / "bin"
    first.mkdir(parents=True, exist_ok=True)
    python = first / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys._base_executable)} "$@"\n')
    python.chmod(0o755)
    pips = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    return pips | {"PATH": f"{first}{os.pathsep}/usr/bin{os.pathsep}/bin", "HOME": str(root)}


def _copied(source: Path, target: Path, *, whole: bool) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target / source.name if whole else target)


def image(root: Path, name: str, **arguments: str) -> Installation:
    """The environment that an image has, as its stage of packages makes it; and its user's home."""
    ran(root, f"{name}-packages", arguments)
    home = root / "var" / "lib" / "gate"
    home.mkdir(parents=True)
    if os.getuid() == 0:
        os.chown(home, NOBODY, NOBODY)
    return Installation(root / "opt" / "gate", name, 0.0)


def variables(root: Path) -> dict[str, str]:
    """What all images have in their environment."""
    stated = STAGES["plain"].last("ENV") or ""
    arguments = dict(word.split("=", 1) for word in shlex.split(stated))
    path = os.pathsep.join(("/usr/bin", "/bin"))
    return {
        name: FOLDERS.sub(f"{root}/", value).replace("$PATH", path)
        for name, value in arguments.items()
    }


def healthy(root: Path, name: str, port: int) -> bool:
    """What an image's health check says of a server at another port."""
    check = STAGES[name].last("HEALTHCHECK") or ""
    words = json.loads(check[check.index("[") :])
    words = [re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", word) for word in words]
    assert words[0] == "python"
    python = root / "opt" / "gate" / "bin" / "python"
    return subprocess.run([python, *words[1:]], check=False, capture_output=True).returncode == 0


def files(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def as_nobody(root: Path, *line: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command as the image's user, who may write nothing but its volume; as ourselves where we
    are not root, or this Python lies in a folder of root's own."""
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
    created = image(root, "service")
    lacks = {"torch", "dvc", "scikit-learn", "matplotlib", "mlflow", "pandas"}
    assert not lacks & created.packages.keys()
    assert {"onnxruntime", "psycopg", "starlette"} <= created.packages.keys()
    print(f"the packages of the service: {created.size_bytes / 1e6:.0f} MB")
    assert created.size_bytes < (SERVICE_MB - BASE_MB) * 1e6
    before = files(created.folder)
    result = as_nobody(root, created.gate, "--version", folder=root)
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
        assert healthy(root, "service", port)
        assert complete.stop() == 0
        assert not healthy(root, "service", port)
    assert files(created.folder) == before


@exhaustive
def test_registry_image_starts_and_is_healthy(root: Path, tmp_path: Path) -> None:
    created = image(root, "registry")
    assert {"mlflow", "psycopg"} <= created.packages.keys()
    port = free_port()
    words = json.loads(STAGES["registry"].last("CMD") or "[]")
    words[words.index("0.0.0.0")] = "127.0.0.1"
    words[words.index("5000")] = str(port)
    custom = variables(root) | {"HOME": str(tmp_path)}
    words[0] = str(created.folder / "bin" / words[0])
    with subprocess.Popen(words, cwd=tmp_path, env=custom, start_new_session=True) as server:
        try:
            assert wait_for(lambda: healthy(root, "registry", port), 90)
        finally:
            os.killpg(server.pid, signal.SIGTERM)


@exhaustive
def test_check_image_runs_gate_check(root: Path, tmp_path: Path) -> None:
    """By the PyTorch of the index that pip asks, as the one of CPU builds is elsewhere."""
    requests = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    index = subprocess.run(requests, check=False, capture_output=True, text=True).stdout.strip()
    created = image(root, "judge", TORCH_INDEX=index or PyPI.simple_url)
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
    result = as_nobody(root, program, *words, "--report", "report", folder=work)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (work / "report" / "report.html").is_file()
    assert files(created.folder) == before
