"""The table of samples, its rows on disk, and statistics of rows."""

from __future__ import annotations

import csv
import io
import itertools
import math
import tempfile
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gate.errors import EvidenceError
from gate.statistics.classification import ClassAnswers
from gate.statistics.sample_table import (
    COLUMNS,
    MAX_ROWS,
    ROW,
    OutputRows,
    RowSpool,
    RowStatistics,
    SampleRows,
    SampleTable,
)
from gate.statistics.serialization import from_plain, to_plain
from tests.measure.close import assert_close

R = np.array([[0.0, 2.0], [3.0, 0.0], [1.0, 0.0]])
C = np.array([[0.0, 2.5], [0.0, 1.0], [1.0, math.nan]])
LABELS = np.array([1, 0, 1])


def rows(start=0, stop=3, *, answers=True, labels=True):
    table = SampleRows()
    r, c = R[start:stop], C[start:stop]
    table.update(
        np.abs(r - c).max(axis=1),
        start=start,
        answers=(ClassAnswers.from_values(r), ClassAnswers.from_values(c)) if answers else None,
        labels=LABELS[start:stop] if labels else None,
    )
    return table


def create_table(*units, output="logits", classes=True):
    """Return the table of one runtime with one output."""
    spool = RowSpool(ROW)
    for unit in units:
        spool.add(output, unit.result())
    return SampleTable.from_runtimes({"ort-cpu": {output: OutputRows(spool, output, classes)}})


