"""The MLflow experiment that all runs of a project go into."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gate.errors import RegistryError
from pipelines import paths

if TYPE_CHECKING:
    from mlflow import MlflowClient


def experiment_id(client: MlflowClient, name: str, *, local: bool) -> str:
    """Id of the experiment `name`, created where it is missing.

    `MLFLOW_EXPERIMENT_ID` and `MLFLOW_EXPERIMENT_NAME` go before `name`. `local`: artifacts lie
    in the project's folder; a server has its own place. Raises RegistryError for a deleted one.
    """
    from mlflow.exceptions import MlflowException

    given = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if given:
        return str(client.get_experiment(given).experiment_id)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or name
    found = client.get_experiment_by_name(name)
    if found is None:
        place = (paths.project_root() / "mlartifacts" / name).as_uri() if local else None
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process was quicker
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise RegistryError(
            f"the experiment '{name}' is deleted. Restore it (mlflow experiments restore "
            f"--experiment-id {found.experiment_id}) or set another registry.experiment."
        )
    return str(found.experiment_id)
