"""Open, find and write MLflow runs."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gate.decision.check_result import Verdict
from gate.decision.decide import Decision
from gate.errors import EvidenceError, GateError, ResourceGone
from gate.mlflow_client.connection import calling, check_server
from gate.mlflow_client.registry import experiment_id
from gate.records.layout import PAGE, RUN
from gate.storage.digest import Digest
from gate.storage.files import temporary_folder
from gate.storage.record import Record, encodable
from gate.storage.safe_text import redacted
from gate.storage.workspace import page_address
from gate.summary.summary import Headline

if TYPE_CHECKING:
    from mlflow import MlflowClient


_BATCH = 100  # MLflow takes at most 100 params or tags in one request

_NAME_LIMIT = 120  # characters; the database holds 250, the list of runs shows some sixty

_NOTE_LIMIT = 8000  # characters of a run's tag; the description is one

_TABLES_TAG = "mlflow.loggedArtifacts"  # makes the page show an artifact as a table


RunStatus = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass
class RunLogger:
    """One run. What is written twice with the same value stays the same; what is None is written
    as `none`.

    All methods raise RegistryUnavailable, RegistryDenied, StorageError or RegistryError.
    """

    client: MlflowClient
    uri: str
    run_id: str
    experiment_id: str
    ends: RunStatus = "FINISHED"
    """The status of a run whose writer did all its work: FAILED where that ended in a rejection."""

    @property
    def address(self) -> str:
        """The run's page within MLflow's user interface, whatever its host and port."""
        return page_address(self._path)

    @property
    def report_address(self) -> str:
        """Of the report's page among the run's artifacts."""
        return page_address(f"{self._path}/artifacts/{PAGE}")

    @property
    def _path(self) -> str:
        return f"experiments/{self.experiment_id}/runs/{self.run_id}"

    @property
    def location(self) -> str:
        """The whole address where a server shows the page, else how to show it."""
        shown = redacted(self.uri).rstrip("/")
        if shown.startswith(("http://", "https://")):
            return f"{shown}/{self.address}"
        return f"{self.address} of: mlflow ui --backend-store-uri {shown}"

    def named(self, name: str) -> None:
        """Name the run: what the list of runs shows."""
        with self._client() as client:
            client.update_run(self.run_id, name=encodable(name)[:_NAME_LIMIT].rstrip())

    def params(self, values: Mapping[str, object]) -> None:
        """Log parameters; MLflow refuses to change the value of one that is there."""
        from mlflow.entities import Param

        entries = [Param(_name(key), written(value)) for key, value in values.items()]
        for batch in _batches(entries):
            with self._client() as client:
                client.log_batch(self.run_id, params=batch)

    def tags(self, values: Mapping[str, object]) -> None:
        """Set tags; a later value replaces the earlier one."""
        from mlflow.entities import RunTag

        entries = [RunTag(_name(key), written(value)) for key, value in values.items()]
        for batch in _batches(entries):
            with self._client() as client:
                client.log_batch(self.run_id, tags=batch)

    def metrics(self, values: Mapping[str, float], *, step: int = 0) -> None:
        """Log finite numbers as metrics; others become tags `nonfinite.<name>`.

        SQL stores turn NaN into 0.0 and infinity into a large number, which reads as a result.
        """
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {key: float(value) for key, value in values.items() if math.isfinite(value)}
        entries = [Metric(_name(key), value, now, step) for key, value in finite.items()]
        for batch in _batches(entries):
            with self._client() as client:
                client.log_batch(self.run_id, metrics=batch)
        self.tags({f"nonfinite.{key}": values[key] for key in values.keys() - finite.keys()})

    def note(self, markdown: str) -> None:
        """The description at the top of the page."""
        self.tags({"mlflow.note.content": cut(markdown, _NOTE_LIMIT)})

    def file(self, path: Path, folder: str | None = None) -> None:
        """Copy a local file into the run's artifacts."""
        with self._client() as client:
            client.log_artifact(self.run_id, str(path.resolve()), folder)

    def text(self, text: str, name: str) -> None:
        """An artifact with this text."""
        with self._client() as client:
            client.log_text(self.run_id, text, name)

    def bytes(self, data: bytes, name: str) -> None:
        """An artifact with these bytes."""
        with temporary_folder() as folder:
            path = Path(folder) / Path(name).name
            path.write_bytes(data)
            self.file(path, Path(name).parent.as_posix())

    def folder(self, folder: Path, name: str) -> None:
        """Copy the files of a local folder into the artifacts' folder `name`."""
        with self._client() as client:
            client.log_artifacts(self.run_id, str(folder.resolve()), name)

    def table(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """An artifact that the page shows as a table; unlike `log_table` it replaces an old one.

        A cell without a value is empty; NaN and infinity are words, which JSON can hold.
        """
        columns = list(rows[0]) if rows else []
        data = [[_cell(row[key]) for key in columns] for row in rows]
        with self._client() as client:
            client.log_dict(self.run_id, {"columns": columns, "data": data}, name)
            tags = client.get_run(self.run_id).data.tags
        tables = json.loads(tags.get(_TABLES_TAG, "[]"))
        entry = {"path": name, "type": "table"}
        if entry not in tables:
            self.tags({_TABLES_TAG: json.dumps([*tables, entry])})

    def dataset(self, name: str, *, digest: str, source: str, context: str) -> None:
        """The data set as an input of the run: its name and digest, not its content."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=name,
            digest=digest.removeprefix("sha256:")[:36],  # the column holds 36 characters
            source_type="local",
            source=json.dumps({"uri": source}),
        )
        tag = InputTag(key="mlflow.data.context", value=context)
        with self._client() as client:
            client.log_inputs(self.run_id, [DatasetInput(dataset=dataset, tags=[tag])])

    @contextmanager
    def _client(self) -> Iterator[MlflowClient]:
        with calling(self.uri, f"write on the page of run {self.run_id}"):
            yield self.client


def cut(markdown: str, limit: int) -> str:
    """`markdown` with at most `limit` characters: whole lines are left out, first the last rows of
    its table, then what is at the end."""
    if len(markdown) <= limit:
        return markdown
    closing = "\n\n(The rest is in the artifact report.html.)\n"
    lines = markdown.splitlines()
    rows = [place for place, line in enumerate(lines) if line.startswith("| ")][1:]
    excess = len(markdown) + len(closing) - limit
    while rows and excess > 0:
        excess -= len(lines.pop(rows.pop())) + 1
    kept = "\n".join(lines)
    if len(kept) + len(closing) > limit:
        kept = kept[: limit - len(closing)]
        kept = kept[: kept.rfind("\n")]
    return kept + closing


def _batches(entries: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(entries), _BATCH):
        yield entries[start : start + _BATCH]


def written(value: object) -> str:
    """The text of a value in a param or a tag: never Python's `None`."""
    return "none" if value is None else encodable(str(value))


def _cell(value: object) -> object:
    if value is None:
        return ""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _name(text: str) -> str:
    """MLflow allows word characters, dashes, dots, spaces, colons and slashes in names."""
    return re.sub(r"[^\w\-. :/]", "_", text)[:250]


_DIGITS = 6

_NOTHING_TO_NAME = ("passed", "waived")


def unjudged_name(done: str, sha256: Digest) -> str:
    """Of a run whose file waits for its verdict: `gate exported 4d87ab`."""
    return f"gate {done} {sha256.hex[:_DIGITS]}"


def judged_name(verdict: Verdict, sha256: Digest, headline: Headline) -> str:
    """`gate PASS 8de109`, `gate FAIL 4d87ab layer3.0.conv1`: who is to blame, else what kind of
    fault it is."""
    name = f"gate {verdict} {sha256.hex[:_DIGITS]}"
    if verdict is Verdict.PASS:
        return name
    kind = "" if headline.cause in _NOTHING_TO_NAME else headline.cause.replace("_", " ")
    return f"{name} {headline.blamed or kind}".rstrip()


def status_of(verdict: Verdict) -> RunStatus:
    """FINISHED only for a PASS: a green tick says that the file is good."""
    return "FINISHED" if verdict is Verdict.PASS else "FAILED"


def headline_tags(headline: Headline) -> dict[str, object]:
    """What became of the file and why, for columns and filters of the list of runs."""
    return {
        "gate.verdict": headline.verdict,
        "gate.headline": headline.sentence[:5000],
        "gate.cause": headline.cause,
        "gate.blamed": headline.blamed and headline.blamed[:5000],
    }


DECIDED_TAG = "gate.decision_sha256"
"""Written last of the record: a page that has it is whole."""


# The pipeline has its own way (`pipelines/run.py`): its stages share one run.

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
        check_server(uri)
        from mlflow import MlflowClient

        with calling(uri, f"open the experiment '{experiment}'"):
            self._client = MlflowClient(uri, uri)
            self._experiment_id = experiment_id(self._client, experiment, artifacts=_artifacts(uri))

    @contextmanager
    def new(self, name: str) -> Iterator[RunLogger]:
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
    def again(self, page: RunLogger) -> Iterator[RunLogger]:
        """Write on the page of a run that had ended, and end it anew if it ends otherwise."""
        before = page.ends
        yield page
        if page.ends != before:
            self._end(page, page.ends)

    def page(self, run_id: str) -> RunLogger:
        """The page of a run that is there, of whatever experiment. Raises the RegistryErrors."""
        with calling(self._uri, f"read the run {run_id}"):
            info = self._client.get_run(run_id).info
        page = self._page(run_id, info.experiment_id)
        page.ends = info.status if info.status in ("FAILED", "KILLED") else "FINISHED"
        return page

    def recorded(self, report: Path, decision: Decision) -> RunLogger | None:
        """The page that holds the whole record of this decision already, as the folder of the
        report says and the page confirms. None where there is none, and where a promotion has been
        written on it: that page is complete. Raises RegistryUnavailable, RegistryDenied.
        """
        try:
            reference = RunReference.load(report / RUN)
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

    def remember(self, page: RunLogger, report: Path) -> None:
        """Name the page's run in the folder of a report. Raises StorageError."""
        RunReference(
            run_id=page.run_id, experiment_id=page.experiment_id, tracking_uri=redacted(self._uri)
        ).save(report / RUN)

    def _page(self, run_id: str, experiment: str) -> RunLogger:
        return RunLogger(self._client, self._uri, str(run_id), str(experiment))

    @contextmanager
    def _ending(self, page: RunLogger) -> Iterator[RunLogger]:
        try:
            yield page
        except BaseException as error:
            # An unreachable server must not hide the error that ended the work.
            with suppress(GateError):
                self._end(page, "FAILED" if isinstance(error, Exception) else "KILLED")
            raise
        self._end(page, page.ends)

    def _end(self, page: RunLogger, status: RunStatus) -> None:
        with calling(self._uri, f"end the run {page.run_id}"):
            self._client.set_terminated(page.run_id, status=status)


def _artifacts(uri: str) -> Path | None:
    """Beside a local database; a server has its own place."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts"
