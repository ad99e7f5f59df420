"""The loop that people write by hand: torch forward, ONNX Runtime, NumPy."""

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
    """Every sample gets the same class on both sides."""
    judged = False
    for pairs in _pairs(case):
        for expected, seen in pairs:
            if expected.ndim == 2 and expected.dtype.kind == "f":
                judged = True
                if not np.array_equal(expected.argmax(axis=1), seen.argmax(axis=1)):
                    return False
    if not judged:
        raise CannotJudge("the model returns no class scores of shape (batch, classes)")
    return True


def largest_difference(case: Case, *, optimised: bool) -> float:
    """max|c - r| over all samples and outputs."""
    return max(
        float(np.abs(seen - expected).max())
        for pairs in _pairs(case, optimised=optimised)
        for expected, seen in pairs
    )


def _pairs(case: Case, *, optimised: bool = True) -> Iterator[list[Pair]]:
    """By position, as the tutorial has it; another number of outputs raises."""
    loaded = session(str(case.file), optimised=optimised)
    names = [given.name for given in loaded.get_inputs()]
    for batch in case.batches():
        expected = case.expected(batch)
        seen = loaded.run(None, dict(zip(names, batch.values(), strict=True)))
        yield list(zip(expected, seen, strict=True))
