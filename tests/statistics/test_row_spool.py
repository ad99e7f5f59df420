"""Rows come back by their index, from the disk; what finds no room there is lost as a whole."""

from __future__ import annotations

import io
import itertools
import tempfile
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.statistics.sample_table import RowSpool

ROW = np.dtype([("index", np.int64), ("size", np.float64)])


def rows(start: int, stop: int) -> np.ndarray:
    made = np.zeros(stop - start, ROW)
    made["index"] = np.arange(start, stop)
    made["size"] = np.sqrt(made["index"])
    return made


def read(spool: RowSpool, output: str) -> bytes:
    return b"".join(step.tobytes() for step in spool.steps(output))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are a file, and are read in several steps."""
    monkeypatch.setattr("gate.statistics.sample_table._HELD_BYTES", 256)
    monkeypatch.setattr("gate.statistics.sample_table._STEP", 7)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("largest", [10, 100])
def test_the_order_of_units_and_where_they_were_cut_change_nothing(largest: int) -> None:
    @given(st.lists(st.integers(0, largest), max_size=5), st.randoms(use_true_random=False))
    def law(edges, random):
        spans = list(itertools.pairwise(sorted({0, *edges, largest})))
        random.shuffle(spans)
        spool = RowSpool(ROW)
        for span in spans:
            spool.add("logits", rows(*span))
            spool.add("boxes", rows(*span)[:1])
        assert spool.lost is None
        assert read(spool, "logits") == read(spool, "logits") == rows(0, largest).tobytes()
        assert len(read(spool, "boxes")) == len(spans) * ROW.itemsize

    law()


def test_an_output_without_rows_is_none() -> None:
    spool = RowSpool(ROW)
    spool.add("whole", rows(0, 0))
    assert "whole" not in spool
    assert list(spool.steps("whole")) == []
    spool.add("logits", rows(0, 1))
    assert "logits" in spool


@pytest.mark.usefixtures("small")
def test_what_comes_back_is_a_copy_of_one_s_own() -> None:
    spool = RowSpool(ROW)
    spool.add("logits", rows(0, 5))
    for step in spool.steps("logits"):
        step["size"] = -1.0
    assert read(spool, "logits") == rows(0, 5).tobytes()


def test_memory_does_not_grow_with_the_rows() -> None:
    spool, part = RowSpool(ROW), rows(0, 5000)
    tracemalloc.start()
    try:
        for start in range(0, 1_000_000, 5000):
            part["index"] = np.arange(start, start + 5000)
            spool.add("logits", part)
        count = sum(len(step) for step in spool.steps("logits"))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000 < count * ROW.itemsize / 3
    finally:
        tracemalloc.stop()
    assert count == 1_000_000


def full(**_options: object) -> object:
    """A device on which nothing finds room."""
    return open("/dev/full", "r+b")  # noqa: PTH123 - as TemporaryFile


def missing(**_options: object) -> object:
    raise FileNotFoundError(2, "No usable temporary directory found")


@pytest.mark.parametrize(
    ("temporary", "says"), [(full, "No space left on device"), (missing, "No usable temporary")]
)
@pytest.mark.usefixtures("small")
def test_without_room_no_row_is_left_and_nothing_stops(
    temporary: object, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", temporary)
    spool = RowSpool(ROW)
    spool.add("logits", rows(0, 10))
    assert spool.lost is None
    spool.add("logits", rows(10, 50))
    assert says in str(spool.lost)
    spool.add("logits", rows(50, 51))
    spool.add("boxes", rows(50, 51))
    for output in ("logits", "boxes"):
        assert output in spool
        assert read(spool, output) == b""


class Filling(io.FileIO):
    """On a disk that is full after fifty rows."""

    def write(self, data: object, /) -> int:
        if self.tell() + len(memoryview(data)) > 50 * ROW.itemsize:  # type: ignore[arg-type]
            raise OSError(28, "No space left on device")
        return super().write(data)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small")
def test_a_disk_that_fills_up_is_noticed_with_the_last_rows(tmp_path, monkeypatch) -> None:
    def filling(**_options: object) -> io.BufferedRandom:
        return io.BufferedRandom(Filling(tmp_path / "rows", "w+b"))

    monkeypatch.setattr(tempfile, "TemporaryFile", filling)
    spool = RowSpool(ROW)
    spool.add("logits", rows(0, 50))
    assert spool.lost is None
    spool.add("logits", rows(50, 51))
    assert "No space" in str(spool.lost)
    assert read(spool, "logits") == b""
