"""What the stage `export` hands on: the file, how it was made, and from what."""

from __future__ import annotations

from typing import Literal

from gate.records.evidence import ExportRecord, Source, Subject
from gate.storage.record import Measured, Record


class ExportReport(Record):
    """The export in full; `reports/export.json`."""

    schema_version: Literal[1] = 1
    subject: Subject
    record: ExportRecord
    source: Source
    self_check: dict[str, Measured]
    """`max_abs_diff_export_batch` and, for a dynamic batch, `max_abs_diff_other_batch`."""
    train_run: str | None
    """Id of the MLflow run that trained the checkpoint."""

    def self_check_numbers(self) -> dict[str, float]:
        """The self-check as metrics."""
        return {f"self_check/{name}": value for name, value in self.self_check.items()}
