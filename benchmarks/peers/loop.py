"""A hand-written loop: torch forward, ONNX Runtime, NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.case import CannotJudge, Case, session

Pair = tuple[NDArray[np.generic], NDArray[np.generic]]


def allclose(case: Case) -> bool:
    """As in PyTorch's tutorial of the exporter: one batch, rtol 1e-3 and atol 1e-5."""
    for expected, seen in next(_pairs(case)):
        np.testing.assert_allclose(expected, seen, rtol=1e-3, atol=1e-5)
    return True


def top1(case: Case) -> bool:
    """The first output has the same winner on both sides, in every sample."""
    if not case.classes:
        raise CannotJudge("the model returns no scores of classes")
    winners = [(r.argmax(axis=1), c.argmax(axis=1)) for (r, c), *_ in _pairs(case)]
    return all(np.array_equal(expected, seen) for expected, seen in winners)


def largest_difference(case: Case, *, optimized: bool) -> float:
    """max|c - r| over all samples and outputs."""
    return max(
        float(np.abs(seen - expected).max())
        for pairs in _pairs(case, optimized=optimized)
        for expected, seen in pairs
    )


def _pairs(case: Case, *, optimized: bool = True) -> Iterator[list[Pair]]:
    """By position, as the tutorial has it; another number of outputs raises."""
    loaded = session(str(case.file), optimized=optimized)
    names = [given.name for given in loaded.get_inputs()]
    for batch in case.batches():
        expected = case.expected(batch)
        seen = loaded.run(None, dict(zip(names, batch.values(), strict=True)))
        yield list(zip(expected, seen, strict=True))
