"""The MLflow run shared by export, parity and promote, and the run of the training.

Run ids are always explicit. A run that was deleted or is on another server is replaced; a FAILED
run is continued like any other. A run ends FINISHED, FAILED (after an error, or with the verdict
FAIL or ERROR) or KILLED (after kill -9, at the start of the next stage). `MLFLOW_RUN_ID`, which
`mlflow run` passes to children, becomes the parent and is never resumed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping

from gate.errors import EvidenceError
from gate.mlflow_client.connection import calling, check_server
from gate.mlflow_client.runs import RunLogger, RunReference, RunStatus, written
from gate.storage.safe_text import redacted
from pipelines import paths
from pipelines.experiment import experiment_id
from pipelines.run_watch import RunWatch
from pipelines.stage import Stopped

PARENT_TAG = "mlflow.parentRunId"
STAGE_TAG = "gate.stage."


def tracking_uri() -> str:
    """Return `MLFLOW_TRACKING_URI`, or an SQLite file in the project's folder; always absolute."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    prefix = "sqlite:///"
    if uri.startswith(prefix) and uri != f"{prefix}:memory:":
        return prefix + str(paths.project_root() / uri.removeprefix(prefix))
    return uri


class Tracker:
    """A stage's connection to MLflow. Raises RegistryUnavailable within seconds if the server does
    not answer."""

    def __init__(self, experiment: str) -> None:
        self.uri = tracking_uri()
        check_server(self.uri)
        from mlflow import MlflowClient

        self.client = MlflowClient(self.uri, self.uri)
        self._watch = RunWatch(paths.state() / "runs", uri=self.uri)
        launcher = os.environ.pop("MLFLOW_RUN_ID", None)
        with calling(self.uri, "open the experiment"):
            self._watch.end_abandoned(lambda run_id: self._end(run_id, "KILLED", if_running=True))
            self.parent = launcher if launcher and self._is_active(launcher) else None
            self.experiment_id = (
                str(self.client.get_run(self.parent).info.experiment_id)
                if self.parent
                else experiment_id(self.client, experiment, local=self.uri.startswith("sqlite:"))
            )

    @contextlib.contextmanager
    def new_run(self, stage: str) -> Iterator[RunLogger]:
        """Open a new run for `stage`, and always end it."""
        with self._writing(self._create(stage), stage) as page:
            yield page

    @contextlib.contextmanager
    def shared_run(
        self,
        stage: str,
        *,
        earlier: str,
        settings: Mapping[str, object],
        replay: Callable[[RunLogger], None],
    ) -> Iterator[RunLogger]:
        """Continue the run of the stage `earlier`.

        A new run replaces it if it was deleted, belongs to another server or experiment, already
        has this stage's results, or has other values of `settings`. `replay` then writes the
        results of earlier stages to the new run. A complete run is never changed.
        """
        reference = RunReference.load(paths.run_reference(earlier))
        with calling(self.uri, f"read the run of '{earlier}'"):
            reason = self._unusable(reference, stage, settings)
            if reason is None and self.parent:
                self.client.set_tag(reference.run_id, PARENT_TAG, self.parent)
        if reason is None:
            with self._writing(reference.run_id, stage) as page:
                yield page
            return
        print(f"{stage}: a new MLflow run, because the run of '{earlier}' {reason}")
        with self._writing(self._create(stage), stage) as page:
            replay(page)
            yield page

    def _unusable(
        self, reference: RunReference, stage: str, settings: Mapping[str, object]
    ) -> str | None:
        if reference.tracking_uri != redacted(self.uri):
            return "is on another server"
        if not self._is_active(reference.run_id):
            return "is gone"
        run = self.client.get_run(reference.run_id)
        data = run.data
        if run.info.experiment_id != self.experiment_id:
            return "is in another experiment"
        if data.tags.get(STAGE_TAG + stage) == "done":
            return f"already holds the results of '{stage}'"
        texts = {key: written(value) for key, value in settings.items()}
        if any(data.params.get(key, text) != text for key, text in texts.items()):
            return "was made with other settings"
        return None

    @contextlib.contextmanager
    def _writing(self, run_id: str, stage: str) -> Iterator[RunLogger]:
        """Mark the run RUNNING while the stage writes, and record it in `reports/runs/`."""
        status: RunStatus = "FAILED"
        with self._watch.alive(run_id):
            try:
                page = RunLogger(self.client, self.uri, run_id, self.experiment_id)
                with calling(self.uri, "go on in a run"):
                    self.client.update_run(run_id, status="RUNNING")
                page.tags({STAGE_TAG + stage: "started"})
                yield page
                page.tags({STAGE_TAG + stage: "done"})
                RunReference(
                    run_id=run_id,
                    experiment_id=self.experiment_id,
                    tracking_uri=redacted(self.uri),
                ).save(paths.run_reference(stage))
                status = page.ends
            except (KeyboardInterrupt, Stopped):
                status = "KILLED"
                raise
            finally:
                self._end(run_id, status)

    def _create(self, stage: str) -> str:
        from mlflow.tracking.context.registry import resolve_tags

        tags = resolve_tags()  # user, source and commit, with the tags of mlflow.start_run
        if self.parent:
            tags[PARENT_TAG] = self.parent
        name = "train" if stage == "train" else f"gate {stage}"
        with calling(self.uri, "open a run"):
            run = self.client.create_run(self.experiment_id, run_name=name, tags=tags)
        return str(run.info.run_id)

    def _end(self, run_id: str, status: RunStatus, *, if_running: bool = False) -> None:
        from mlflow.exceptions import MlflowException

        # An unreachable server must not hide the error that ended the stage.
        with contextlib.suppress(MlflowException):
            if if_running and self.client.get_run(run_id).info.status != "RUNNING":
                return
            self.client.set_terminated(run_id, status=status)

    def _is_active(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return bool(self.client.get_run(run_id).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise


def recorded_run(stage: str) -> RunReference | None:
    """Return the run that `stage` wrote to, or None, without contacting the server."""
    try:
        return RunReference.load(paths.run_reference(stage))
    except EvidenceError:
        return None
