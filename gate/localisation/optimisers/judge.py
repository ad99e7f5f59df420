"""Whether what a session answers is what the model computes, within rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gate.errors import ModelError
from gate.localisation.bench import Bench
from gate.localisation.listeners import AnotherWay
from gate.localisation.rows import Deviation
from gate.localisation.values import Survey
from gate.localisation.verdicts import Limits
from gate.parity.statistics.output import Array

Answers = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""The outputs of a session for what it is fed, by name."""


class OutputJudge:
    """Compares outputs as a localisation compares those of the whole file, on the same samples."""

    def __init__(self, bench: Bench, survey: Survey, limits: Limits, *, bound: float = 1.0) -> None:
        """Runs the model. `bound`: the largest strain. Raises EvidenceError."""
        self._limits, self._bound = limits, bound
        returned = dict(zip(bench.graph.outputs, survey.outputs, strict=False))
        self._wanted: list[tuple[Mapping[str, Array], dict[str, Array]]] = []
        self._truths: dict[str, Array] | None = None
        for place, batch in enumerate(bench.batches):
            try:
                values = bench.side.values(batch, survey, set(returned.values()))
            except AnotherWay:
                continue
            self._wanted.append((bench.feed(batch), {o: values[n] for o, n in returned.items()}))
            if place == 0:
                try:
                    through = bench.side.truths(batch, survey, values).through
                except ModelError:
                    continue
                self._truths = {o: through[n] for o, n in returned.items()}

    def agrees(self, answers: Answers) -> bool:
        """True if all outputs are within the bound. Raises what `answers` raises."""
        deviations: dict[str, Deviation] = {}
        for place, (feed, wanted) in enumerate(self._wanted):
            outputs = answers(feed)
            for name, value in wanted.items():
                deviation = deviations.setdefault(name, Deviation())
                deviation.update(value, outputs[name])
                if place == 0:
                    truth = None if self._truths is None else self._truths[name]
                    deviation.update_noise(value, outputs[name], truth)
            if not self._limits.strain(deviations) <= self._bound:
                return False  # more samples make nothing better
        return True
