"""Files, ledgers and real MLflow servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.ledger.ledger import Ledger
from gate.registry.release import Release
from tests.registry.releases import onnx_file, release
from tests.registry.servers import run_mlflow_server
from tests.sandbox.in_process import read_in_process


@pytest.fixture(autouse=True)
def _no_dvc_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DVC_EXP_NAME", raising=False)


@pytest.fixture(autouse=True)
def _short_lock_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gate.registry.alias.LOCK_TIMEOUT_S", 0.5)


@pytest.fixture(autouse=True)
def _no_pause_before_second_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gate.registry.registered_model.PAUSE_S", 0.0)


@pytest.fixture(autouse=True)
def read_untrusted_files_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    read_in_process(monkeypatch)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "gate" / "ledger.db")


@pytest.fixture
def first(tmp_path: Path) -> Release:
    return release(onnx_file(tmp_path / "first.onnx", seed=1))


@pytest.fixture
def second(tmp_path: Path) -> Release:
    return release(onnx_file(tmp_path / "second.onnx", seed=2))


@pytest.fixture
def third(tmp_path: Path) -> Release:
    return release(onnx_file(tmp_path / "third.onnx", seed=3))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory):
    with run_mlflow_server(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="session")
def guarded_server(tmp_path_factory: pytest.TempPathFactory):
    with run_mlflow_server(tmp_path_factory.mktemp("guarded"), guarded=True) as started:
        yield started
