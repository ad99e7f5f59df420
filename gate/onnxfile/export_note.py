"""How a file was exported, beside the file: bound to its digest, for whoever judges it later."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from gate.errors import DigestMismatch
from gate.records.evidence import ExportRecord, Subject
from gate.storage.record import Record, Sha256


class ExportNote(Record):
    """The record of an export and the file that it is about."""

    subject_sha256: Sha256
    """Of the file with its external data, as in `Subject`."""
    record: ExportRecord

    @classmethod
    def of(cls, subject: Subject, record: ExportRecord) -> Self:
        """The note on a file that was exported."""
        return cls(subject_sha256=subject.sha256, record=record)

    def verify(self, subject: Subject, *, path: Path) -> None:
        """Raise DigestMismatch unless the note is about this file, which is at `path`."""
        if subject.sha256 != self.subject_sha256:
            raise DigestMismatch(
                f"{path} has digest {subject.sha256}, the record of the export is about "
                f"{self.subject_sha256}. Give the record that was written beside this very file "
                f"({note_path(path).name}), or export again."
            )


def note_path(model: Path) -> Path:
    """Where the note on a file stands: `model.onnx.export.json`."""
    return model.with_name(f"{model.name}.export.json")
