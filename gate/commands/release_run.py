"""The MLflow run of a release that comes from outside the pipeline: it holds the report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

_EXPERIMENT = "gate-promote"


@contextlib.contextmanager
def release_run(uri: str, report: Path) -> Iterator[str]:
    """Open a run at `uri` with the files of `report`; yield its id; end it, whatever happens.

    Raises the RegistryErrors.
    """
    from mlflow import MlflowClient

    from gate.registry.mlflow_errors import translated

    with translated(uri, "open a run for the release"):
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        run = client.create_run(_experiment(client, uri), run_name=report.resolve().name).info
    status = "FAILED"
    try:
        with translated(uri, "log the report"):
            client.log_artifacts(run.run_id, str(report), "report")
        yield str(run.run_id)
        status = "FINISHED"
    finally:
        with translated(uri, "end the run of the release"):
            client.set_terminated(run.run_id, status)


def _experiment(client: MlflowClient, uri: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(_EXPERIMENT)
    if found is None:
        # Without a server MLflow would put artifacts into whatever folder is current.
        local = uri.startswith("sqlite:///")
        folder = Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts"
        place = (folder / _EXPERIMENT).as_uri() if local else None
        try:
            return str(client.create_experiment(_EXPERIMENT, artifact_location=place))
        except MlflowException:
            found = client.get_experiment_by_name(_EXPERIMENT)  # another process was quicker
            if found is None:
                raise
    return str(found.experiment_id)
