"""Batches that are computed once more for their time alone: the reference and all runtimes take
turns, so that what slows the machine down slows down all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice

from gate.parity.runners.runner import Runner
from gate.parity.stand import Stand, length
from gate.parity.statistics.output import Array
from gate.parity.track import Track
from gate.runtimes.runtime import Batch

_LEAST, _LEAST_WHOLE, _MOST = 3, 2, 20
"""Turns of one sample and of a whole batch; the first one warms up."""
_SHARE = 0.02
"""Of the time that the samples took: so much more may the turns take beyond the least."""
_FREE_S = 0.05
"""So much they may take in any case."""


def take_turns(stand: Stand, tracks: Sequence[Track], *, seconds: float) -> None:
    """Time batches of one sample, and the first full batch where there was no second one: its one
    time is that of a first run. `seconds`: how long all samples took.

    A file with a fixed batch can't take one sample, which is noted. A runtime that breaks has
    failed. Raises EvidenceError where the reference breaks.
    """
    size = stand.binding.batch_size
    allowed = max(_SHARE * seconds, _FREE_S)
    if stand.reference.meter.is_cold:
        batch = next(stand.samples.batches(size))
        for _ in _turns(allowed, least=_LEAST_WHOLE, taken=1):
            expected = stand.reference.timed_run(batch)
            for track in tracks:
                _repeat(track, batch, expected)
    if size == 1:  # its batches are of one sample
        return
    if stand.binding.fixed:
        reason = f"the file has a fixed batch axis of {size}"
        for meter in (stand.reference.meter, *(track.meter for track in tracks)):
            meter.single_unmeasured = reason
        return
    samples = cycle(islice(stand.samples.batches(1), _LEAST))
    for sample, _ in zip(samples, _turns(allowed, least=_LEAST), strict=False):
        expected = stand.reference.single_run(sample)
        stand.answers.note_reference(sample, expected)
        for track in tracks:
            _take_turn(track, sample, expected, note=track.meter.single)


def _repeat(track: Track, batch: Batch, expected: Sequence[Array]) -> None:
    note = partial(track.meter.batch, batch_size=length(batch))
    _take_turn(track, batch, expected, note=note)


def _take_turn(
    track: Track, batch: Batch, expected: Sequence[Array], *, note: Callable[[float], None]
) -> None:
    """Compute it on the clock; a recording computes nothing. What it answers is kept for whoever
    asks for another time of it."""
    if track.runner is None or not track.runner.live:
        return
    try:
        track.compute(batch, expected, by=Runner.run_kept)
        note(track.runner.seconds)
    except Exception as error:
        track.fail(error)


def _turns(allowed: float, *, least: int, taken: int = 0) -> Iterator[int]:
    """As many as that many seconds allow, and at least `least`; `taken` were before."""
    start = time.perf_counter()
    for turn in range(taken, _MOST):
        if turn >= least and time.perf_counter() - start > allowed:
            return
        yield turn
