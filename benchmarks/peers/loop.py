"""A hand-written loop with PyTorch, ONNX Runtime and NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.case import CannotJudge, Case, open_session

Pair = tuple[NDArray[np.generic], NDArray[np.generic]]


def allclose(case: Case) -> bool:
    """Compare one batch with rtol 1e-3 and atol 1e-5, as in PyTorch's exporter tutorial."""
    for expected, computed in next(_pairs(case)):
        np.testing.assert_allclose(expected, computed, rtol=1e-3, atol=1e-5)
    return True


def top1(case: Case) -> bool:
    """Compare the top-1 class of the first output in every sample."""
    if not case.classes:
        raise CannotJudge("the model returns no scores of classes")
    top1_classes = [(r.argmax(axis=1), c.argmax(axis=1)) for (r, c), *_ in _pairs(case)]
    return all(np.array_equal(expected, computed) for expected, computed in top1_classes)


def largest_difference(case: Case, *, optimized: bool) -> float:
    """Return max|c - r| over all samples and outputs."""
    return max(
        float(np.abs(computed - expected).max())
        for pairs in _pairs(case, optimized=optimized)
        for expected, computed in pairs
    )


def _pairs(case: Case, *, optimized: bool = True) -> Iterator[list[Pair]]:
    """Yield pairs of outputs by position, as in the tutorial. Raises if their numbers differ."""
    session = open_session(str(case.file), optimized=optimized)
    names = [node.name for node in session.get_inputs()]
    for batch in case.batches():
        expected = case.expected_outputs(batch)
        computed = session.run(None, dict(zip(names, batch.values(), strict=True)))
        yield list(zip(expected, computed, strict=True))
