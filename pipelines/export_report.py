"""The result of the stage `export`: the file, its settings and its sources."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from gate.export.export import Exported
from gate.records.evidence import ExportRecord, Source, Subject
from gate.storage.record import Measured, Record


class PartReport(Record):
    """One file of a release."""

    subject: Subject
    record: ExportRecord
    self_check: dict[str, Measured]
    """`max_abs_diff_export_batch` and, for a dynamic batch, `max_abs_diff_other_batch`."""

    @classmethod
    def from_export(cls, exported: Exported, checked: dict[str, float]) -> PartReport:
        """Create the report of a part. `checked`: the result of `self_check`."""
        return cls(subject=exported.subject, record=exported.record, self_check=checked)


class ExportReport(Record):
    """The content of `reports/export.json`."""

    schema_version: Literal[1] = 1
    subject: Subject
    record: ExportRecord | None
    """None for a release of several files, whose parts have their own records."""
    source: Source
    self_check: dict[str, Measured]
    """As for a part; for a release with the part's name: `encoder/max_abs_diff_export_batch`."""
    parts: dict[str, PartReport] = Field(default={})
    train_run: str | None
    """Id of the MLflow run that trained the checkpoint."""

    @property
    def records(self) -> dict[str, ExportRecord]:
        """The export records of a release's parts."""
        return {name: part.record for name, part in self.parts.items()}

    @property
    def remarks(self) -> tuple[str, ...]:
        """Warnings of the exporters, prefixed with the part."""
        named = {"": self.record, **self.records}
        return tuple(
            f"{name}: {line}" if name else line
            for name, record in named.items()
            if record is not None
            for line in (*record.tracer_warnings, *record.hazards, *record.notices)
        )

    def self_check_numbers(self) -> dict[str, float]:
        """The self-check as metrics."""
        return {f"self_check/{name}": value for name, value in self.self_check.items()}


class WrittenExport(NamedTuple):
    """The exported file or release, and the exporters' output."""

    report: ExportReport
    log: str
