"""What the numbers of a layer mean: within rounding, wrong in itself, or wrong by what it got."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gate.localisation.rows import Deviation
from gate.policy.built_in import REDUCED_UNIT
from gate.policy.ort_options import OrtSetup
from gate.records.runtime import RuntimeName

if TYPE_CHECKING:  # the process that tries optimisers imports no torch
    from gate.localisation.measuring import LayerDeviations, Level

_ALONE = (8.0, 24.0)
"""Bounds on `ratio` and `peak` of a layer alone.

Measured on the corpus of correct files (benchmarks/corpus: all architectures, exporters and
opsets, both levels of optimisation) and on resnet18, mobilenet_v3_small, densenet121,
convnext_tiny, swin_t and a small vision transformer by all exporters that take them: layers that
are right have at most 3.2 and 6.6. One weight of a layer off by 10 % gives 2 400, one tensor
through float16 1 100, GELU by tanh 3 400, epsilon 1e-3 for 1e-5 4 000 and 1e-5 for 1e-6 14.
"""
_THROUGH = 16.0
"""Bound on `ratio` of a layer in the run through, where errors add up: right ones have at most 7.
It only tells what is propagated from what is still ok."""
_OUTPUT = (8.0, 64.0)
"""Bounds on `ratio` and `peak` of the outputs of the file as it is: right ones have at most 3 and
7. Wider than the policy's, because here are few samples and no verdict depends on it."""
_FARTHER = 2.0
"""By what factor an answer must be farther off with optimisations on for these to be in doubt: the
limit may lie between two that are off by nearly the same."""
_ON_CUDA = 10.0
"""Other algorithms, with other orders of summation, may round more; wider than the policy's bounds,
because no verdict depends on it."""
_WITHOUT_FLOAT64 = 64.0
"""Then the unit is one rounding, not that of all operations of the layer."""


@dataclass(frozen=True)
class Limits:
    """Up to where a difference is rounding."""

    runtime: RuntimeName
    setup: OrtSetup
    float64: bool
    """False if the model can't run in float64."""
    reduced: bool = False
    """True if the file is in 16 bits on purpose, by its policy."""
    plain_refused: bool = False
    """True if the same providers with optimisations off were refused: then no optimiser is at fault
    alone."""

    @property
    def level(self) -> Level:
        """Optimisation level of the runtime."""
        enabled = self.setup.optimization != "ORT_DISABLE_ALL"
        return "ORT_ENABLE_ALL" if enabled else "ORT_DISABLE_ALL"

    def is_optimiser(self, whole: Mapping[Level, Mapping[str, Deviation]]) -> bool:
        """True if the file as it is agrees with optimisations off, and not with them on, by more
        than the limit lies between the two."""
        return self.doubt(whole, refused=False) is not None

    def doubt(
        self, whole: Mapping[Level, Mapping[str, Deviation]], *, refused: bool
    ) -> float | None:
        """The strain up to which an answer is as right as with optimisations off, where these are
        in doubt; else None. `refused`: with them on it is not right enough, though within limits.
        """
        off, on = self.strain(whole["ORT_DISABLE_ALL"]), self.strain(whole["ORT_ENABLE_ALL"])
        wrong = on > 1.0 or (refused and self.level != "ORT_DISABLE_ALL" and on > 0.0)
        if self.plain_refused or not (off <= 1.0 and wrong and on >= _FARTHER * off):
            return None
        return min(1.0, math.sqrt(max(off, on / _FARTHER**4) * on))

    def is_source(self, layer: LayerDeviations) -> bool:
        """True if the layer is wrong although its inputs are right."""
        return not self._within(layer.alone, _ALONE)

    def is_off(self, layer: LayerDeviations) -> bool:
        """True if its output in the file differs by more than rounding."""
        return not layer.through.ratio <= _THROUGH * self._wider

    def agrees(self, outputs: Mapping[str, Deviation]) -> bool:
        """True if all outputs differ by rounding only."""
        return self.strain(outputs) <= 1.0

    def strain(self, outputs: Mapping[str, Deviation]) -> float:
        """The largest part of its bound that an output takes; infinite for NaN."""
        ratio, peak = (bound * self._wider for bound in _OUTPUT)
        parts = [p for o in outputs.values() for p in (o.ratio / ratio, o.peak / peak)]
        return math.inf if any(map(math.isnan, parts)) else max(parts, default=0.0)

    def _within(self, deviation: Deviation, bounds: tuple[float, float]) -> bool:
        ratio, peak = (bound * self._wider for bound in bounds)
        return deviation.ratio <= ratio and deviation.peak <= peak

    @property
    def _wider(self) -> float:
        wider = 1.0 if self.setup.on_cpu else _ON_CUDA
        if self.reduced:  # other orders of summation are nothing beside it
            wider = REDUCED_UNIT
        return wider if self.float64 else wider * _WITHOUT_FLOAT64


def worst(outputs: Mapping[str, Deviation]) -> float:
    """The largest `ratio`; NaN without outputs."""
    ratios = [output.ratio for output in outputs.values()]
    return math.nan if any(map(math.isnan, ratios)) else max(ratios, default=math.nan)
