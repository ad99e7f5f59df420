"""Writing on one MLflow run's page, by its id."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

NOTE_TAG = "mlflow.note.content"
_BATCH = 100  # MLflow takes at most 100 params or tags in one request


@dataclass(frozen=True)
class RunPage:
    """One run. What is written twice with the same value stays the same."""

    client: MlflowClient
    run_id: str
    experiment_id: str

    def params(self, values: Mapping[str, object]) -> None:
        """Log parameters; MLflow refuses to change the value of one that is there."""
        from mlflow.entities import Param

        entries = [Param(_name(key), str(value)) for key, value in values.items()]
        for start in range(0, len(entries), _BATCH):
            self.client.log_batch(self.run_id, params=entries[start : start + _BATCH])

    def tags(self, values: Mapping[str, object]) -> None:
        """Set tags; a later value replaces the earlier one."""
        from mlflow.entities import RunTag

        entries = [RunTag(_name(key), str(value)) for key, value in values.items()]
        for start in range(0, len(entries), _BATCH):
            self.client.log_batch(self.run_id, tags=entries[start : start + _BATCH])

    def metrics(self, values: Mapping[str, float], *, step: int = 0) -> None:
        """Log finite numbers as metrics; others become tags `nonfinite.<name>`.

        SQL stores turn NaN into 0.0 and infinity into a large number, which reads as a result.
        """
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = [
            Metric(_name(key), float(value), now, step)
            for key, value in values.items()
            if math.isfinite(value)
        ]
        if finite:
            self.client.log_batch(self.run_id, metrics=finite)
        spoiled = {f"nonfinite.{k}": v for k, v in values.items() if not math.isfinite(v)}
        if spoiled:
            self.tags(spoiled)

    def curve(self, name: str, points: Iterable[float]) -> None:
        """One metric over steps 1, 2, …"""
        for step, value in enumerate(points, start=1):
            self.metrics({name: value}, step=step)

    def note(self, markdown: str) -> None:
        """The description at the top of the page."""
        self.tags({NOTE_TAG: markdown})

    def file(self, path: Path, folder: str | None = None) -> None:
        """Copy a local file into the run's artifacts."""
        self.client.log_artifact(self.run_id, str(path.resolve()), folder)

    def text(self, text: str, name: str) -> None:
        """An artifact with this text."""
        self.client.log_text(self.run_id, text, name)

    def table(self, rows: list[dict[str, Any]], name: str) -> None:
        """An artifact that the page shows as a table; replaces one of that name."""
        columns = {key: [row[key] for row in rows] for key in rows[0]} if rows else {}
        self.client.log_dict(
            self.run_id, {"columns": list(columns), "data": [list(row.values()) for row in rows]},
            name,
        )  # fmt: skip

    def dataset(self, name: str, *, digest: str, source: Path, context: str) -> None:
        """The data set as an input of the run; only its name and digest, not its content."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=name,
            digest=digest.removeprefix("sha256:")[:36],  # the column holds 36 characters
            source_type="local",
            source=f'{{"uri": "{source.as_posix()}"}}',
        )
        tag = InputTag(key="mlflow.data.context", value=context)
        self.client.log_inputs(self.run_id, [DatasetInput(dataset=dataset, tags=[tag])])


def _name(text: str) -> str:
    """MLflow allows word characters, dashes, dots, spaces, colons and slashes in names."""
    return re.sub(r"[^\w\-. :/]", "_", text)[:250]
