"""Which batch sizes a runtime computes that breaks on others: one may be baked into the file."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from gate.errors import GateError, describe_failure
from gate.records.evidence import ONLY_BATCHES
from gate.runtimes.runtime import Batch

_SIZES = (*range(1, 17), 24, 32, 48, 64)
_SECONDS = 10.0
_NAMED = 4


def failure_of(error: Exception, batch: Batch, compute: Callable[[Batch], object]) -> str:
    """The failure in one line, and the batch sizes that `compute` takes, where it takes some and
    refuses others as small.

    A file that breaks on all of them says nothing of batches, and one that breaks on large ones
    alone may lack memory: then it is `describe_failure` alone, as for the gate's own errors.
    """
    failure = describe_failure(error)
    if isinstance(error, GateError | MemoryError) or "memory" in failure.lower():
        return failure
    taken = _taken(batch, compute)
    sizes = [size for size, computed in taken.items() if computed]
    if not sizes or len(sizes) == len(taken):
        return failure
    shown = ", ".join(str(size) for size in sizes[:_NAMED])
    more = ", ..." if len(sizes) > _NAMED else ""
    return f"{failure.rstrip('.')}. {ONLY_BATCHES}{shown}{more}."


def _taken(batch: Batch, compute: Callable[[Batch], object]) -> dict[int, bool]:
    """Whether it computes the samples of the batch, repeated or cut to each size; sizes that
    follow the last one that it computes say nothing, and are left out."""
    taken: dict[int, bool] = {}
    end = time.perf_counter() + _SECONDS
    for size in _SIZES:
        if time.perf_counter() > end:
            break
        try:
            compute(
                {name: np.resize(array, (size, *array.shape[1:])) for name, array in batch.items()}
            )
        except Exception:
            taken[size] = False
        else:
            taken[size] = True
    last = max((size for size, computed in taken.items() if computed), default=0)
    alone = last == 1 and taken.get(2) is False
    return {size: computed for size, computed in taken.items() if size <= (2 if alone else last)}
