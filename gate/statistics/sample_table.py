"""A table with one row per sample, spooled to disk, and statistics of row vectors."""

from __future__ import annotations

import contextlib
import csv
import math
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclasses_field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gate.errors import EvidenceError
from gate.records.outputs import RowParity
from gate.statistics.accumulators import distances, worse
from gate.statistics.classification import ClassAnswers, count_by_band
from gate.storage import files

_MEMORY_BYTES = 1 << 20
"""Bytes kept in memory before a file is created; a few thousand samples need no file."""

_STEP = 1 << 13
"""Number of rows that are read back at a time."""


class _Run(NamedTuple):
    """Rows that were added in one call."""

    first: int
    """Sample index of the first row."""
    offset: int
    """Offset of the rows in the file, in bytes."""
    length: int


class RowSpool:
    """Stores rows of several outputs and returns those of one output ordered by index.

    The order of `add` calls does not matter: the rows of one call are a range of sample indices,
    and the ranges of an output do not overlap.

    A full disk or a missing temporary folder discards all rows but raises nothing: the table is not
    part of the evidence, and a long measurement must not fail because of it. `lost` then holds the
    reason. Keeping some of the rows would suggest that the table is complete.
    """

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        """`dtype`: dtype of a row, with a field `index`."""
        self.lost: str | None = None
        self._dtype = dtype
        self._runs: dict[str, list[_Run]] = {}
        self._end = 0
        self._file = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115 - closed by the finalizer
        weakref.finalize(self, self._file.close)

    def __contains__(self, output: str) -> bool:
        """Return whether rows of this output were added."""
        return output in self._runs

    def add(self, output: str, rows: NDArray[np.void]) -> None:
        """Add rows that are sorted by index."""
        if not len(rows):
            return
        runs = self._runs.setdefault(output, [])
        if self.lost is not None:
            return
        try:
            self._file.seek(self._end)
            self._file.write(rows.tobytes())
            self._file.flush()  # otherwise a full disk is noticed only when rows are read
        except OSError as error:
            self._lose(error)
            return
        runs.append(_Run(int(rows["index"][0]), self._end, len(rows)))
        self._end += rows.nbytes

    def steps(self, output: str) -> Iterator[NDArray[np.void]]:
        """Yield copies of an output's rows by index, a limited number at a time. Raises OSError."""
        for run in sorted(self._runs.get(output, ())):
            for start in range(0, run.length, _STEP):
                count = min(_STEP, run.length - start)
                self._file.seek(run.offset + start * self._dtype.itemsize)
                data = self._file.read(count * self._dtype.itemsize)
                yield np.frombuffer(data, self._dtype, count).copy()

    def _lose(self, error: OSError) -> None:
        self.lost = str(error.strerror or error)
        self._runs = {output: [] for output in self._runs}
        with contextlib.suppress(OSError):  # closing writes the buffer again, which fails again
            self._file.close()  # free the disk space for others


Floats = NDArray[np.float64]


LARGEST = 2**16
"""Length of the longest row that counts as a vector; an image does not."""


