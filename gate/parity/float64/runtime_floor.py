"""The noise floor of one runtime, output by output: measured on its first samples, and the unit by
which all later ones are judged."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gate.parity.float64.noise import NoiseStatistics
from gate.parity.statistics.groups import Groups
from gate.parity.statistics.output import Array
from gate.records.instruments import NoiseParity

_SUSPICIOUS_RATIO, _SUSPICIOUS_PEAK = 1.25, 3.0
"""In units of PyTorch's own error: from here on, that is no unit to judge by alone. Fixed, not the
policy's: the evidence must not depend on bounds."""


class RuntimeFloor:
    """Accumulates over the first samples; afterwards nothing changes but that it is widened."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: of the file's outputs, in its order."""
        self._names = tuple(names)
        self._noise: dict[str, NoiseStatistics] = {}
        self._rounding: dict[str, NoiseStatistics] = {}
        self._first: dict[str, list[Groups]] = {}

    def __getstate__(self) -> dict[str, object]:
        """What was measured, without what is made of it."""
        return vars(self) | {"_first": {}}

    def become(self, other: RuntimeFloor) -> None:
        """Be what another process measured, for all who are judged by this one."""
        self._noise, self._rounding, self._first = other._noise, other._rounding, {}

    def update(
        self,
        truth: Sequence[Array],
        reference: Sequence[Array],
        candidate: Sequence[Array],
        *,
        samples: int,
    ) -> None:
        """Add one checked batch of outputs against those of the float64 reference, floats only.

        An output that it returns in another shape has no noise floor.
        """
        for name, r64, r, c in zip(self._names, truth, reference, candidate, strict=False):
            if r.dtype.kind == "f" and r64.shape == r.shape:
                statistics = self._noise.setdefault(name, NoiseStatistics(columns=True))
                statistics.update(r64, r, c, samples=samples)

    def widen(self, rounding: Sequence[NoiseStatistics | None]) -> None:
        """Judge by the error of random rounding where that is larger; one an output, in order."""
        floors = zip(self._names, rounding, strict=False)
        self._rounding = {name: floor for name, floor in floors if floor is not None}

    def suspicion(self) -> float:
        """How far the runtime is off, in any output, in units of what calls for another look at the
        floor: PyTorch's own error, or that of random rounding where it was measured."""
        noises = [
            statistics.result(rounding=self._rounding.get(name))
            for name, statistics in self._noise.items()
        ]
        parts = [
            max(
                noise.ratio / _SUSPICIOUS_RATIO,
                noise.peak / _SUSPICIOUS_PEAK,
                noise.diff * (noise.scatter or 1.0) / _SUSPICIOUS_PEAK,
            )
            for noise in noises
            if math.isfinite(noise.ratio)
        ]
        return max(parts, default=0.0)

    def of_late(self, name: str) -> list[Groups]:
        """What late samples of an output are judged by: the floors as they were when the first of
        them came; empty where it has none."""
        if name not in self._first:
            self._first[name] = self.now(name)
        return self._first[name]

    def now(self, name: str) -> list[Groups]:
        """The floors of an output; empty where it has none."""
        noise = self._noise.get(name)
        return noise.floors(self._rounding.get(name)) if noise else []

    def result(self, name: str, *, diff: float | None) -> NoiseParity | None:
        """The record of an output, None where it has no floor. `diff`: what late samples show."""
        noise = self._noise.get(name)
        return noise.result(diff=diff, rounding=self._rounding.get(name)) if noise else None
