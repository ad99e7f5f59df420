"""A real MLflow database in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from gate.mlflow_client.runs import RunLogger, Runs
from tests.registry.servers import empty_database


@pytest.fixture(autouse=True)
def _no_mlflow_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MLFLOW_"):
            monkeypatch.delenv(name)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    empty_database(tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def runs(uri: str) -> Runs:
    return Runs(uri)


def get_run(page: RunLogger) -> Any:
    return MlflowClient(page.uri).get_run(page.run_id)
