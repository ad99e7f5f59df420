"""Open, find and write MLflow runs."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gate.decision.check_result import Verdict
from gate.decision.decide import Decision
from gate.errors import EvidenceError, GateError, ResourceGone
from gate.mlflow_client.connection import calling, check_server
from gate.mlflow_client.registry import experiment_id
from gate.records.layout import PAGE, RUN
from gate.sandbox.child import INTERRUPTED
from gate.storage.digest import Digest
from gate.storage.files import temporary_folder
from gate.storage.record import Record, encodable
from gate.storage.safe_text import redacted
from gate.storage.workspace import page_address
from gate.summary.summary import Headline

if TYPE_CHECKING:
    from mlflow import MlflowClient


_BATCHES = {"params": 100, "tags": 100, "metrics": 800}
"""Largest number of entries of each kind in one request; MLflow accepts 1000 in all."""

_NAME_LIMIT = 120  # characters; the database holds 250, the list of runs shows some sixty
_NOTE_LIMIT = 8000  # characters of a run's tag; the description is one
_TABLES_TAG = "mlflow.loggedArtifacts"  # makes the page show an artifact as a table


RunStatus = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass
class RunLogger:
    """Writes to one MLflow run. A value of None is written as `none`.

    All methods raise RegistryUnavailable, RegistryDenied, StorageError or RegistryError.
    """

    client: MlflowClient
    uri: str
    run_id: str
    experiment_id: str
    ends: RunStatus = "FINISHED"
    """Status of the run after its writer is done: FAILED if the file was rejected."""
    _waiting: dict[str, list[Any]] | None = None
    """Within `batched`: the entries to send, by the name of the parameter of `log_batch`."""
    _tables: list[dict[str, str]] | None = None
    """Artifacts that the page shows as tables. None: not read from the server."""

    @property
    def address(self) -> str:
        """Return the path of the run's page in MLflow's user interface, without host and port."""
        return page_address(self._path)

    @property
    def report_address(self) -> str:
        """Return the address of the report's page among the run's artifacts."""
        return page_address(f"{self._path}/artifacts/{PAGE}")

    @property
    def _path(self) -> str:
        return f"experiments/{self.experiment_id}/runs/{self.run_id}"

    @property
    def location(self) -> str:
        """Return the URL of the run's page; without a server, its path and how to show it."""
        shown = redacted(self.uri).rstrip("/")
        if shown.startswith(("http://", "https://")):
            return f"{shown}/{self.address}"
        return f"{self.address} of: mlflow ui --backend-store-uri {shown}"

    def named(self, name: str) -> None:
        """Set the name of the run, which the list of runs shows."""
        with self._client() as client:
            client.update_run(self.run_id, name=encodable(name)[:_NAME_LIMIT].rstrip())

    @contextmanager
    def batched(self) -> Iterator[None]:
        """Collect the params, tags and metrics of the block, and send them together at its end."""
        self._waiting = {}
        try:
            yield
            waiting, self._waiting = self._waiting, None
            self._send(waiting)
        finally:
            self._waiting = None

    def params(self, values: Mapping[str, object]) -> None:
        """Log parameters. MLflow refuses to change an existing value."""
        from mlflow.entities import Param

        self._send({"params": [Param(_name(key), written(value)) for key, value in values.items()]})

    def tags(self, values: Mapping[str, object]) -> None:
        """Set tags; a later value replaces the earlier one."""
        from mlflow.entities import RunTag

        self._send({"tags": [RunTag(_name(key), written(value)) for key, value in values.items()]})

    def metrics(self, values: Mapping[str, float], *, step: int = 0) -> None:
        """Log finite numbers as metrics; others become tags `nonfinite.<name>`.

        SQL stores turn NaN into 0.0 and infinity into a large number, which reads as a result.
        """
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {key: float(value) for key, value in values.items() if math.isfinite(value)}
        entries = [Metric(_name(key), value, now, step) for key, value in finite.items()]
        self._send({"metrics": entries})
        self.tags({f"nonfinite.{key}": values[key] for key in values.keys() - finite.keys()})

    def note(self, markdown: str) -> None:
        """Set the description at the top of the run's page."""
        self.tags({"mlflow.note.content": cut(markdown, _NOTE_LIMIT)})

    def file(self, path: Path, folder: str | None = None) -> None:
        """Copy a local file into the run's artifacts."""
        with self._client() as client:
            client.log_artifact(self.run_id, str(path.resolve()), folder)

    def text(self, text: str, name: str) -> None:
        """Write a text as an artifact."""
        with self._client() as client:
            client.log_text(self.run_id, text, name)

    def bytes(self, data: bytes, name: str) -> None:
        """Write bytes as an artifact."""
        with temporary_folder() as folder:
            path = Path(folder) / Path(name).name
            path.write_bytes(data)
            self.file(path, Path(name).parent.as_posix())

    def folder(self, folder: Path, name: str) -> None:
        """Copy the files of a local folder into the artifacts' folder `name`."""
        with self._client() as client:
            client.log_artifacts(self.run_id, str(folder.resolve()), name)

    def table(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Write an artifact that the page shows as a table. Unlike `log_table` this replaces it.

        A cell with None is empty. NaN and infinity are written as text, because JSON lacks them.
        """
        columns = list(rows[0]) if rows else []
        data = [[_cell(row[key]) for key in columns] for row in rows]
        with self._client() as client:
            client.log_dict(self.run_id, {"columns": columns, "data": data}, name)
            if self._tables is None:
                tags = client.get_run(self.run_id).data.tags
                self._tables = json.loads(tags.get(_TABLES_TAG, "[]"))
        entry = {"path": name, "type": "table"}
        if entry not in self._tables:
            self._tables.append(entry)
            self.tags({_TABLES_TAG: json.dumps(self._tables)})

    def dataset(self, *, digest: str, source: str) -> None:
        """Log the evaluation data as an input of the run: its digest, not its content."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name="evaluation",
            digest=digest.removeprefix("sha256:")[:36],  # the column holds 36 characters
            source_type="local",
            source=json.dumps({"uri": source}),
        )
        tag = InputTag(key="mlflow.data.context", value="eval")
        with self._client() as client:
            client.log_inputs(self.run_id, [DatasetInput(dataset=dataset, tags=[tag])])

    def _send(self, entries: dict[str, list[Any]]) -> None:
        """Send now, in as few requests as MLflow allows; within `batched` at its end."""
        if self._waiting is not None:
            for kind, values in entries.items():
                self._waiting.setdefault(kind, []).extend(values)
            return
        # The last value of a key counts: MLflow refuses a request that has two of a param.
        for kind in entries.keys() & {"params", "tags"}:
            entries[kind] = list({entry.key: entry for entry in entries[kind]}.values())
        while any(entries.values()):
            batch = {kind: values[: _BATCHES[kind]] for kind, values in entries.items()}
            entries = {kind: values[_BATCHES[kind] :] for kind, values in entries.items()}
            with self._client() as client:
                client.log_batch(
                    self.run_id,
                    metrics=batch.get("metrics", ()),
                    params=batch.get("params", ()),
                    tags=batch.get("tags", ()),
                )

    @contextmanager
    def _client(self) -> Iterator[MlflowClient]:
        with calling(self.uri, f"write on the page of run {self.run_id}"):
            yield self.client


