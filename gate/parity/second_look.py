"""A second look at doubtful samples: is it rounding that makes the difference, or the file?

A sample is doubtful where its error is large in units of the first samples' floor, where an integer
differs, or where the answer does. There the float64 truth and several runs under random rounding
say how far an honest float32 implementation may be off on that very sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from gate.errors import GateError
from gate.parity.floor import rounding_floor, seed
from gate.parity.look import Look, row_of
from gate.parity.rounding import RandomRounding
from gate.parity.runner import Batch
from gate.parity.stand import Stand, length
from gate.parity.statistics import Array
from gate.parity.track import Track

MOST = 64
"""Samples that are computed again."""
_DRAWS = 8


class SecondLook:
    """Looks at samples of the stand, each once for all runtimes."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand

    def at(self, sample: int) -> Look | None:
        """None where there is no float64 truth, or the model can't be computed so."""
        size, fixed = self._stand.binding.batch_size, self._stand.binding.fixed
        start = sample // size * size
        company = self._pick(range(start, min(start + size, len(self._stand.samples))))
        alone = company if fixed else self._pick([sample])
        row = sample - start if fixed else 0
        truth = self._stand.truth.aside(alone)
        if truth is None:
            return None
        try:
            reference = self._stand.reference.run(alone)
            draws = [self._run(alone, draw) for draw in range(_DRAWS)]
        except GateError:
            return None
        count = length(alone)
        return Look(
            sample=sample,
            truth=tuple(row_of(truth, row, count)),
            reference=tuple(row_of(reference, row, count)),
            draws=tuple(tuple(row_of(run, row, count)) for run in draws),
            batch=company,
            row=sample - start,
            count=length(company),
        )

    def _pick(self, places: Sequence[int]) -> Batch:
        return next(self._stand.samples.pick(places).batches(len(places)))

    def _run(self, batch: Batch, draw: int) -> list[Array]:
        with RandomRounding(seed(self._stand, draw)):
            return self._stand.reference.run(batch)


class RoundingFloor:
    """Measures the floor of rounding, once, if a runtime is farther off than PyTorch itself."""

    def __init__(self, stand: Stand, tracks: Sequence[Track]) -> None:
        self._stand = stand
        self._tracks = tracks
        self._done = False

    def widen(self) -> None:
        """Give it to every track; later calls do nothing."""
        if not self._done and any(track.suspicious for track in self._tracks):
            floors = rounding_floor(self._stand)
            for track in self._tracks:
                track.widen(floors)
        self._done = True


def look_again(stand: Stand, tracks: Sequence[Track]) -> None:
    """Tell apart what rounding makes from what the file does, where there is reason to doubt."""
    second = SecondLook(stand)
    turns = chain.from_iterable(zip_longest(*(track.doubtful for track in tracks)))
    doubtful = dict.fromkeys(sample for sample in turns if sample is not None)
    for sample in sorted(list(doubtful)[:MOST]):
        look = second.at(sample)
        if look is None:
            return
        for track in tracks:
            track.look(look)
