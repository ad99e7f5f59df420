"""Does rounding explain each outlier sample?"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

from gate.data.reader import length
from gate.errors import GateError
from gate.measure.context import MeasurementContext
from gate.measure.noise_floor import BASELINE_DRAWS, DRAWS, MORE_DRAWS, rounding_floor
from gate.measure.runtime_measurement import MOST_LOOKS, Track
from gate.measure.session_runner import RoundingVariants, own, row_of
from gate.storage.arrays import Batch, OutputArray

# A sample is doubtful where its error is large in units of the first samples' floor, where an
# integer differs, or where the answer does. There the float64 truth and several runs under random
# rounding say how far an honest float32 implementation may be off on that very sample.


_steps = logging.getLogger("gate.steps")

_DRAWS = 8

_MORE_DRAWS = 64
"""Of a sample few integers of which no draw has: of a hundred ties a few lie where rounding seldom
goes."""

_FEW = 8
"""Integers of a sample for which that is worth it; of very many, an eighth of those before."""

_SCALE = 2.0
"""As for probes (`gate.probes.branches`)."""

_HOPELESS = 32.0
"""Times what is suspicious: no number of runs makes such a floor."""

_PATIENCE = 4
"""Samples with integers that nothing explains, after which it is the file."""


class SecondLook:
    """Looks at samples of the stand, each once for all runtimes."""

    def __init__(self, stand: MeasurementContext) -> None:
        self._stand = stand

    def at(self, sample: int) -> RoundingVariants | None:
        """None where there is no float64 truth, or the model can't be computed so."""
        start, company = self._company(sample)
        alone, row = self._alone(sample)
        truth = self._stand.truth.aside(alone)
        if truth is None:
            return None
        try:
            reference = self._stand.reference.run(alone)
            draws = [self._stand.rounded_run(alone, draw=draw) for draw in range(_DRAWS)]
        except GateError:
            return None
        truth = self._stand.truth.validity.checked(truth, reference, draws)
        count = length(alone)
        return RoundingVariants(
            sample=sample,
            truth=tuple(own(truth, row, count)),
            reference=tuple(own(reference, row, count)),
            draws=tuple(tuple(own(run, row, count)) for run in draws),
            batch=company,
            row=sample - start,
            count=length(company),
        )

    def honest(self, sample: int) -> Iterator[list[OutputArray | None]]:
        """What honest runtimes make of a sample: the float64 truth, PyTorch, and one run under
        random rounding after the other, the later ones twice as far off."""
        batch, row = self._alone(sample)
        count = length(batch)
        truth = self._stand.truth.aside(batch)
        if truth is None:
            return
        try:
            reference = self._stand.reference.run(batch)
            yield row_of(self._stand.truth.validity.baseline(truth, reference), row, count)
            yield row_of(reference, row, count)
            for draw in range(_MORE_DRAWS):
                scale = 1.0 if draw < _DRAWS else _SCALE
                run = self._stand.rounded_run(batch, draw=draw, scale=scale, ties=True)
                yield row_of(run, row, count)
        except GateError:
            return

    def _company(self, sample: int) -> tuple[int, Batch]:
        """The batch that the sample was measured in, and its first sample."""
        size = self._stand.binding.batch_size
        places = self._stand.samples.batch_around(sample, size)
        return places.start, self._pick(places)

    def _alone(self, sample: int) -> tuple[Batch, int]:
        """The smallest batch that the file and the model take with the sample in it, and its place
        there."""
        if self._stand.smallest == 1:
            return self._pick([sample]), 0
        start, company = self._company(sample)
        return company, sample - start

    def _pick(self, places: Sequence[int]) -> Batch:
        return next(self._stand.samples.take(places).batches(len(places)))


class RoundingFloor:
    """Measures the floor of rounding, if a runtime is farther off than PyTorch itself; and more
    exactly where it is a little farther off than that, too."""

    def __init__(self, stand: MeasurementContext, tracks: Sequence[Track]) -> None:
        self._stand = stand
        self._tracks = tracks
        self._done = False

    def given(self) -> None:
        """Leave the tracks the floors that they have: another process measured them."""
        self._done = True

    def widen(self) -> None:
        """Give it to every track; later calls do nothing."""
        alone = self._stand.truth.validity.needs_rounding
        first = BASELINE_DRAWS if alone else DRAWS
        for draws, beyond in () if self._done else ((first, math.inf), (MORE_DRAWS, _HOPELESS)):
            suspicion = max((track.suspicion for track in self._tracks), default=0.0)
            if not 1.0 < suspicion <= beyond and not (alone and draws == first):
                break
            floors = rounding_floor(self._stand, draws=draws)
            for track in self._tracks:
                track.widen(floors)
        self._done = True


def analyze_outliers(stand: MeasurementContext, tracks: Sequence[Track]) -> None:
    """Tell apart what rounding makes from what the file does, where there is reason to doubt."""
    second = SecondLook(stand)
    wanted = []
    for track in tracks:
        doubtful, most = track.doubtful, track.looks(stand.applied_policy)
        wanted.append(doubtful[:most])
        if most < MOST_LOOKS:
            torn = [] if most else track.torn
            track.leave_out(len({*doubtful, *torn}) - len(wanted[-1]))
    turns = chain.from_iterable(zip_longest(*wanted))
    chosen = dict.fromkeys(sample for sample in turns if sample is not None)
    samples = sorted(list(chosen)[:MOST_LOOKS])
    for done, sample in enumerate(samples):
        _steps.debug("second looks: %d of %d samples left", len(samples) - done, len(samples))
        look = second.at(sample)
        if look is None:
            return
        for track in tracks:
            track.look(look)
    _excuse_ties(second, [track for track in tracks if track.looks(stand.applied_policy)])


def _excuse_ties(second: SecondLook, tracks: Sequence[Track]) -> None:
    """Of all samples of which integers differ, until some can't be explained."""
    patience = _PATIENCE
    for sample in sorted({sample for track in tracks for sample in track.torn}):
        before = _unexplained(tracks, sample)
        for number, run in enumerate(second.honest(sample)):
            for track in tracks:
                track.excuse(sample, run)
            left = _unexplained(tracks, sample)
            if not left or (number > _DRAWS and left > max(_FEW, before // 8)):
                break
        patience -= bool(_unexplained(tracks, sample))
        if not patience:
            return


def _unexplained(tracks: Sequence[Track], sample: int) -> int:
    return max((track.unexplained(sample) for track in tracks), default=0)