def cut(markdown: str, limit: int) -> str:
    """Truncate Markdown to at most `limit` characters, by whole lines: first the last rows of its
    table, then the end."""
    if len(markdown) <= limit:
        return markdown
    closing = "\n\n(The rest is in the artifact report.html.)\n"
    lines = markdown.splitlines()
    rows = [index for index, line in enumerate(lines) if line.startswith("| ")][1:]
    excess = len(markdown) + len(closing) - limit
    while rows and excess > 0:
        excess -= len(lines.pop(rows.pop())) + 1
    kept = "\n".join(lines)
    if len(kept) + len(closing) > limit:
        kept = kept[: limit - len(closing)]
        kept = kept[: kept.rfind("\n")]
    return kept + closing


def written(value: object) -> str:
    """Return the text of a value for a param or a tag."""
    return "none" if value is None else encodable(str(value))


def _cell(value: object) -> object:
    if value is None:
        return ""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _name(text: str) -> str:
    """Replace the characters that MLflow does not allow in names."""
    return re.sub(r"[^\w\-. :/]", "_", text)[:250]


_DIGITS = 6
_NOTHING_TO_NAME = ("passed", "waived")


def unjudged_name(stage: str, sha256: Digest) -> str:
    """Return the name of a run whose file has no verdict yet, as `gate exported 4d87ab`."""
    return f"gate {stage} {sha256.hex[:_DIGITS]}"


def run_name(verdict: Verdict, sha256: Digest, headline: Headline) -> str:
    """Return the name of a judged run: `gate PASS 8de109`, `gate FAIL 4d87ab layer3.0.conv1`.

    A failure is named by the module at fault, or else by the kind of fault.
    """
    name = f"gate {verdict} {sha256.hex[:_DIGITS]}"
    if verdict is Verdict.PASS:
        return name
    kind = "" if headline.cause in _NOTHING_TO_NAME else headline.cause.replace("_", " ")
    return f"{name} {headline.blamed or kind}".rstrip()