class RowStatistics:
    """Accumulates over float64 arrays of shape (rows, 2 to 65 536).

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)). A row with
    NaN at the same positions on both sides is skipped, as for agreement.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._cosine = 0.0
        self._confidence = 0.0
        self._bands = np.zeros(4, np.int64)
        self._sum_diff = 0.0
        self._sum_error = 0.0

    @np.errstate(all="ignore")
    def update(self, r: Floats, c: Floats) -> None:
        """Add a batch of reference and candidate rows."""
        nan = np.isnan(r)
        alike = nan.any(axis=1) & (nan == np.isnan(c)).all(axis=1)
        if alike.any():
            r, c = r[~alike], c[~alike]
        if not len(r):
            return
        self._rows += len(r)
        changes = distances(c.max(axis=1), r.max(axis=1))
        error = np.nan_to_num(np.abs(r.sum(axis=1) - 1.0), nan=np.inf, posinf=np.inf)
        # Equal infinities have no direction and no sum, so only the other elements are compared.
        infinite = np.isinf(r) & (r == c)
        if infinite.any():
            r, c = np.where(infinite, 0.0, r), np.where(infinite, 0.0, c)
        self._cosine = worse(self._cosine, float(_cosine_distances(r, c).max()))
        self._sum_diff = worse(self._sum_diff, float(distances(c.sum(axis=1), r.sum(axis=1)).max()))
        self._sum_error = worse(self._sum_error, float(error.max()))
        self._confidence = worse(self._confidence, float(changes.max()))
        self._bands += count_by_band(changes)

    def merge(self, other: RowStatistics) -> RowStatistics:
        """Return the statistics of both streams."""
        merged = RowStatistics()
        merged._rows = self._rows + other._rows
        merged._bands = self._bands + other._bands
        for field in ("_cosine", "_confidence", "_sum_diff", "_sum_error"):
            setattr(merged, field, worse(getattr(self, field), getattr(other, field)))
        return merged

    def result(self) -> RowParity | None:
        """Return the record; None without rows."""
        if not self._rows:
            return None
        below_1, to_5, to_10, over_10 = (float(count) / self._rows for count in self._bands)
        return RowParity(
            cosine_distance=self._cosine,
            confidence_diff=self._confidence,
            bands=(below_1, to_5, to_10, over_10),
            sum_diff=self._sum_diff,
            sum_error=self._sum_error,
        )


@np.errstate(all="ignore")
def _cosine_distances(r: Floats, c: Floats) -> Floats:
    """Return 1 - cos of each pair of rows, in [0, 2].

    0 for two zero rows, 1 if only one is zero, infinite if one is not finite. Computed as half the
    squared distance of the unit vectors, which is exact near 0.
    """
    units = [row / _lengths(row) for row in (r, c)]
    cosine_distances: Floats = np.square(units[0] - units[1]).sum(axis=1) / 2.0
    cosine_distances = np.where((r == 0).all(axis=1) != (c == 0).all(axis=1), 1.0, cosine_distances)
    return np.where((np.isfinite(r) & np.isfinite(c)).all(axis=1), cosine_distances, np.inf)


def _lengths(rows: Floats) -> Floats:
    """Return Euclidean lengths of shape (rows, 1); 1 for zero rows."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scale = np.where(largest > 0.0, largest, 1.0)
    lengths = scale * np.sqrt(np.square(rows / scale).sum(axis=1, keepdims=True))
    return np.where(lengths > 0.0, lengths, 1.0)


MAX_ROWS = 1_000_000
"""Largest sample index with a row, exclusive."""

COLUMNS = ("runtime", "output", "index", "label", "reference_top1", "candidate_top1",
           "reference_probability", "candidate_probability", "confidence_diff",
           "reference_margin", "candidate_margin", "max_abs_diff")  # fmt: skip


_NONE = -1

ROW: np.dtype[np.void] = np.dtype(
    [("index", np.int64), ("label", np.int32), ("reference_top1", np.int32),
     ("candidate_top1", np.int32), ("reference_probability", np.float64),
     ("candidate_probability", np.float64), ("reference_margin", np.float64),
     ("candidate_margin", np.float64), ("max_abs_diff", np.float64)]
)  # fmt: skip

_ANSWERS = {"top1": _NONE, "probability": math.nan, "margin": math.nan}


