"""Samples that lie with the driver, for workers of other machines: read there, range by range."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from gate.errors import GateError
from gate.parity.arrays.rows import Block, SourceRows
from gate.parity.sources.opening import Opening
from gate.records.evidence import TensorSpec
from gate.scale.worker import WorkerFailure


@dataclass(frozen=True)
class SourceForm:
    """What is to be known of samples before any is read."""

    origin: str
    specs: tuple[TensorSpec, ...]
    count: int
    labelled: bool


class SampleReader:
    """An actor beside the driver, where the samples are."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._rows: dict[str, SourceRows] = {}
        """By who reads: each goes on where it was, in a file that is read from its beginning."""

    def form(self) -> SourceForm | WorkerFailure:
        """Open the samples."""
        try:
            rows = self._opened("")
        except GateError as error:
            return WorkerFailure.of(error)
        return SourceForm(rows.origin, rows.specs, len(rows), rows.labelled)

    def read(self, places: Sequence[int], who: str) -> Block | WorkerFailure:
        """As `SourceRows.read`, for one of many."""
        try:
            return self._opened(who).read(places)
        except GateError as error:
            return WorkerFailure.of(error)

    def _opened(self, who: str) -> SourceRows:
        if who not in self._rows:
            self._rows[who] = self._opening.rows()
        return self._rows[who]


class FetchedRows(SourceRows):
    """What a `SampleReader` reads. While a batch is computed, the next one is on its way."""

    def __init__(self, reader: Any) -> None:
        """`reader`: the actor's handle. Raises what opening the samples raised there."""
        form: SourceForm = _answer(reader.form.remote())
        self._reader, self._count, self._who = reader, form.count, uuid.uuid4().hex
        self.origin, self.specs, self.labelled = form.origin, form.specs, form.labelled

    def __len__(self) -> int:
        """Number of samples."""
        return self._count

    def read(self, places: Sequence[int]) -> Block:
        """The samples at these places."""
        return _own(_answer(self._request(places)))

    def batches(self, places: range, size: int) -> Iterator[Block]:
        """The samples of a range by `size`."""
        spans = [places[start : start + size] for start in range(0, len(places), size)]
        coming = self._request(spans[0])
        for after in [*spans[1:], None]:
            here = coming
            if after is not None:
                coming = self._request(after)
            yield _own(_answer(here))

    def _request(self, places: Sequence[int]) -> Any:
        return self._reader.read.remote(places, self._who)


def _answer(reference: Any) -> Any:
    answer = ray.get(reference)
    if isinstance(answer, WorkerFailure):
        raise answer.error()
    return answer


def _own(block: Block) -> Block:
    """Arrays of the object store are read only."""
    return Block({name: np.array(array) for name, array in block.arrays.items()}, block.labels)
