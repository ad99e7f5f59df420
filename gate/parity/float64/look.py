"""What rounding alone may make of one sample: the float64 truth, and runs under random rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gate.parity.runners.runner import Runner
from gate.parity.statistics.output import Array
from gate.parity.statistics.tally import Floats
from gate.records.instruments import EPSILON, UNDERFLOW
from gate.runtimes.runtime import Batch


@dataclass(frozen=True)
class Look:
    """What one sample may be, output by output; None where no part of the output is known to be
    the sample's."""

    sample: int
    truth: tuple[Array | None, ...]
    """In float64, as of a batch of one."""
    reference: tuple[Array | None, ...]
    draws: tuple[tuple[Array | None, ...], ...]
    """The reference under random rounding, one after the other."""
    batch: Batch
    """The samples that the runtime was measured with."""
    row: int
    """The place of the sample in it."""
    count: int
    """The number of samples in it."""

    def alternatives(self, output: int) -> list[Array]:
        """All that rounding makes of one output."""
        runs = (self.truth, self.reference, *self.draws)
        found = (run[output] for run in runs if output < len(run))
        return [array for array in found if array is not None]

    def floor(self, output: int) -> Floats | None:
        """The largest error of any of them, element by element; at least one rounding. None where
        there is no truth of that shape."""
        truth = self.truth[output] if output < len(self.truth) else None
        if truth is None:
            return None
        floor = np.maximum(EPSILON * np.abs(truth), UNDERFLOW)
        for array in self.alternatives(output)[1:]:
            if array.shape == truth.shape:
                with np.errstate(all="ignore"):
                    error = np.abs(np.subtract(array, truth, dtype=np.float64))
                floor = np.maximum(floor, np.where(np.isfinite(error), error, 0.0))
        return np.asarray(floor)

    def measured(self, runner: Runner) -> list[Array]:
        """What a runtime makes of the sample in the company that it was measured in."""
        return runner.run(self.batch)

    def part(self, output: Array, axis: int) -> Array:
        """The sample's own of an output of that company with the samples on `axis`."""
        if output.ndim <= axis or output.shape[axis] != self.count:
            return output
        return output.take([self.row], axis)


def own(outputs: Sequence[Array], row: int, count: int) -> list[Array | None]:
    """As `row_of`; of one sample alone, each output with axes is its own."""
    if count == 1:
        return [output if output.ndim else None for output in outputs]
    return row_of(outputs, row, count)


def row_of(outputs: Sequence[Array], row: int, count: int) -> list[Array | None]:
    """The sample in place `row` of outputs of `count` samples; None of an output without rows."""
    return [
        output[row : row + 1] if output.ndim and len(output) == count else None
        for output in outputs
    ]
