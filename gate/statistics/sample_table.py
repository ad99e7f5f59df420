"""Every sample with what both sides answer, one row each: a table beside the report."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import EvidenceError
from gate.parity.statistics.answers import ClassAnswers
from gate.parity.statistics.row_spool import RowSpool
from gate.storage import atomic

MOST = 1_000_000
"""Samples of an output that get a row: the first, whatever the order in which they come."""
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
        """Of both streams."""
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

    rows: Mapping[tuple[str, str], OutputRows] = field(default_factory=dict)
    """By runtime and output."""

    @classmethod
    def of(cls, runtimes: Mapping[str, Mapping[str, OutputRows]]) -> SampleTable:
        """Of rows by runtime, and by output."""
        return cls({(name, output): rows for name, own in runtimes.items()
                    for output, rows in own.items()})  # fmt: skip

    def save(self, path: Path) -> None:
        """Write it as CSV, atomically. Where rows were lost, one says why. Raises StorageError."""
        with atomic.replacing(path) as temporary, temporary.open("w", newline="") as stream:
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
