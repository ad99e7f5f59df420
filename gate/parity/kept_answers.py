"""Answers that are kept, so that nothing computes the same samples again."""

from __future__ import annotations

from collections.abc import Callable

from gate.parity.statistics.output import Array
from gate.runtimes.recording.rows import Rows

Answer = list[Array] | None
"""All outputs; None of whoever can't compute a batch."""


class KeptAnswers:
    """Of one side, by the samples of a batch and their order, as far as there is room."""

    def __init__(self, *, room: int) -> None:
        """`room`: bytes of outputs that are kept."""
        self._by_batch: dict[bytes, Answer] = {}
        self._room = room

    def take(self, digests: Rows, compute: Callable[[], Answer]) -> Answer:
        """What is kept of these samples, else what `compute` makes, which is kept from then on:
        read-only. `digests`: of the samples (`row_digests`)."""
        key = digests.tobytes()
        if key in self._by_batch:
            return self._by_batch[key]
        made = compute()
        for output in made or []:
            output.flags.writeable = False
        size = sum(output.nbytes for output in made or [])
        if size <= self._room:
            self._room -= size
            self._by_batch[key] = made
        return made
