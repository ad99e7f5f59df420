"""The runs of the commands: opened, ended whatever happens, and found again.

The pipeline has its own way (`pipelines/run.py`): its stages share one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gate.decision.decision import Decision
from gate.errors import EvidenceError, GateError, ResourceGone
from gate.registry.mlflow.experiment import experiment_id
from gate.registry.mlflow.preflight import preflight
from gate.storage.record import Record
from gate.storage.redaction import redacted
from gate.tracking.calling import calling
from gate.tracking.page import RunPage, RunStatus
from gate.tracking.record import DECIDED_TAG
from gate.tracking.views import offer_views

REFERENCE = "run.json"
"""Name of the file in the folder of a report that names the run with the same record."""
EXPERIMENT = "parity-gate"
"""Where the runs go by default."""
_PROMOTED_TAG = "gate.promotion"


class RunReference(Record):
    """Which run was written to, in a small file: checked before it is believed."""

    run_id: str
    experiment_id: str
    tracking_uri: str


class Runs:
    """Runs of one experiment. Raises RegistryUnavailable within seconds if nothing answers."""

    def __init__(self, uri: str, *, experiment: str = EXPERIMENT) -> None:
        self._uri = uri
        preflight(uri)
        from mlflow import MlflowClient

        with calling(uri, f"open the experiment '{experiment}'"):
            self._client = MlflowClient(uri, uri)
            self._experiment_id = experiment_id(self._client, experiment, artifacts=_artifacts(uri))
        offer_views(self._client, uri, experiment_id=self._experiment_id)

    @contextmanager
    def new(self, name: str) -> Iterator[RunPage]:
        """Open a run and end it: as its page says, FAILED after an error, KILLED after Ctrl-C.

        Raises the RegistryErrors.
        """
        from mlflow.tracking.context.registry import resolve_tags

        with calling(self._uri, "open a run"):
            tags = resolve_tags()  # user, source and commit, as mlflow.start_run would tag it
            run = self._client.create_run(self._experiment_id, run_name=name, tags=tags)
        with self._ending(self._page(run.info.run_id, self._experiment_id)) as page:
            yield page

    @contextmanager
    def again(self, page: RunPage) -> Iterator[RunPage]:
        """Write on the page of a run that had ended, and end it anew if it ends otherwise."""
        before = page.ends
        yield page
        if page.ends != before:
            self._end(page, page.ends)

    def page(self, run_id: str) -> RunPage:
        """The page of a run that is there, of whatever experiment. Raises the RegistryErrors."""
        with calling(self._uri, f"read the run {run_id}"):
            info = self._client.get_run(run_id).info
        page = self._page(run_id, info.experiment_id)
        page.ends = info.status if info.status in ("FAILED", "KILLED") else "FINISHED"
        return page

    def recorded(self, report: Path, decision: Decision) -> RunPage | None:
        """The page that holds the whole record of this decision already, as the folder of the
        report says and the page confirms. None where there is none, and where a promotion has been
        written on it: that page is complete. Raises RegistryUnavailable, RegistryDenied.
        """
        try:
            reference = RunReference.load(report / REFERENCE)
        except EvidenceError:
            return None
        if reference.tracking_uri != redacted(self._uri):
            return None
        try:
            with calling(self._uri, f"read the run {reference.run_id}"):
                run = self._client.get_run(reference.run_id)
        except ResourceGone:
            return None
        whole = run.data.tags.get(DECIDED_TAG) == decision.digest().hex
        if run.info.lifecycle_stage != "active" or not whole or _PROMOTED_TAG in run.data.tags:
            return None
        page = self._page(reference.run_id, run.info.experiment_id)
        page.ends = "FINISHED" if run.info.status == "FINISHED" else "FAILED"
        return page

    def remember(self, page: RunPage, report: Path) -> None:
        """Name the page's run in the folder of a report. Raises StorageError."""
        RunReference(
            run_id=page.run_id, experiment_id=page.experiment_id, tracking_uri=redacted(self._uri)
        ).save(report / REFERENCE)

    def _page(self, run_id: str, experiment: str) -> RunPage:
        return RunPage(self._client, self._uri, str(run_id), str(experiment))

    @contextmanager
    def _ending(self, page: RunPage) -> Iterator[RunPage]:
        try:
            yield page
        except BaseException as error:
            # An unreachable server must not hide the error that ended the work.
            with suppress(GateError):
                self._end(page, "FAILED" if isinstance(error, Exception) else "KILLED")
            raise
        self._end(page, page.ends)

    def _end(self, page: RunPage, status: RunStatus) -> None:
        with calling(self._uri, f"end the run {page.run_id}"):
            self._client.set_terminated(page.run_id, status=status)


def _artifacts(uri: str) -> Path | None:
    """Beside a local database; a server has its own place."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts"
