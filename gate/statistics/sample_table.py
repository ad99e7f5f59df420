"""One row per sample, spooled to disk; statistics of row vectors."""

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
from gate.statistics.classification import ClassAnswers
from gate.storage import files

_HELD_BYTES = 1 << 20
"""Held in memory before there is a file: a check of some thousand samples needs none."""

_STEP = 1 << 13
"""Rows that are read back at a time."""


class _Run(NamedTuple):
    """Rows that were added together."""

    first: int
    """Index of the first."""
    offset: int
    """Bytes before it in the file."""
    length: int


class RowSpool:
    """Takes rows of several outputs and gives those of each back by their index, step by step.

    What comes back does not depend on the order of `add`, because the rows of one call are a range
    of samples by index, and no two ranges of an output overlap.

    A disk that is full, or a temporary folder that is not there, loses all rows and stops nothing:
    the table is no part of the evidence, most checks are asked for none, and hours of measuring
    must not end for it. `lost` says why, in the place of the rows; some of them without the others
    would look like all there are.
    """

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        """`dtype`: of a row, with a field `index`."""
        self.lost: str | None = None
        self._dtype = dtype
        self._runs: dict[str, list[_Run]] = {}
        self._end = 0
        self._file = tempfile.SpooledTemporaryFile(_HELD_BYTES)  # noqa: SIM115 - as long as this
        weakref.finalize(self, self._file.close)

    def __contains__(self, output: str) -> bool:
        """Return whether rows of this output were added."""
        return output in self._runs

    def add(self, output: str, rows: NDArray[np.void]) -> None:
        """Take rows, sorted by index."""
        if not len(rows):
            return
        runs = self._runs.setdefault(output, [])
        if self.lost is not None:
            return
        try:
            self._file.seek(self._end)
            self._file.write(rows.tobytes())
            self._file.flush()  # or a full disk is noticed when they are read
        except OSError as error:
            self._lose(error)
            return
        runs.append(_Run(int(rows["index"][0]), self._end, len(rows)))
        self._end += rows.nbytes

    def steps(self, output: str) -> Iterator[NDArray[np.void]]:
        """Its rows by index, some at a time, as own copies. Raises OSError."""
        for run in sorted(self._runs.get(output, ())):
            for start in range(0, run.length, _STEP):
                count = min(_STEP, run.length - start)
                self._file.seek(run.offset + start * self._dtype.itemsize)
                data = self._file.read(count * self._dtype.itemsize)
                yield np.frombuffer(data, self._dtype, count).copy()

    def _lose(self, error: OSError) -> None:
        self.lost = str(error.strerror or error)
        self._runs = {output: [] for output in self._runs}
        with contextlib.suppress(OSError):  # what could not be written is tried once more
            self._file.close()  # others need the room


Floats = NDArray[np.float64]


LARGEST = 2**16
"""Elements of the longest row that is looked at: an image is no vector."""


_EDGES = (0.01, 0.05, 0.10)


class RowStatistics:
    """Accumulates over float64 arrays of shape (rows, 2 to 65 536).

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)). A row with
    NaN on both sides in the same places is left out, as in agreement.
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
        """Add a batch of both sides."""
        nan = np.isnan(r)
        alike = nan.any(axis=1) & (nan == np.isnan(c)).all(axis=1)
        if alike.any():
            r, c = r[~alike], c[~alike]
        if not len(r):
            return
        self._rows += len(r)
        moved = distances(c.max(axis=1), r.max(axis=1))
        error = np.nan_to_num(np.abs(r.sum(axis=1) - 1.0), nan=np.inf, posinf=np.inf)
        # Equal infinities have no direction and no sum: the other elements are compared.
        infinite = np.isinf(r) & (r == c)
        if infinite.any():
            r, c = np.where(infinite, 0.0, r), np.where(infinite, 0.0, c)
        self._cosine = worse(self._cosine, float(_cosine_distances(r, c).max()))
        self._sum_diff = worse(self._sum_diff, float(distances(c.sum(axis=1), r.sum(axis=1)).max()))
        self._sum_error = worse(self._sum_error, float(error.max()))
        self._confidence = worse(self._confidence, float(moved.max()))
        first, second, third = _EDGES
        within = [int((moved < first).sum()), int((moved < second).sum()),
                  int((moved <= third).sum()), len(moved)]  # fmt: skip
        self._bands += np.diff(within, prepend=0)

    def merge(self, other: RowStatistics) -> RowStatistics:
        """Statistics of both streams."""
        merged = RowStatistics()
        merged._rows = self._rows + other._rows
        merged._bands = self._bands + other._bands
        for field in ("_cosine", "_confidence", "_sum_diff", "_sum_error"):
            setattr(merged, field, worse(getattr(self, field), getattr(other, field)))
        return merged

    def result(self) -> RowParity | None:
        """The record; None without rows."""
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
    """1 - cos of each pair of rows, in [0, 2]; 0 for two zero rows, 1 where one is zero, infinite
    where one is not finite.

    By half the squared distance of the unit vectors, which keeps its digits near 0.
    """
    units = [row / _lengths(row) for row in (r, c)]
    apart: Floats = np.square(units[0] - units[1]).sum(axis=1) / 2.0
    apart = np.where((r == 0).all(axis=1) != (c == 0).all(axis=1), 1.0, apart)
    return np.where((np.isfinite(r) & np.isfinite(c)).all(axis=1), apart, np.inf)


def _lengths(rows: Floats) -> Floats:
    """Euclidean, shape (rows, 1); 1 for zero rows."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scale = np.where(largest > 0.0, largest, 1.0)
    lengths = scale * np.sqrt(np.square(rows / scale).sum(axis=1, keepdims=True))
    return np.where(lengths > 0.0, lengths, 1.0)


