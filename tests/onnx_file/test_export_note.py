"""The note on an export applies to one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.errors import DigestMismatch
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import ExportNote, note_path
from tests import builders
from tests.export.graphs import create_adder, write_model


def test_note_is_valid_only_for_its_file(tmp_path: Path) -> None:
    path = write_model(create_adder(), tmp_path / "model.onnx")
    subject = read_subject(path)
    record = builders.evidence().export
    assert record is not None
    note = ExportNote.from_record(subject, record)
    note.verify(subject, path=path)
    second = subject.model_copy(update={"sha256": builders.digest("another")})
    with pytest.raises(DigestMismatch, match=r"Use the record .*model\.onnx\.export\.json"):
        note.verify(second, path=path)


def test_note_path_is_next_to_the_model() -> None:
    assert note_path(Path("a/model.onnx")) == Path("a/model.onnx.export.json")
