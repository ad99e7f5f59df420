"""What the numbers of a layer mean: within rounding, wrong in itself, or wrong by what it got."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gate.parity.locate.measuring import Layer, Level
from gate.parity.locate.rows import Deviation
from gate.policy import Bounds, Policy
from gate.runtime import RUNTIMES, RuntimeName

_ALONE = (16.0, 32.0)
"""Bounds on `ratio` and `peak` of a layer alone.

Measured on resnet18, mobilenet_v3_small, densenet121, convnext_tiny, swin_t and a small vision
transformer, by all exporters that take them, both levels of optimisation, {LAYERS} layers: correct
ones have at most {RATIO} and {PEAK}. One weight of a layer off by 10 % gives 2 400, one tensor
through float16 1 100, another epsilon (1e-3 for 1e-5) 4 000, GELU by tanh 3 400.
"""
_THROUGH = 8.0
"""Bound on `ratio` of a layer in the run through, where errors add up: correct ones have 3."""
_ON_CUDA = 10.0
"""Other algorithms, with other orders of summation, round more; the policy's bounds for CUDA are as
much wider."""
_WITHOUT_TWIN = 64.0
"""Then the unit is one rounding, not that of all operations of the layer."""


@dataclass(frozen=True)
class Limits:
    """Up to where a difference is rounding."""

    runtime: RuntimeName
    policy: Policy
    twin: bool

    def is_source(self, layer: Layer) -> bool:
        """True if the layer is wrong although its inputs are right."""
        ratio, peak = (bound * self._wider for bound in _ALONE)
        return not (layer.alone.ratio <= ratio and layer.alone.peak <= peak)

    def is_off(self, layer: Layer) -> bool:
        """True if its output in the file differs by more than rounding."""
        return not layer.through.ratio <= _THROUGH * self._wider

    @property
    def level(self) -> Level:
        """Optimisation level of the runtime."""
        enabled = RUNTIMES[self.runtime].optimization == "ORT_ENABLE_ALL"
        return "ORT_ENABLE_ALL" if enabled else "ORT_DISABLE_ALL"

    def worst(self, outputs: Mapping[str, Deviation]) -> float:
        """The largest `noise_ratio`; NaN without outputs."""
        ratios = [output.ratio for output in outputs.values()]
        return math.nan if any(map(math.isnan, ratios)) else max(ratios, default=math.nan)

    def agrees(self, outputs: Mapping[str, Deviation]) -> bool:
        """True if all outputs are within the policy's bounds on noise, or the built-in ones where
        it has none."""
        asked = self.policy.runtimes.get(self.runtime)
        own = asked.bounds if asked else Bounds()
        usual = Policy.default(task="tensors").runtimes[self.runtime].bounds
        wider = 1.0 if self.twin else _WITHOUT_TWIN
        ratio = (own.noise_ratio or usual.noise_ratio or 0.0) * wider
        peak = (own.noise_diff or usual.noise_diff or 0.0) * wider
        return all(o.ratio <= ratio and o.peak <= peak for o in outputs.values())

    @property
    def _wider(self) -> float:
        wider = _ON_CUDA if RUNTIMES[self.runtime].cuda else 1.0
        return wider if self.twin else wider * _WITHOUT_TWIN