def read(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_csv_row_has_both_answers_and_signed_difference(tmp_path):
    create_table(rows()).save(tmp_path / "samples.csv")
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
def test_cells_without_value_are_empty(tmp_path, answers, classes):
    created = rows(answers=answers, labels=not classes)
    create_table(created, output="boxes", classes=classes).save(tmp_path / "samples.csv")
    result = read(tmp_path / "samples.csv")
    assert len(result) == 3
    for row in result:
        filled = {name for name, cell in row.items() if cell}
        assert filled == {"runtime", "output", "index", "max_abs_diff"}


def test_merged_rows_are_sorted_by_sample_and_serializable():
    complete = rows()
    parts = [rows(0, 1), rows(1, 3)]
    for merged in (parts[0].merge(parts[1]), parts[1].merge(parts[0])):
        assert merged.result().tobytes() == complete.result().tobytes()
        assert to_plain(merged) == to_plain(complete)
    assert complete.result()["index"].tolist() == [0, 1, 2]
    assert from_plain(to_plain(complete)).result().tobytes() == complete.result().tobytes()
    assert to_plain(SampleRows().merge(SampleRows())) == to_plain(SampleRows())


@pytest.mark.parametrize("part", [np.zeros(3), rows().result()[["index"]], "index"])
def test_state_with_wrong_row_type_is_refused(part):
    with pytest.raises(EvidenceError, match="other rows"):
        SampleRows().__setstate__({"_parts": [part]})


def test_csv_reports_rows_lost_on_a_full_disk(tmp_path, monkeypatch):
    def raise_no_space(**_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gate.statistics.sample_table._MEMORY_BYTES", 1)
    monkeypatch.setattr("tempfile.TemporaryFile", raise_no_space)
    create_table(rows(), output="=1").save(tmp_path / "samples.csv")
    (row,) = read(tmp_path / "samples.csv")
    assert (row["runtime"], row["output"]) == ("ort-cpu", "'=1")
    assert "No space left on device" in row["index"]
    assert {cell for name, cell in row.items() if name not in COLUMNS[:3]} == {""}


def test_rows_are_limited_to_the_first_million_samples():
    table = SampleRows()
    for start in (MAX_ROWS - 2, MAX_ROWS, 0):
        table.update(np.ones(3), start=start)
    assert table.result()["index"].tolist() == [0, 1, 2, MAX_ROWS - 2, MAX_ROWS - 1]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@x", "a\x1b[31m,\n\"b'"])
def test_output_name_is_escaped_as_csv_text(tmp_path, name):
    create_table(rows(), output=name).save(tmp_path / "samples.csv")
    observed = {row["output"] for row in read(tmp_path / "samples.csv")}
    assert len(observed) == 1
    assert observed.pop()[0] in "'a"
    assert "\x1b" not in (tmp_path / "samples.csv").read_text()


SPOOLED = np.dtype([("index", np.int64), ("size", np.float64)])


def spool_rows(start: int, stop: int) -> np.ndarray:
    created = np.zeros(stop - start, SPOOLED)
    created["index"] = np.arange(start, stop)
    created["size"] = np.sqrt(created["index"])
    return created


def read_spool(spool: RowSpool, output: str) -> bytes:
    return b"".join(step.tobytes() for step in spool.steps(output))


@pytest.fixture
def small_buffers(monkeypatch):
    """Use small buffers, so that few rows are written to disk and read in several steps."""
    monkeypatch.setattr("gate.statistics.sample_table._MEMORY_BYTES", 256)
    monkeypatch.setattr("gate.statistics.sample_table._STEP", 7)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("largest", [10, 100])
def test_spooled_rows_do_not_depend_on_unit_order(largest):
    @given(st.lists(st.integers(0, largest), max_size=5), st.randoms(use_true_random=False))
    def law(edges, random):
        spans = list(itertools.pairwise(sorted({0, *edges, largest})))
        random.shuffle(spans)
        spool = RowSpool(SPOOLED)
        for span in spans:
            spool.add("logits", spool_rows(*span))
            spool.add("boxes", spool_rows(*span)[:1])
        assert spool.lost is None
        assert (
            read_spool(spool, "logits")
            == read_spool(spool, "logits")
            == spool_rows(0, largest).tobytes()
        )
        assert len(read_spool(spool, "boxes")) == len(spans) * SPOOLED.itemsize

    law()


def test_output_without_rows_is_not_in_spool():
    spool = RowSpool(SPOOLED)
    spool.add("whole", spool_rows(0, 0))
    assert "whole" not in spool
    assert list(spool.steps("whole")) == []
    spool.add("logits", spool_rows(0, 1))
    assert "logits" in spool


@pytest.mark.usefixtures("small_buffers")
def test_changing_returned_rows_does_not_change_the_spool():
    spool = RowSpool(SPOOLED)
    spool.add("logits", spool_rows(0, 5))
    for step in spool.steps("logits"):
        step["size"] = -1.0
    assert read_spool(spool, "logits") == spool_rows(0, 5).tobytes()


def test_spool_memory_does_not_grow_with_rows(monkeypatch):
    monkeypatch.setattr("gate.statistics.sample_table._MEMORY_BYTES", 1 << 18)
    spool, part = RowSpool(SPOOLED), spool_rows(0, 5000)
    tracemalloc.start()
    try:
        for start in range(0, 300_000, 5000):
            part["index"] = np.arange(start, start + 5000)
            spool.add("logits", part)
        count = sum(len(step) for step in spool.steps("logits"))
        assert tracemalloc.get_traced_memory()[1] < 1_500_000 < count * SPOOLED.itemsize / 3
    finally:
        tracemalloc.stop()
    assert count == 300_000


def open_full_device(**_options: object) -> object:
    """Open a device that is always full."""
    return open("/dev/full", "r+b")  # noqa: PTH123 - as TemporaryFile


@pytest.mark.usefixtures("small_buffers")
def test_full_disk_loses_all_rows_without_error(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", open_full_device)
    spool = RowSpool(SPOOLED)
    spool.add("logits", spool_rows(0, 10))
    assert spool.lost is None
    spool.add("logits", spool_rows(10, 50))
    assert "No space left on device" in str(spool.lost)
    spool.add("logits", spool_rows(50, 51))
    spool.add("boxes", spool_rows(50, 51))
    for output in ("logits", "boxes"):
        assert output in spool
        assert read_spool(spool, output) == b""


class FullDisk(io.FileIO):
    """A file on a disk that is full after fifty rows."""

    def write(self, data: object, /) -> int:
        if self.tell() + len(memoryview(data)) > 50 * SPOOLED.itemsize:  # type: ignore[arg-type]
            raise OSError(28, "No space left on device")
        return super().write(data)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_buffers")
def test_disk_that_fills_up_on_flush_is_detected(tmp_path, monkeypatch):
    def filling(**_options: object) -> io.BufferedRandom:
        return io.BufferedRandom(FullDisk(tmp_path / "rows", "w+b"))

    monkeypatch.setattr(tempfile, "TemporaryFile", filling)
    spool = RowSpool(SPOOLED)
    spool.add("logits", spool_rows(0, 50))
    assert spool.lost is None
    spool.add("logits", spool_rows(50, 51))
    assert "No space" in str(spool.lost)
    assert read_spool(spool, "logits") == b""


NAN, INF = math.nan, math.inf


def compute_rows(r, c):
    statistics = RowStatistics()
    statistics.update(np.array(r, float), np.array(c, float))
    return statistics.result()


@pytest.mark.parametrize(("r", "c", "distance"), [
    ([1, 0], [1, 0], 0.0),
    ([1, 0], [5, 0], 0.0),
    ([1, 0], [0, 1], 1.0),
    ([1, 0], [-1, 0], 2.0),
    ([1, 1], [1, 0], 1.0 - math.sqrt(0.5)),
    ([0, 0], [0, 0], 0.0),
    ([0, 0], [0, 1], 1.0),
    ([1e300, 1e300], [1e300, 1e300], 0.0),
    ([1e-300, 0], [0, 1e-300], 1.0),
])  # fmt: skip
def test_cosine_distance(r, c, distance):
    assert compute_rows([r], [c]).cosine_distance == pytest.approx(distance, abs=1e-15)


def test_small_cosine_distance_keeps_precision():
    """1 - cos of an angle of 1e-6 is 5e-13."""
    observed = compute_rows([[1.0, 0.0]], [[math.cos(1e-6), math.sin(1e-6)]])
    assert observed.cosine_distance == pytest.approx(5e-13, rel=1e-6)


@pytest.mark.parametrize(("r", "c"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, -INF), (INF, -INF)])
def test_nonfinite_row_has_nonfinite_distance(r, c):
    observed = compute_rows([[1.0, 2.0], [r, 0.0]], [[1.0, 2.0], [c, 0.0]])
    assert not math.isfinite(observed.cosine_distance)
    assert not math.isfinite(observed.confidence_diff) or not math.isfinite(observed.sum_diff)


def test_values_next_to_equal_infinities_are_compared():
    same = compute_rows([[INF, 1.0, 2.0]], [[INF, 1.0, 2.0]])
    assert (same.cosine_distance, same.confidence_diff, same.sum_diff) == (0.0, 0.0, 0.0)
    assert same.sum_error == INF
    assert compute_rows([[-INF, 1.0, 2.0]], [[-INF, 2.0, 1.0]]).cosine_distance > 0.1


def test_rows_with_nan_on_both_sides_are_excluded():
    observed = compute_rows([[1.0, 2.0], [NAN, 0.0]], [[1.0, 2.0], [NAN, 5.0]])
    assert (observed.cosine_distance, observed.sum_diff) == (0.0, 0.0)
    assert compute_rows([[NAN, 0.0]], [[NAN, 5.0]]) is None
    assert RowStatistics().result() is None


PAIRS = hnp.arrays(
    np.float64,
    st.tuples(st.just(2), st.integers(1, 8), st.just(3)),
    elements=st.floats(-1e6, 1e6) | st.sampled_from([NAN, INF]),
)


@given(PAIRS, st.integers(0, 8))
def test_merged_row_statistics_equal_one_pass(pair, cut):
    parts = [RowStatistics(), RowStatistics()]
    for part, rows in zip(parts, (slice(None, cut), slice(cut, None)), strict=True):
        part.update(pair[0, rows], pair[1, rows])
    merged, complete = parts[0].merge(parts[1]).result(), compute_rows(*pair)
    if complete is None:
        assert merged is None
    else:
        assert_close(merged.model_dump(), complete.model_dump())
