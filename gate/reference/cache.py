"""Cache outputs of small batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gate.errors import GateError
from gate.runtimes.recording_format import Rows, row_digests
from gate.storage.arrays import Batch, OutputArray

# Batches of other sizes consist of samples that were computed before, and a float64 forward is the
# slowest of all. Outputs of single samples may be reused only if the rest of the batch does not
# affect them. The model's float32 outputs show whether it does.


_AGREES = 1e-5
"""Largest max|a - b| / max|b| of a sample between two batches that counts as rounding."""


class _Answer(NamedTuple):
    """The outputs of one sample, each of shape (1, ...)."""

    single: list[OutputArray]
    """float32 outputs, from the batch in which `double` was computed."""
    double: list[OutputArray]


class SampleTruths:
    """Float64 outputs by the content of the sample."""

    def __init__(self, *, room: int) -> None:
        """`room`: bytes of outputs that are kept."""
        self._by_sample: dict[bytes, _Answer] = {}
        self._room = room

    def note(
        self, digests: Rows, reference: Sequence[OutputArray], truth: Sequence[OutputArray]
    ) -> None:
        """Store both outputs of each sample, unless some output does not have one row per sample.
        `digests`: digests of the samples (`row_digests`)."""
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
        """Return True if all of these samples are stored."""
        return all(digest.tobytes() in self._by_sample for digest in digests)

    def join(self, digests: Rows, reference: Sequence[OutputArray]) -> list[OutputArray] | None:
        """Return the float64 outputs of a batch of stored samples. None if the batch's float32
        outputs `reference` differ from the stored ones."""
        answers = [self._by_sample[digest.tobytes()] for digest in digests]
        first = [r.shape for r in answers[0].single]
        if any([r.shape for r in answer.single] != first for answer in answers):
            return None
        single = [np.concatenate(rows) for rows in zip(*(a.single for a in answers), strict=True)]
        if len(single) != len(reference) or not all(map(agree, single, reference)):
            return None
        return [np.concatenate(rows) for rows in zip(*(a.double for a in answers), strict=True)]


def _by_row(reference: Sequence[OutputArray], truth: Sequence[OutputArray], *, count: int) -> bool:
    return len(reference) == len(truth) and all(
        r.ndim > 0 and len(r) == count and r.shape == r64.shape
        for r, r64 in zip(reference, truth, strict=True)
    )


def agree(left: OutputArray, right: OutputArray, *, relative: float = _AGREES) -> bool:
    """Return True if two outputs of the same dtype and shape differ by rounding only.

    relative: the largest max|left - right| / max|right|; NaN and infinities must be equal.
    """
    if left.shape != right.shape or left.dtype.kind != right.dtype.kind:
        return False
    if left.dtype.kind != "f":
        return np.array_equal(left, right)
    finite = np.isfinite(right)
    if not np.array_equal(left[~finite], right[~finite], equal_nan=True):
        return False
    a, b = left[finite].astype(np.float64), right[finite].astype(np.float64)
    change, scale = np.abs(a - b).max(initial=0.0), np.abs(b).max(initial=0.0)
    return bool(change <= relative * scale)


Answer = list[OutputArray] | None
"""Returns all outputs, or None if the batch can't be computed."""


class OutputCache:
    """A cache of the outputs of one side by the ordered samples of a batch, with limited size."""

    def __init__(self, *, room: int) -> None:
        """`room`: bytes of outputs that are kept."""
        self._by_batch: dict[bytes, Answer] = {}
        self._room = room

    def get_or_compute(self, digests: Rows, compute: Callable[[], Answer]) -> Answer:
        """Return the cached outputs of these samples, else call `compute` and cache its outputs.

        All arrays are read-only. `digests`: digests of the samples (`row_digests`).
        """
        key = digests.tobytes()
        if key in self._by_batch:
            return self._by_batch[key]
        outputs = compute()
        for output in outputs or []:
            output.flags.writeable = False
        size = sum(output.nbytes for output in outputs or [])
        if size <= self._room:
            self._room -= size
            self._by_batch[key] = outputs
        return outputs


_ROOM = 2**26
"""Bytes of cached outputs, for float32 and for float64."""


Forward = Callable[[Batch], Answer]


class ReferenceCache:
    """A cache of the outputs of the model in float32, and in float64 if it can run in float64."""

    def __init__(self, reference: Forward, truth: Forward) -> None:
        """`reference` may raise EvidenceError; `truth` returns None instead."""
        self._reference, self._truth = reference, truth
        self._single, self._double = OutputCache(room=_ROOM), OutputCache(room=_ROOM)
        self._samples = SampleTruths(room=_ROOM)

    def reference(self, batch: Batch) -> list[OutputArray]:
        """Return all outputs, read-only. Raises EvidenceError."""
        return self._float32_outputs(batch, row_digests(batch))

    def truth(self, batch: Batch) -> Answer:
        """Return the outputs in float64, or None if the model can't run in float64.

        Joins stored outputs of single samples if they do not depend on the rest of the batch.
        """
        digests = row_digests(batch)
        return self._double.get_or_compute(digests, lambda: self._float64_outputs(batch, digests))

    def note(
        self, batch: Batch, reference: Sequence[OutputArray], truth: Sequence[OutputArray]
    ) -> None:
        """Store both outputs of a batch that was computed elsewhere, and make them read-only."""
        digests = row_digests(batch)
        self._single.get_or_compute(digests, lambda: list(reference))
        self._samples.note(digests, reference, truth)

    def forget_truth(self) -> None:
        """Drop the float64 outputs, because another mode computes other ones."""
        self._double, self._samples = OutputCache(room=_ROOM), SampleTruths(room=_ROOM)

    def note_reference(self, batch: Batch, reference: Sequence[OutputArray]) -> None:
        """Store the float32 outputs only."""
        self._single.get_or_compute(row_digests(batch), lambda: list(reference))

    def compute_together(self, singles: Sequence[Batch], *, most: int) -> None:
        """Compute single samples of one shape in float64, up to `most` at a time, which costs half.
        Stores those that agree with the float32 output of the single sample."""
        by_digest = {row_digests(batch).tobytes(): batch for batch in singles}
        missing = [b for b in by_digest.values() if not self._samples.holds(row_digests(b))]
        for start in range(0, len(missing), most):
            part = missing[start : start + most]
            joined = {name: np.concatenate([batch[name] for batch in part]) for name in part[0]}
            truth = self._truth(joined)
            if truth is None or any(r64.ndim == 0 or len(r64) != len(part) for r64 in truth):
                return
            for row, batch in enumerate(part):
                self._note_alone(batch, [r64[row : row + 1] for r64 in truth])

    def _note_alone(self, batch: Batch, truth: list[OutputArray]) -> None:
        digests = row_digests(batch)
        try:
            reference = self._float32_outputs(batch, digests)
        except GateError:
            return
        if len(reference) == len(truth) and all(map(agree, truth, reference)):
            self._samples.note(digests, reference, truth)

    def _float32_outputs(self, batch: Batch, digests: Rows) -> list[OutputArray]:
        outputs = self._single.get_or_compute(digests, lambda: self._reference(batch))
        assert outputs is not None
        return outputs

    def _float64_outputs(self, batch: Batch, digests: Rows) -> Answer:
        """Return float64 outputs, joined from cached samples if possible."""
        if self._samples.holds(digests):
            joined = self._samples.join(digests, self._float32_outputs(batch, digests))
            if joined is not None:
                return joined
        outputs = self._truth(batch)
        if outputs is not None:
            self._samples.note(digests, self._float32_outputs(batch, digests), outputs)
        return outputs
