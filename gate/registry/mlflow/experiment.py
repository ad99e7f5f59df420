"""The MLflow experiment of a name: found, or created where it is missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gate.errors import RegistryError

if TYPE_CHECKING:
    from mlflow import MlflowClient


def experiment_id(client: MlflowClient, name: str, *, artifacts: Path | None) -> str:
    """Id of the experiment `name`, created where it is missing.

    `artifacts`: the absolute folder for a new experiment's artifacts, without which MLflow would
    put those of a local database into whatever folder is current; None leaves the place to the
    server. Raises RegistryError for a deleted experiment.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        place = (artifacts / name).as_uri() if artifacts else None
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process was quicker
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise RegistryError(
            f"the experiment '{name}' is deleted. Restore it (mlflow experiments restore "
            f"--experiment-id {found.experiment_id}) or name another one."
        )
    return str(found.experiment_id)
