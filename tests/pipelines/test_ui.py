from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from gate import GateError
from pipelines import export, promote, ui
from tests.exhaustive import exhaustive
from tests.free_ports import free_port
from tests.pipelines.conftest import REPOSITORY, clean_environment


def test_external_server_only_prints_links(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main() == 0
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:1/")
    monkeypatch.setattr(sys, "argv", ["ui"])
    assert ui.main() == 0
    printed = capsys.readouterr().out
    assert "http://127.0.0.1:1/#/experiments/" in printed
    assert "secret" not in printed


def test_taken_port_is_reported(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as used:
        used.bind((ui.HOST, 0))
        used.listen()
        monkeypatch.setattr(sys, "argv", ["ui", "--port", str(used.getsockname()[1])])
        with pytest.raises(GateError, match="make ui PORT="):
            ui.main()


@exhaustive
@pytest.mark.slow
@pytest.mark.proof
def test_server_shows_the_version_and_ends_with_ctrl_c(measured: Path) -> None:
    assert promote.main() == 0
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "pipelines.ui", "--port", str(port)], cwd=measured, text=True,
        env=clean_environment() | {"PYTHONPATH": str(REPOSITORY)}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            assert "Starting MLflow" in server.stdout.readline()
            printed = ""
            for line in server.stdout:
                printed += line
                if line.startswith("version: "):
                    break
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
                pass  # the links must be printed after the server answers
            run = re.search(rf"http://127\.0\.0\.1:{port}/#/experiments/\d+/runs/(\w+)", printed)
            assert run is not None
            base = f"http://127.0.0.1:{port}"
            answer = get(f"{base}/api/2.0/mlflow/runs/get?run_id={run[1]}", server)
            assert json.loads(answer)["run"]["info"]["status"] == "FINISHED"
            version = f"{base}/api/2.0/mlflow/model-versions/get?name=tiny&version=1"
            assert json.loads(get(version, server))["model_version"]["run_id"] == run[1]
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)


def get(address: str, server: subprocess.Popen[str]) -> bytes:
    deadline = time.monotonic() + 90
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10) as response:
                return bytes(response.read())
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline or server.poll() is not None:
                raise
            time.sleep(0.2)
