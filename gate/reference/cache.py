"""What the reference gave to small batches, so that no instrument asks for it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gate.errors import GateError
from gate.parity.float64.by_sample import SampleTruths, agree
from gate.parity.kept_answers import Answer, KeptAnswers
from gate.parity.statistics.output import Array
from gate.runtimes.recording.rows import Rows, row_digests
from gate.runtimes.runtime import Batch

_ROOM = 2**26
"""Bytes of answers that are kept of each kind."""

Forward = Callable[[Batch], Answer]


class ReferenceAnswers:
    """Of the model in float32, and in float64 as far as it runs so."""

    def __init__(self, reference: Forward, truth: Forward) -> None:
        """`reference` may raise EvidenceError, `truth` returns None instead."""
        self._reference, self._truth = reference, truth
        self._single, self._double = KeptAnswers(room=_ROOM), KeptAnswers(room=_ROOM)
        self._samples = SampleTruths(room=_ROOM)

    def reference(self, batch: Batch) -> list[Array]:
        """All outputs, read-only. Raises EvidenceError."""
        return self._single_of(batch, row_digests(batch))

    def truth(self, batch: Batch) -> Answer:
        """The same in float64; None where the model can't run so.

        What was computed of the samples before is put together, where company does not matter.
        """
        digests = row_digests(batch)
        return self._double.take(digests, lambda: self._joined(batch, digests))

    def note(self, batch: Batch, reference: Sequence[Array], truth: Sequence[Array]) -> None:
        """Take what both answered to a batch that somebody computed anyway: read-only from now."""
        digests = row_digests(batch)
        self._single.take(digests, lambda: list(reference))
        self._samples.note(digests, reference, truth)

    def note_reference(self, batch: Batch, reference: Sequence[Array]) -> None:
        """The same of the answer in float32 alone."""
        self._single.take(row_digests(batch), lambda: list(reference))

    def ask_together(self, singles: Sequence[Batch], *, most: int) -> None:
        """Compute batches of one sample and of one shape in float64, up to `most` at a time, which
        costs half. Kept is what agrees with the float32 answer to the sample alone."""
        digests = ((row_digests(batch), batch) for batch in singles)
        by_digest = {own.tobytes(): batch for own, batch in digests if not self._samples.holds(own)}
        missing = list(by_digest.values())
        for start in range(0, len(missing), most):
            part = missing[start : start + most]
            joined = {name: np.concatenate([batch[name] for batch in part]) for name in part[0]}
            truth = self._truth(joined)
            if truth is None or any(r64.ndim == 0 or len(r64) != len(part) for r64 in truth):
                return
            for row, batch in enumerate(part):
                self._note_alone(batch, [r64[row : row + 1] for r64 in truth])

    def _note_alone(self, batch: Batch, truth: list[Array]) -> None:
        digests = row_digests(batch)
        try:
            reference = self._single_of(batch, digests)
        except GateError:
            return
        if len(reference) == len(truth) and all(map(agree, truth, reference)):
            self._samples.note(digests, reference, truth)

    def _single_of(self, batch: Batch, digests: Rows) -> list[Array]:
        made = self._single.take(digests, lambda: self._reference(batch))
        assert made is not None
        return made

    def _joined(self, batch: Batch, digests: Rows) -> Answer:
        if self._samples.holds(digests):
            joined = self._samples.of(digests, self._single_of(batch, digests))
            if joined is not None:
                return joined
        made = self._truth(batch)
        if made is not None:
            self._samples.note(digests, self._single_of(batch, digests), made)
        return made
