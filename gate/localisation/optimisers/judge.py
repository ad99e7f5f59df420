"""Whether what a session answers is what the model computes, within rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gate.localisation.rows import Deviation
from gate.localisation.verdicts import Limits
from gate.parity.statistics.output import Array

Answers = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""The outputs of a session for what it is fed, by name."""


@dataclass(frozen=True)
class RightAnswer:
    """What the model computes of one batch, by the names that the file has."""

    feed: Mapping[str, Array]
    outputs: Mapping[str, Array]
    """Whole."""
    first: bool = False
    """True for the batch on which noise is measured."""
    truths: Mapping[str, Array] | None = None
    """Sketches of what the float64 reference computes of the first batch; None: it can't run."""


class OutputJudge:
    """Compares outputs as a localisation compares those of the whole file, on the same samples."""

    def __init__(self, right: Sequence[RightAnswer], limits: Limits, *, bound: float = 1.0) -> None:
        """`bound`: the largest strain."""
        self._right, self._limits, self._bound = right, limits, bound

    def agrees(self, answers: Answers) -> bool:
        """True if all outputs are within the bound. Raises what `answers` raises."""
        deviations: dict[str, Deviation] = {}
        for right in self._right:
            outputs = answers(right.feed)
            for name, value in right.outputs.items():
                deviation = deviations.setdefault(name, Deviation())
                deviation.update(value, outputs[name])
                if right.first:
                    truth = None if right.truths is None else right.truths[name]
                    deviation.update_noise(value, outputs[name], truth)
            if not self._limits.strain(deviations) <= self._bound:
                return False  # more samples make nothing better
        return True
