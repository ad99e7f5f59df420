"""The MLflow experiment of all runs of a project."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gate.mlflow_client import registry
from pipelines import paths

if TYPE_CHECKING:
    from mlflow import MlflowClient


def experiment_id(client: MlflowClient, name: str, *, local: bool) -> str:
    """Return the id of the experiment `name`, which is created if missing.

    `MLFLOW_EXPERIMENT_ID` and `MLFLOW_EXPERIMENT_NAME` have priority over `name`. Raises
    RegistryError if the experiment was deleted.

    local: store artifacts in the project's folder; a server has its own location.
    """
    existing_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if existing_id:
        return str(client.get_experiment(existing_id).experiment_id)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or name
    artifacts = paths.project_root() / "mlartifacts" if local else None
    return registry.experiment_id(client, name, artifacts=artifacts)