MOST = 1_000_000
"""Samples of an output that get a row: the first by index, in whatever order they come."""

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
    """Accumulates one row a sample, 60 bytes each, of a unit: what is done goes to a `RowSpool`.

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)), packed too.
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
        """Add the largest differences of a batch, whose first row is sample `start`, and the
        answers of both sides, if they are of classes."""
        part = np.zeros(max(0, min(len(largest), MOST - start)), ROW)
        if not len(part):
            return
        part["index"] = np.arange(start, start + len(part))
        part["max_abs_diff"] = largest[: len(part)]
        part["label"] = _NONE if labels is None else labels[: len(part)]
        for place, side in enumerate(("reference", "candidate")):
            for name, nothing in _ANSWERS.items():
                part[f"{side}_{name}"] = nothing
            if answers:
                part[f"{side}_top1"] = answers[place].top1[: len(part)]
                part[f"{side}_probability"] = answers[place].confidence[: len(part)]
                part[f"{side}_margin"] = answers[place].margin[: len(part)]
        self._parts.append(part)

    def merge(self, other: SampleRows) -> SampleRows:
        """Return the rows of both streams."""
        merged = SampleRows()
        merged._parts = self._parts + other._parts
        return merged

    def __getstate__(self) -> dict[str, object]:
        """All rows as one part, by sample, however they were cut."""
        return {"_parts": [self.result()] if self._parts else []}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Raises EvidenceError for what are no rows: they are kept as bytes from here on."""
        parts = list(state["_parts"])
        if any(not isinstance(part, np.ndarray) or part.dtype != ROW for part in parts):
            raise EvidenceError("a part holds other rows than of samples. Measure the unit again.")
        self._parts = parts

    def result(self) -> NDArray[np.void]:
        """The rows by sample, shape (samples,)."""
        rows = np.concatenate(self._parts) if self._parts else np.zeros(0, ROW)
        return rows[np.argsort(rows["index"], kind="stable")]


@dataclass(frozen=True)
class OutputRows:
    """All rows of one output."""

    spool: RowSpool
    output: str
    classes: bool
    """False where the answers turned out to be none."""

    def steps(self) -> Iterator[NDArray[np.void]]:
        """The rows by sample, some at a time. Raises OSError."""
        for rows in self.spool.steps(self.output):
            if not self.classes:
                rows["label"] = rows["reference_top1"] = rows["candidate_top1"] = _NONE
            yield rows


@dataclass(frozen=True)
class SampleTable:
    """The rows of every output of every runtime that was measured."""

    rows: Mapping[tuple[str, str], OutputRows] = dataclasses_field(default_factory=dict)
    """By runtime and output."""

    @classmethod
    def from_runtimes(cls, runtimes: Mapping[str, Mapping[str, OutputRows]]) -> SampleTable:
        """Return the table of rows by runtime, and by output."""
        return cls({(name, output): rows for name, own in runtimes.items()
                    for output, rows in own.items()})  # fmt: skip

    def save(self, path: Path) -> None:
        """Write it as CSV, atomically. Where rows were lost, one says why. Raises StorageError."""
        with files.replacing(path) as temporary, temporary.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(COLUMNS)
            for place, output_rows in self.rows.items():
                if output_rows.spool.lost is not None:
                    writer.writerow(_lost(place, output_rows.spool.lost))
                for rows in output_rows.steps():
                    writer.writerows(_texts(place, rows))


def _texts(place: tuple[str, str], rows: NDArray[np.void]) -> Iterator[tuple[object, ...]]:
    """Cells as a spreadsheet should have them; empty where there is no such number."""
    runtime, output = map(_harmless, place)
    for index, label, top_r, top_c, p_r, p_c, margin_r, margin_c, largest in rows.tolist():
        correct = "" if label == _NONE else label
        if top_r == _NONE:
            yield runtime, output, index, correct, *[""] * 7, f"{largest:.6g}"
        else:
            yield (runtime, output, index, correct, top_r, top_c, f"{p_r:.9g}", f"{p_c:.9g}",
                   f"{p_c - p_r:+.6g}", f"{margin_r:.6g}", f"{margin_c:.6g}",
                   f"{largest:.6g}")  # fmt: skip


def _lost(place: tuple[str, str], reason: str) -> tuple[str, ...]:
    """No number stands where the index is expected, so that no program takes it for an empty
    table."""
    says = (
        f"no rows: they found no room in the temporary folder ({reason}). Free space there, or set "
        "TMPDIR, and measure again. Evidence and verdict are whole."
    )
    return (*map(_harmless, place), says, *[""] * (len(COLUMNS) - 3))


def _harmless(name: str) -> str:
    """The name of an output as a text: a spreadsheet computes what begins like a formula."""
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown
