from __future__ import annotations

from pathlib import Path

import pytest

from tests.registry.servers import empty_database
from tests.reused_charts import reused_charts
from tests.small_project import create_project

__all__ = ["reused_charts"]


@pytest.fixture
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with its own registry."""
    empty_database(tmp_path / "mlflow.db")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "DVC_EXP_NAME", "GATE_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's project as the current folder."""
    folder = create_project()
    monkeypatch.chdir(folder)
    return folder
