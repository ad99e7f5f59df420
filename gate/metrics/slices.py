"""Read labels and other columns of the samples from `.npy`, JSON lines or Parquet."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError
from gate.metrics.metric import Slice
from gate.storage.digest import Digest

LABEL = "label"
"""The column of labels in JSON lines and Parquet."""

MAX_VALUES = 50
"""Maximum number of distinct values of a slice column; a column with more is an ID."""

_NPY, _JSONL, _PARQUET = ".npy", ".jsonl", ".parquet"

Labels = NDArray[Any] | Sequence[Any]
"""One entry for each sample: rows of an array, or values of JSON."""

_Table = tuple[Labels | None, dict[str, Sequence[Any]]]
"""Labels and columns of a file."""


@dataclass(frozen=True)
class Annotations:
    """Labels and columns of the samples, in addition to the inputs."""

    labels: Labels | None = None
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Slice columns by name, one text per sample."""
    sha256: Digest | None = None
    """Digest of the files with labels and columns."""
    slices_sha256: Digest | None = None
    """Digest of the file with the columns. None without columns."""

    @classmethod
    def open(
        cls, *, labels: Path | None, slices: Path | None, names: Sequence[str], samples: int | None
    ) -> Annotations:
        """Read labels, and the columns `names` from the file `slices`, else from the label file.

        Raises DataError for a file of another type or length, and for a column that is missing or
        has more than 50 values.
        """
        rows: Labels | None = None
        columns: dict[str, Sequence[Any]] = {}
        if labels is not None:
            rows, columns = _read(labels, () if slices else names)
            if rows is None:
                raise DataError(
                    f"{labels} has no column '{LABEL}'; it has: {', '.join(columns) or 'none'}."
                )
            _check_length(len(rows), samples, labels)
        if slices is not None:
            _, columns = _read(slices, names)
        origin = slices or labels
        texts = {}
        for name in names:
            if name not in columns:
                raise DataError(_missing(name, origin, columns))
            _check_length(len(columns[name]), samples, origin)
            texts[name] = tuple(map(_text, columns[name]))
            if len(set(texts[name])) > MAX_VALUES:
                raise DataError(
                    f"the column '{name}' of {origin} has {len(set(texts[name]))} distinct values. "
                    f"Slices need a column of at most {MAX_VALUES}: group the values."
                )
        files = [Digest.from_file(path).hex for path in (labels, slices) if path is not None]
        return cls(
            rows,
            texts,
            Digest.from_json({"files": files}) if files else None,
            Digest.from_file(origin) if texts and origin is not None else None,
        )

    def rows(self, start: int, stop: int) -> Labels | None:
        """Return the labels of a range of samples."""
        return None if self.labels is None else self.labels[start:stop]

    def slices(self, names: Sequence[str]) -> list[Slice]:
        """Return one slice for each value of each column, sorted."""
        slices = []
        for name in names:
            values = np.asarray(self.columns[name])
            slices += [Slice(name, str(value), values == value) for value in np.unique(values)]
        return slices


def _check_length(count: int, samples: int | None, path: Path | None) -> None:
    if samples is not None and count != samples:
        raise DataError(
            f"{path} has {count} entries, the data set has {samples} samples. Provide one per "
            "sample, in the same order."
        )


def _missing(name: str, origin: Path | None, columns: Mapping[str, Any]) -> str:
    if origin is None:
        return (
            f"the policy has a slice '{name}', and no file has this column. Pass --slices "
            "FILE.jsonl or FILE.parquet."
        )
    return (
        f"{origin} has no column '{name}' for the slices of the policy; it has: "
        f"{', '.join(columns) or 'none'}. Correct the name, or pass --slices FILE.jsonl or "
        "FILE.parquet."
    )


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    raise DataError(f"a slice is {str(value)[:60]!r}, expected a text, a number or true or false.")


def _read(path: Path, names: Sequence[str]) -> _Table:
    """Return labels and columns; of Parquet only those of `names` have values. Raises DataError."""
    readers: dict[str, Callable[[Path], _Table]] = {
        _NPY: _read_npy,
        _JSONL: partial(_read_lines, names=names),
        _PARQUET: partial(_read_parquet, names=names),
    }
    reader = readers.get(path.suffix)
    if reader is None:
        raise DataError(
            f"{path.name} is not a .npy, .jsonl or .parquet file. Save the labels as one."
        )
    try:
        labels, columns = reader(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}.") from error
    if isinstance(labels, list) and all(isinstance(label, int | float) for label in labels):
        array = np.asarray(labels)  # as in .npy: a comparison with a list is False
        labels = array if array.dtype.kind in "biuf" else labels
    return labels, columns


def _read_npy(path: Path) -> _Table:
    try:
        array = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path} is not a complete .npy file: {error}.") from error
    if array.ndim == 0 or array.dtype.kind not in "biufU":
        raise DataError(f"{path} holds {array.dtype} of shape {array.shape}, expected one label "
                        "per sample.")  # fmt: skip
    return (array.tolist() if array.dtype.kind == "U" else array), {}


def _read_lines(path: Path, *, names: Sequence[str]) -> _Table:
    rows = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}. Save it as UTF-8.") from error
    # Not splitlines(): JSON strings may contain U+2028 and similar characters.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON: {error}.") from error
    columns: dict[str, Sequence[Any]] = {}
    for name in dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row):
        has_name = [isinstance(row, dict) and name in row for row in rows]
        if all(has_name):
            columns[name] = [row[name] for row in rows]
        elif name in (LABEL, *names):
            raise DataError(
                f"{path}: the entry {has_name.index(False) + 1} has no '{name}', others have one. "
                "Give each sample one."
            )
    # Without labels, each line is a label itself, or has slice columns only.
    return columns.get(LABEL, rows), columns


def _read_parquet(path: Path, *, names: Sequence[str]) -> _Table:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow: pip install 'parity-gate[data]'") from error
    try:
        columns: dict[str, Sequence[Any]] = dict.fromkeys(pq.read_schema(path).names, ())
        # The file may have the inputs too.
        table = pq.read_table(path, columns=[n for n in (LABEL, *names) if n in columns])
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a complete Parquet file: {error}.") from error
    for name in table.column_names:
        try:
            # The same values as in JSON lines, which the process of the metrics receives.
            columns[name] = json.loads(json.dumps(table.column(name).to_pylist(), default=_plain))
        except (TypeError, ValueError, OverflowError) as error:
            if name == LABEL:
                raise DataError(
                    f"{path}: the column '{LABEL}' is of {table.schema.field(name).type}: "
                    f"{error}. Save numbers, texts, dates, or lists and structs of them."
                ) from error
            del columns[name]
    return columns.get(LABEL), columns


def _plain(value: Any) -> Any:
    """Return an Arrow value as JSON: dates and times become ISO 8601 strings."""
    if isinstance(value, Decimal):
        is_integer = value == value.to_integral_value()
        return int(value) if is_integer else float(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    raise TypeError(f"{type(value).__name__} is not a label")
