"""The float64 answers to single samples, so that each is computed only once.

Batches of other sizes are made of samples that were computed before, and a forward in float64 is
the dearest of all. That an answer belongs to the sample alone holds only where its company does
not matter to the model; the model's float32 outputs show whether it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gate.parity.statistics.output import Array
from gate.runtimes.recording.rows import Rows

_AGREES = 1e-5
"""max|a - b| / max|b| of a sample in one batch and in another: rounding, and no other answer."""


class _Answer(NamedTuple):
    """All outputs of one sample, each of shape (1, ...)."""

    single: list[Array]
    """float32, of the company in which `double` was computed."""
    double: list[Array]


class SampleTruths:
    """Float64 outputs by the content of a sample."""

    def __init__(self, *, room: int) -> None:
        """`room`: bytes of outputs that are kept."""
        self._by_sample: dict[bytes, _Answer] = {}
        self._room = room

    def note(self, digests: Rows, reference: Sequence[Array], truth: Sequence[Array]) -> None:
        """Keep what both made of each sample; nothing of outputs that have no row for each.
        `digests`: of the samples (`row_digests`)."""
        if not _by_row(reference, truth, count=len(digests)):
            return
        for row, digest in enumerate(digests):
            alone = slice(row, row + 1)
            answer = _Answer([r[alone].copy() for r in reference], [r[alone].copy() for r in truth])
            self._room -= sum(output.nbytes for kind in answer for output in kind)
            if self._room < 0:
                return
            self._by_sample[digest.tobytes()] = answer

    def holds(self, digests: Rows) -> bool:
        """True if every one of the samples was noted."""
        return all(digest.tobytes() in self._by_sample for digest in digests)

    def of(self, digests: Rows, reference: Sequence[Array]) -> list[Array] | None:
        """The float64 outputs of a batch whose samples it holds, by its float32 outputs; None
        where these are others than the samples had when they were noted."""
        answers = [self._by_sample[digest.tobytes()] for digest in digests]
        first = [r.shape for r in answers[0].single]
        if any([r.shape for r in answer.single] != first for answer in answers):
            return None
        single = [np.concatenate(rows) for rows in zip(*(a.single for a in answers), strict=True)]
        if len(single) != len(reference) or not all(map(agree, single, reference)):
            return None
        return [np.concatenate(rows) for rows in zip(*(a.double for a in answers), strict=True)]


def _by_row(reference: Sequence[Array], truth: Sequence[Array], *, count: int) -> bool:
    return len(reference) == len(truth) and all(
        r.ndim > 0 and len(r) == count and r.shape == r64.shape
        for r, r64 in zip(reference, truth, strict=True)
    )


def agree(one: Array, other: Array) -> bool:
    """True if two answers of one kind and shape differ by rounding alone."""
    if one.shape != other.shape or one.dtype.kind != other.dtype.kind:
        return False
    if one.dtype.kind != "f":
        return np.array_equal(one, other)
    finite = np.isfinite(other)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return False
    a, b = one[finite].astype(np.float64), other[finite].astype(np.float64)
    moved, scale = np.abs(a - b).max(initial=0.0), np.abs(b).max(initial=0.0)
    return bool(moved <= _AGREES * scale)
