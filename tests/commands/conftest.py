from __future__ import annotations

from pathlib import Path

import pytest

from tests.registry.servers import empty_database
from tests.reused_charts import reused_charts
from tests.small_project import made

__all__ = ["reused_charts"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, which is the current one, with a registry of its own."""
    empty_database(tmp_path / "mlflow.db")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "DVC_EXP_NAME", "GATE_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user, which is the current one."""
    folder = made()
    monkeypatch.chdir(folder)
    return folder