class SampleRows:
    """Accumulates one row of 60 bytes per sample until it is moved to a `RowSpool`.

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)), also after
    serialization.
    """

    def __init__(self) -> None:
        self._parts: list[NDArray[np.void]] = []

    def update(
        self,
        largest: NDArray[np.float64],
        *,
        start: int,
        answers: tuple[ClassAnswers, ClassAnswers] | None = None,
        labels: NDArray[np.int64] | None = None,
    ) -> None:
        """Add the largest difference of each sample of a batch, and both sides' class answers if
        any.

        start: index of the batch's first sample.
        """
        part = np.zeros(max(0, min(len(largest), MAX_ROWS - start)), ROW)
        if not len(part):
            return
        part["index"] = np.arange(start, start + len(part))
        part["max_abs_diff"] = largest[: len(part)]
        part["label"] = _NONE if labels is None else labels[: len(part)]
        for side_index, side in enumerate(("reference", "candidate")):
            for name, nothing in _ANSWERS.items():
                part[f"{side}_{name}"] = nothing
            if answers:
                part[f"{side}_top1"] = answers[side_index].top1[: len(part)]
                part[f"{side}_probability"] = answers[side_index].confidence[: len(part)]
                part[f"{side}_margin"] = answers[side_index].margin[: len(part)]
        self._parts.append(part)

    def merge(self, other: SampleRows) -> SampleRows:
        """Return the rows of both streams."""
        merged = SampleRows()
        merged._parts = self._parts + other._parts
        return merged

    def __getstate__(self) -> dict[str, object]:
        """Return all rows as one part ordered by sample, so that the state does not depend on
        batches."""
        return {"_parts": [self.result()] if self._parts else []}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore the parts. Raises EvidenceError unless they are arrays of dtype ROW."""
        parts = list(state["_parts"])
        if any(not isinstance(part, np.ndarray) or part.dtype != ROW for part in parts):
            raise EvidenceError("the results of a unit contain other rows. Measure the unit again.")
        self._parts = parts

    def result(self) -> NDArray[np.void]:
        """Return the rows ordered by sample, shape (samples,)."""
        rows = np.concatenate(self._parts) if self._parts else np.zeros(0, ROW)
        return rows[np.argsort(rows["index"], kind="stable")]


@dataclass(frozen=True)
class OutputRows:
    """The rows of one output."""

    spool: RowSpool
    output: str
    classes: bool
    """True if the output holds class scores; if not, class columns are left empty."""

    def steps(self) -> Iterator[NDArray[np.void]]:
        """Yield the rows by sample, a limited number at a time. Raises OSError."""
        for rows in self.spool.steps(self.output):
            if not self.classes:
                rows["label"] = rows["reference_top1"] = rows["candidate_top1"] = _NONE
            yield rows


@dataclass(frozen=True)
class SampleTable:
    """The rows of every output of every measured runtime."""

    rows: Mapping[tuple[str, str], OutputRows] = dataclasses_field(default_factory=dict)
    """Rows by runtime and output."""

    @classmethod
    def from_runtimes(cls, runtimes: Mapping[str, Mapping[str, OutputRows]]) -> SampleTable:
        """Create the table from rows by runtime and output."""
        return cls({(name, output): rows for name, by_output in runtimes.items()
                    for output, rows in by_output.items()})  # fmt: skip

    def save(self, path: Path) -> None:
        """Write a CSV file atomically. A row states the reason if rows were lost. Raises
        StorageError."""
        with files.replacing(path) as temporary, temporary.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(COLUMNS)
            for name, output_rows in self.rows.items():
                if output_rows.spool.lost is not None:
                    writer.writerow(_lost_row(name, output_rows.spool.lost))
                for rows in output_rows.steps():
                    writer.writerows(_csv_rows(name, rows))


def _csv_rows(name: tuple[str, str], rows: NDArray[np.void]) -> Iterator[tuple[object, ...]]:
    """Yield CSV cells; a cell is empty if the number does not exist."""
    runtime, output = map(_spreadsheet_safe, name)
    for index, label, top_r, top_c, p_r, p_c, margin_r, margin_c, largest in rows.tolist():
        correct = "" if label == _NONE else label
        if top_r == _NONE:
            yield runtime, output, index, correct, *[""] * 7, f"{largest:.6g}"
        else:
            yield (runtime, output, index, correct, top_r, top_c, f"{p_r:.9g}", f"{p_c:.9g}",
                   f"{p_c - p_r:+.6g}", f"{margin_r:.6g}", f"{margin_c:.6g}",
                   f"{largest:.6g}")  # fmt: skip


def _lost_row(name: tuple[str, str], reason: str) -> tuple[str, ...]:
    """Return a row that states why the rows of an output are missing.

    The reason is in the index column, so that no program reads the table as empty.
    """
    message = (
        f"no rows: they could not be written to the temporary folder ({reason}). Free space "
        "there or set TMPDIR, and measure again. Evidence and verdict are complete."
    )
    return (*map(_spreadsheet_safe, name), message, *[""] * (len(COLUMNS) - 3))


def _spreadsheet_safe(name: str) -> str:
    """Return a name that spreadsheets do not interpret as a formula."""
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown
