"""The answers to the samples that batches are made of, so that float64 computes each only once."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gate.errors import GateError
from gate.parity.probes.observed import Observed, Probe
from gate.parity.stand import Stand
from gate.parity.statistics.output import Array

_AGREES = 1e-5
"""max|a - b| / max|b| of a sample in one batch and in another: rounding, and no other answer."""


class Rows:
    """The float64 outputs of a batch of observed samples, put together from those of each one.

    That holds only where the batch does not matter to the model, and its float32 outputs show
    whether it does; else the batch is computed in float64 itself.
    """

    def __init__(self, stand: Stand, observed: Observed) -> None:
        self._stand = stand
        self._observed = observed

    def truth(self, probe: Probe, reference: list[Array]) -> list[Array] | None:
        """The outputs in float64, None where the model can't run in float64.

        `reference`: the model's float32 outputs for the probe.
        """
        together = self._together(probe, reference)
        return self._stand.answers.truth(probe.batch) if together is None else together

    def _together(self, probe: Probe, reference: list[Array]) -> list[Array] | None:
        if probe.places is None or self._outputs is None:
            return None
        alone, true = self._outputs
        places = np.asarray(probe.places) % len(next(iter(self._observed.rows.values())))
        if len(alone) != len(reference) or not all(map(self._by_sample, alone)):
            return None
        if not all(_agrees(one[places], r) for one, r in zip(alone, reference, strict=True)):
            return None
        return [r64[places] for r64 in true]

    def _by_sample(self, output: Array) -> bool:
        count = len(next(iter(self._observed.rows.values())))
        return output.ndim > 0 and len(output) == count

    @cached_property
    def _outputs(self) -> tuple[list[Array], list[Array]] | None:
        """Float32 and float64 outputs of the samples; None where one of them can't be computed."""
        try:
            alone = self._stand.answers.reference(self._observed.rows)
        except GateError:
            return None
        true = self._stand.answers.truth(self._observed.rows)
        if true is None or [r.shape for r in alone] != [r64.shape for r64 in true]:
            return None
        return alone, true


def _agrees(one: Array, other: Array) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind != "f":
        return np.array_equal(one, other)
    finite = np.isfinite(other)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return False
    a, b = one[finite].astype(np.float64), other[finite].astype(np.float64)
    moved, scale = np.abs(a - b).max(initial=0.0), np.abs(b).max(initial=0.0)
    return bool(moved <= _AGREES * scale)
