from __future__ import annotations

import csv
import math

import numpy as np
import pytest

from gate.errors import EvidenceError
from gate.statistics.classification import ClassAnswers
from gate.statistics.sample_table import (
    COLUMNS,
    MOST,
    ROW,
    OutputRows,
    RowSpool,
    SampleRows,
    SampleTable,
)
from gate.statistics.serialization import from_plain, to_plain

R = np.array([[0.0, 2.0], [3.0, 0.0], [1.0, 0.0]])
C = np.array([[0.0, 2.5], [0.0, 1.0], [1.0, math.nan]])
LABELS = np.array([1, 0, 1])


def rows(start=0, stop=3, *, answers=True, labels=True):
    table = SampleRows()
    r, c = R[start:stop], C[start:stop]
    table.update(
        np.abs(r - c).max(axis=1),
        start=start,
        answers=(ClassAnswers.of(r), ClassAnswers.of(c)) if answers else None,
        labels=LABELS[start:stop] if labels else None,
    )
    return table


def spooled(*units, output="logits", classes=True):
    """The table of one runtime with one output."""
    spool = RowSpool(ROW)
    for unit in units:
        spool.add(output, unit.result())
    return SampleTable.of({"ort-cpu": {output: OutputRows(spool, output, classes)}})


def read(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_row_has_both_answers_and_the_sign_of_the_difference(tmp_path):
    spooled(rows()).save(tmp_path / "samples.csv")
    first, second, third = read(tmp_path / "samples.csv")
    assert tuple(first) == COLUMNS
    assert (first["runtime"], first["output"], first["index"]) == ("ort-cpu", "logits", "0")
    assert (second["label"], second["reference_top1"], second["candidate_top1"]) == ("0", "0", "1")
    assert first["confidence_diff"].startswith("+")
    assert second["confidence_diff"].startswith("-")
    assert float(second["confidence_diff"]) == pytest.approx(
        float(second["candidate_probability"]) - float(second["reference_probability"]), rel=1e-5
    )
    assert (second["reference_margin"], second["candidate_margin"]) == ("3", "1")
    assert second["max_abs_diff"] == "3"
    assert third["candidate_probability"] == "0"


@pytest.mark.parametrize(("answers", "classes"), [(False, True), (True, False)])
def test_cells_without_a_meaning_are_empty(tmp_path, answers, classes):
    made = rows(answers=answers, labels=not classes)
    spooled(made, output="boxes", classes=classes).save(tmp_path / "samples.csv")
    found = read(tmp_path / "samples.csv")
    assert len(found) == 3
    for row in found:
        filled = {name for name, cell in row.items() if cell}
        assert filled == {"runtime", "output", "index", "max_abs_diff"}


def test_rows_are_by_sample_however_they_came():
    whole = rows()
    parts = [rows(0, 1), rows(1, 3)]
    for merged in (parts[0].merge(parts[1]), parts[1].merge(parts[0])):
        assert merged.result().tobytes() == whole.result().tobytes()
        assert to_plain(merged) == to_plain(whole)
    assert whole.result()["index"].tolist() == [0, 1, 2]
    assert from_plain(to_plain(whole)).result().tobytes() == whole.result().tobytes()
    assert to_plain(SampleRows().merge(SampleRows())) == to_plain(SampleRows())


def test_a_table_of_units_is_the_table_of_all_at_once(tmp_path):
    spooled(rows()).save(tmp_path / "whole.csv")
    spooled(rows(2, 3), rows(0, 2)).save(tmp_path / "units.csv")
    assert (tmp_path / "units.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.mark.parametrize("part", [np.zeros(3), rows().result()[["index"]], "index"])
def test_other_rows_are_not_taken_for_rows_of_samples(part):
    with pytest.raises(EvidenceError, match="other rows"):
        SampleRows().__setstate__({"_parts": [part]})


def test_rows_that_found_no_room_are_said_to_be_missing(tmp_path, monkeypatch):
    def away(**_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gate.statistics.sample_table._HELD_BYTES", 1)
    monkeypatch.setattr("tempfile.TemporaryFile", away)
    spooled(rows(), output="=1").save(tmp_path / "samples.csv")
    (row,) = read(tmp_path / "samples.csv")
    assert (row["runtime"], row["output"]) == ("ort-cpu", "'=1")
    assert "No space left on device" in row["index"]
    assert {cell for name, cell in row.items() if name not in COLUMNS[:3]} == {""}


def test_only_the_first_million_get_a_row():
    table = SampleRows()
    for start in (MOST - 2, MOST, 0):
        table.update(np.ones(3), start=start)
    assert table.result()["index"].tolist() == [0, 1, 2, MOST - 2, MOST - 1]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@x", "a\x1b[31m,\n\"b'"])
def test_a_stranger_s_name_is_a_text(tmp_path, name):
    spooled(rows(), output=name).save(tmp_path / "samples.csv")
    seen = {row["output"] for row in read(tmp_path / "samples.csv")}
    assert len(seen) == 1
    assert seen.pop()[0] in "'a"
    assert "\x1b" not in (tmp_path / "samples.csv").read_text()