def status_of(verdict: Verdict) -> RunStatus:
    """Return the run's status: FINISHED, which MLflow shows as success, only for a PASS."""
    return "FINISHED" if verdict is Verdict.PASS else "FAILED"


def headline_tags(headline: Headline) -> dict[str, object]:
    """Return tags with the verdict and its cause, for columns and filters of the list of runs."""
    return {
        "gate.verdict": headline.verdict,
        "gate.headline": headline.sentence[:5000],
        "gate.cause": headline.cause,
        "gate.blamed": headline.blamed and headline.blamed[:5000],
    }


DECIDED_TAG = "gate.decision_sha256"
"""The tag that is written last: a run that has it is complete."""


# The stages of the pipeline share one run instead (`pipelines/run.py`).
EXPERIMENT = "parity-gate"
"""The default experiment."""

_PROMOTED_TAG = "gate.promotion"


class RunReference(Record):
    """A small file that names the run that was written to; it is verified before use."""

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
            # The artifacts of a local database are next to it; a server chooses the folder.
            file = uri.removeprefix("sqlite:///")
            artifacts = None if file == uri else Path(file).absolute().parent / "mlartifacts"
            self._experiment_id = experiment_id(self._client, experiment, artifacts=artifacts)

    @contextmanager
    def new(self, name: str, *, ends_process: bool = False) -> Iterator[RunLogger]:
        """Open a new run and end it with its `ends`, FAILED after an error, KILLED after Ctrl-C.

        `ends_process`: end run and process within seconds of SIGINT and SIGTERM
        (`killed_by_signals`). Raises the RegistryErrors.
        """
        from mlflow.tracking.context.registry import resolve_tags

        with calling(self._uri, "open a run"):
            tags = resolve_tags()  # user, source and commit, as mlflow.start_run would tag it
            run = self._client.create_run(self._experiment_id, run_name=name, tags=tags)
        page = self._page(run.info.run_id, self._experiment_id)
        kill = functools.partial(self._end, page, "KILLED")
        with killed_by_signals(kill) if ends_process else nullcontext(), self._ending(page):
            yield page

    @contextmanager
    def again(self, page: RunLogger) -> Iterator[RunLogger]:
        """Write to a run that had ended, and end it again if its status changes."""
        status = page.ends
        yield page
        if page.ends != status:
            self._end(page, page.ends)

    def recorded(self, report: Path, decision: Decision) -> RunLogger | None:
        """Return the run that the folder of a report names, if it has the complete record of this
        decision and no promotion yet; else None. Raises RegistryUnavailable, RegistryDenied.
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
        tags = run.data.tags
        is_complete = tags.get(DECIDED_TAG) == decision.digest().hex
        if run.info.lifecycle_stage != "active" or not is_complete or _PROMOTED_TAG in tags:
            return None
        page = self._page(reference.run_id, run.info.experiment_id)
        page.ends = "FINISHED" if run.info.status == "FINISHED" else "FAILED"
        return page

    def save_reference(self, page: RunLogger, report: Path) -> None:
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


_GRACE_S = 2.0
"""Seconds for the main thread to handle a signal and clean up."""


_PREVIOUS_HANDLERS: dict[int, Mapping[signal.Signals, Any]] = {}
"""The previous handlers, by the pipe that signals are written to."""


def _forget_in_child() -> None:
    """Restore the signal handlers in a forked process."""
    for writer, handlers in _PREVIOUS_HANDLERS.items():
        with suppress(ValueError, OSError):
            signal.set_wakeup_fd(-1)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(writer)
    _PREVIOUS_HANDLERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def killed_by_signals(kill: Callable[[], None]) -> Iterator[None]:
    """Raise KeyboardInterrupt once on SIGINT or SIGTERM. If the block does not end in time, because
    a library computes or a pool waits for its workers, call `kill` from another thread and end the
    process with exit code 130. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # as set_wakeup_fd demands

    def watch() -> None:
        # Python writes the number here at once; handlers have to wait for the main thread.
        while number := os.read(reader, 1):
            if number[0] in handlers and not ended.wait(_GRACE_S):
                with suppress(Exception):
                    kill()
                os._exit(INTERRUPTED)

    def interrupt(_number: int, _frame: object) -> None:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)  # a second one must not end the cleaning up
        raise KeyboardInterrupt

    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    handlers = {n: each for n, each in handlers.items() if each is not signal.SIG_IGN}
    watcher = threading.Thread(target=watch, daemon=True)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _PREVIOUS_HANDLERS[writer] = handlers
    try:
        watcher.start()
        for number in handlers:
            signal.signal(number, interrupt)
        yield
    finally:
        ended.set()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        _PREVIOUS_HANDLERS.pop(writer, None)
        os.close(writer)  # which ends the watcher
        watcher.join(_GRACE_S)
        os.close(reader)
