"""`gate check --track` against a real server: the number of requests, and signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from gate.mlflow_client.runs import EXPERIMENT
from tests.registry.servers import Server, run_mlflow_server
from tests.small_project import create_project

SLOW_MODEL = """
import hashlib, pathlib, time

import small_models
from torch import nn


class Slow(nn.Module):
    def forward(self, image):
        pathlib.Path('computes').touch()
        {work}
        return image


def build():
    return nn.Sequential(*small_models.build(), Slow())
"""
WORK = {
    "hears": "time.sleep(3600)",
    # C code without releasing the GIL: Python runs no signal handler before it returns.
    "deaf": "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)",
}
MAX_BEFORE_THE_VERDICT = 15


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with run_mlflow_server(tmp_path_factory.mktemp("server")) as started:
        yield started


def _start_check(server: Server, folder: Path, reference: str, *more: str) -> subprocess.Popen[str]:
    project = create_project()
    command = ["check", str(project / "good.onnx"), "--reference", reference, *more]
    command += ["--inputs", str(project / "images.npy"), "--track", "--tracking-uri", server.uri]
    environment = os.environ | {"PYTHONPATH": f"{folder}:{project}", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "gate", *command],
        cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _requests(server: Server) -> list[str]:
    log = (server.artifacts.parent / "log").read_text()
    requested = re.findall(r'"(?:GET|POST|PUT|PATCH|DELETE) (\S+) HTTP', log)
    return [path for path in requested if not path.startswith("/health")]


def _runs(server: Server) -> list[Any]:
    client = MlflowClient(server.uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    return [] if experiment is None else client.search_runs([experiment.experiment_id])


@pytest.mark.further
def test_few_requests_before_the_verdict(server: Server, tmp_path: Path) -> None:
    before = len(_requests(server))
    with _start_check(server, tmp_path, "small_models:build") as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        requests_before_verdict = len(_requests(server)) - before
        process.stdout.read()
    assert process.returncode == 0
    assert first.startswith("PASS")
    assert 0 < requests_before_verdict <= MAX_BEFORE_THE_VERDICT
    requested = _requests(server)[before:]
    assert sum("log-batch" in path for path in requested) <= 4
    (run,) = _runs(server)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["ort-cpu/noise_ratio"] > 0.0
    assert run.data.params["gate.runtimes.ort-cpu.required"] == "always"


@pytest.mark.further
@pytest.mark.parametrize(
    ("number", "work", "whole"),
    [
        (signal.SIGTERM, "hears", False),
        pytest.param(signal.SIGINT, "deaf", True, marks=pytest.mark.proof),
        pytest.param(signal.SIGTERM, "deaf", False, marks=pytest.mark.proof),
        pytest.param(signal.SIGTERM, "hears", True, marks=pytest.mark.proof),
        pytest.param(signal.SIGINT, "hears", True, marks=pytest.mark.proof),
    ],
)
def test_signal_ends_the_run_as_killed(
    server: Server, tmp_path: Path, number: signal.Signals, work: str, whole: bool
) -> None:
    """`whole`: the signal goes to the process group, as from Ctrl-C or a service manager; otherwise
    to the process.
    """
    (tmp_path / "slow.py").write_text(SLOW_MODEL.format(work=WORK[work]))
    earlier_ids = {run.info.run_id for run in _runs(server)}
    with _start_check(server, tmp_path, "slow:build") as process:
        try:
            (run,) = _wait_for_run(server, earlier_ids, process)
            assert run.info.status == "RUNNING"
            while not (tmp_path / "computes").exists():
                assert process.poll() is None
                time.sleep(0.05)
            (os.killpg if whole else os.kill)(process.pid, number)
            _, text = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, text
    assert MlflowClient(server.uri).get_run(run.info.run_id).info.status == "KILLED"


def _wait_for_run(
    server: Server, earlier_ids: set[str], process: subprocess.Popen[str]
) -> list[Any]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        matches = [run for run in _runs(server) if run.info.run_id not in earlier_ids]
        if matches:
            return matches
        time.sleep(0.1)
    raise AssertionError(f"no run was opened: {process.communicate()[1]}")
