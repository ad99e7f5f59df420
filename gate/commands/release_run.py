"""The MLflow run of a release that comes from outside the pipeline: it holds the report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_EXPERIMENT = "gate-promote"


@contextlib.contextmanager
def release_run(uri: str, report: Path) -> Iterator[str]:
    """Open a run at `uri` with the files of `report`; yield its id; end it, whatever happens.

    Raises the RegistryErrors.
    """
    from mlflow import MlflowClient

    from gate.registry.mlflow.errors import translated
    from gate.registry.mlflow.experiment import experiment_id

    with translated(uri, "open a run for the release"):
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment = experiment_id(client, _EXPERIMENT, artifacts=_artifacts(uri))
        run = client.create_run(experiment, run_name=report.resolve().name).info
    status = "FAILED"
    try:
        with translated(uri, "log the report"):
            client.log_artifacts(run.run_id, str(report), "report")
        yield str(run.run_id)
        status = "FINISHED"
    finally:
        with translated(uri, "end the run of the release"):
            client.set_terminated(run.run_id, status)


def _artifacts(uri: str) -> Path | None:
    """Beside a local database; a server has its own place."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts"
