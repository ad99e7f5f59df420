"""Reading ahead: worker processes fetch, decode and preprocess while the model computes.

PyTorch's DataLoader runs them. A worker opens the samples itself, by their name: so nothing of this
process goes there, and threads of ONNX Runtime are not forked.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError, GateError, StorageError, by_name, first_line
from gate.parity.arrays.mapped import MappedRows
from gate.parity.arrays.rows import Array, Block, SourceRows
from gate.parity.sources.opening import Opening
from gate.parity.sources.repeated import RepeatedRows

_START_S = 8.0
"""Until workers have imported PyTorch: what is decoded in less is decoded here."""
_MOST = 4
"""Workers where nobody says how many."""
_Answer = tuple[dict[str, Array], NDArray[np.int64] | None] | tuple[str, str]
"""Arrays and labels; or an error by its class and message, which would else come as a traceback."""


def read_ahead(rows: SourceRows, opening: Opening, *, workers: int | None) -> SourceRows:
    """The rows as samples need them: compared at each reading, and read ahead by so many processes
    (None: some, where it pays). Arrays that are mapped need neither."""
    if isinstance(rows, MappedRows):
        return rows
    return RepeatedRows(rows if workers == 0 else AheadRows(rows, opening, workers))


class AheadRows(SourceRows):
    """Another source, of which batches in order are read by workers."""

    def __init__(self, rows: SourceRows, opening: Opening, workers: int | None) -> None:
        """`workers`: None takes as many as there are cores for, once that pays."""
        self.origin, self.specs, self.labelled = rows.origin, rows.specs, rows.labelled
        self._rows, self._opening, self._wanted = rows, opening, workers
        self._spans = _Spans()
        self._loader: Any = None
        self._busy = False

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._rows)

    def read(self, places: Sequence[int]) -> Block:
        """The samples at these places, read here."""
        return self._rows.read(places)

    def batches(self, places: range, size: int) -> Iterator[Block]:
        """The samples of a range by `size`. The first batch is read here: many need no other."""
        began = time.perf_counter()
        first = self._rows.read(places[:size])
        one_s = time.perf_counter() - began
        yield first
        rest = [places[start : start + size] for start in range(size, len(places), size)]
        if self._busy or not self._pays(one_s * len(rest)):
            yield from (self._rows.read(span) for span in rest)
            return
        self._busy = True
        try:
            for span, answer in zip(rest, self._answers(rest), strict=True):
                yield self._block(answer, span)
        finally:
            self._busy = False

    def _block(self, answer: Any, span: range) -> Block:
        first, second = answer
        if isinstance(first, str):
            raise (by_name(first) or DataError)(second)
        forms = {spec.name: (spec.dtype, (len(span), *spec.shape[1:])) for spec in self.specs}
        if {name: (array.dtype.name, array.shape) for name, array in first.items()} != forms:
            raise DataError(
                f"samples {span.start} to {span.stop - 1} of {self.origin} are others in another "
                "process. Let the factory give the same samples each time it is called."
            )
        return Block(first, second)

    def _pays(self, alone_s: float) -> bool:
        if alone_s <= 0:
            return False
        if self._wanted is not None:
            return self._wanted > 0
        return _cores() > 1 and (self._loader is not None or alone_s > _START_S)

    def _answers(self, spans: Sequence[range]) -> Iterator[_Answer]:
        """What the workers read, in order. They stay for the next time."""
        self._spans.now = spans
        try:
            if self._loader is None:
                self._loader = self._started()
            yield from self._loader
        except GateError:
            raise
        except Exception as error:
            self._loader = None
            raise StorageError(
                f"a process that reads {self.origin} ahead ended: {first_line(error)}. If it was "
                "killed for its memory, give fewer: --decode-workers 1, or 0 for none."
            ) from error

    def _started(self) -> Any:
        from torch.utils.data import DataLoader

        workers = self._wanted or min(_MOST, _cores() - 1)
        with warnings.catch_warnings():  # of more workers than cores, which somebody asked for
            warnings.simplefilter("ignore", UserWarning)
            return DataLoader(
                _Opened(self._opening),  # type: ignore[arg-type]  # all that it asks of a Dataset
                batch_size=None,
                sampler=self._spans,
                num_workers=workers,
                collate_fn=_as_it_is,  # arrays through a pipe: /dev/shm of a container is small
                multiprocessing_context="spawn",
                persistent_workers=True,
            )


class _Spans:
    """The sampler: which ranges are read, now."""

    now: Sequence[range] = ()

    def __iter__(self) -> Iterator[range]:
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)


class _Opened:
    """The samples in a worker, opened by the first range that is read of them."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._rows: SourceRows | None = None

    def __getitem__(self, span: range) -> _Answer:
        try:
            if self._rows is None:
                self._rows = self._opening.rows()
            block = self._rows.read(span)
        except GateError as error:
            return type(error).__name__, str(error)
        return block.arrays, block.labels


def _as_it_is(answer: Any) -> Any:
    return answer


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
