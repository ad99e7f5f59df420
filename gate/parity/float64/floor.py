"""The floor of rounding: what random rounding makes of the samples that have a float64 truth."""

from __future__ import annotations

from collections.abc import Iterator

from gate.errors import GateError
from gate.parity.float64.noise import NoiseStatistics
from gate.parity.rounding.run import rounded_run
from gate.parity.stand import Stand, length
from gate.parity.statistics.output import Array
from gate.runtimes.runtime import Batch

DRAWS = 3
MORE_DRAWS = 15
"""Where three give too small a floor: the errors of a column may be those of one sample, and of
three errors the one in the middle is small by chance in every twentieth column."""


def rounding_floor(stand: Stand, *, draws: int = DRAWS) -> list[NoiseStatistics | None]:
    """For each output of the model, its errors under random rounding; None where it has none.

    Of so many runs it is the one in the middle, column by column: a rare flip of an argmax or of a
    condition, which moves an answer far, widens no floor. Empty if the model can't be computed so,
    or the one in float64 can't.
    """
    floors: list[list[NoiseStatistics | None]] = []
    for batch in _with_truth(stand):
        reference = stand.answers.reference(batch)  # both as the pass over the samples had them
        truth = stand.answers.truth(batch)
        if truth is None:
            return []
        floors = floors or [[None] * len(reference) for _ in range(draws)]
        for draw, own in enumerate(floors):  # one run at a time is held
            try:
                run = rounded_run(stand, batch, draw=draw)
            except GateError:
                return []
            for place, arrays in enumerate(zip(truth, reference, run, strict=False)):
                own[place] = _added(own[place], arrays, samples=length(batch))
    return [_middle(several) for several in zip(*floors, strict=True)]


def _with_truth(stand: Stand) -> Iterator[Batch]:
    """The batches that the noise floor was measured on."""
    done = 0
    for batch in stand.samples.batches(stand.binding.batch_size):
        if done >= stand.policy.instruments.noise_samples:
            return
        yield batch
        done += length(batch)


def _added(
    floor: NoiseStatistics | None, arrays: tuple[Array, Array, Array], *, samples: int
) -> NoiseStatistics | None:
    truth, reference, run = arrays
    if reference.dtype.kind != "f" or not truth.shape == reference.shape == run.shape:
        return floor
    floor = floor or NoiseStatistics(columns=True)
    floor.update(truth, reference, run, samples=samples)
    return floor


def _middle(floors: tuple[NoiseStatistics | None, ...]) -> NoiseStatistics | None:
    measured = [floor for floor in floors if floor is not None]
    if len(measured) < len(floors):
        return None
    return NoiseStatistics.middle(measured)
