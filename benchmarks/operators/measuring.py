"""Measure ONNX Runtime's error in units of the effect of random rounding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from benchmarks.operators.case import Array, Case
from gate.records.instruments import EPSILON
from gate.reference.error_models import DEFAULT, MODELS, ErrorModel
from gate.reference.random_rounding import RandomRounding

_DRAWS = 3
LIMIT = 1.25
"""The highest allowed ratio, which allows for the scatter of a rms of few elements."""
_NORMAL = 2.0**-126
"""Smallest normal float32. A runtime may flush smaller values to zero."""


@dataclass(frozen=True)
class Row:
    """One case on ONNX Runtime with optimizations off or on. Errors are in units of 2^-24."""

    operator: str
    onnx: str
    label: str
    optimized: bool
    share: float
    """rms(c - r64) in units of the noise floor.

    The floor is the larger of PyTorch's error and that of random rounding, and at least one
    rounding of the true values.
    """
    largest: float | None
    """Largest |c - r64| in units of what the error model allows for the element, or None.

    None is used for sums, whose errors are bounded only in their variance.
    """
    runtime: float
    """rms(c - r64) in units of 2^-24 rms(r64)."""
    own: float
    """rms(r32 - r64) of PyTorch in the same units."""
    allowed: float
    """The error of random rounding in the same units."""

    @property
    def exceeds(self) -> bool:
        """Return True if ONNX Runtime's error exceeds its error model."""
        return not (self.share <= LIMIT and (self.largest or 0.0) <= 1.0)

    def plain(self) -> dict[str, object]:
        """Return the row for JSON."""
        return asdict(self) | {"exceeds": self.exceeds}


def measure(case: Case) -> list[Row]:
    """Return a row with optimizations off, and another with them on if that changes the output."""
    tensors = [torch.from_numpy(array) for array in case.inputs]
    with torch.inference_mode(), np.errstate(all="ignore"):
        truth = case.compute(*[tensor.double() for tensor in tensors]).numpy()
        reference = case.compute(*tensors).numpy()
        rounded = [_compute_rounded(case, tensors, seed) for seed in range(_DRAWS)]
        plain, optimized = (case.run(optimized=on).reshape(truth.shape) for on in (False, True))
        rows = [_row(case, truth, reference, rounded, plain)]
        if not np.array_equal(plain, optimized, equal_nan=True):
            rows.append(_row(case, truth, reference, rounded, optimized, optimized=True))
    return rows


def _compute_rounded(case: Case, tensors: list[torch.Tensor], seed: int) -> Array:
    with RandomRounding(seed):
        return case.compute(*tensors).numpy()


def _row(
    case: Case,
    truth: Array,
    reference: Array,
    rounded: list[Array],
    candidate: Array,
    *,
    optimized: bool = False,
) -> Row:
    is_finite = (
        np.isfinite(truth) & np.isfinite(reference) & ~((truth != 0) & (abs(truth) < _NORMAL))
    )
    runtime, pytorch = _rms(candidate - truth, is_finite), _rms(reference - truth, is_finite)
    allowed = float(np.median([_rms(draw - truth, is_finite) for draw in rounded]))
    one_rounding = EPSILON * _rms(truth, is_finite)
    floor = max(pytorch, allowed, one_rounding, _NORMAL)
    largest = None
    if case.elementwise:
        bound = EPSILON * _envelope(MODELS.get(case.operator, DEFAULT), case.inputs[0], truth)
        largest = float((np.abs(candidate - truth) / bound)[is_finite].max(initial=0.0))
    units = max(one_rounding, _NORMAL)
    return Row(
        case.operator, case.onnx, case.label, optimized, runtime / floor, largest,
        runtime / units, pytorch / units, allowed / units,
    )  # fmt: skip


def _rms(errors: Array, is_finite: Array) -> float:
    return (
        float(np.sqrt(np.square(errors[is_finite], dtype=np.float64).mean()))
        if is_finite.any()
        else 0.0
    )


def _envelope(model: ErrorModel, x: Array, truth: Array) -> Array:
    reach = model.absolute + model.scaled * np.abs(x.astype(np.float64))
    if model.below_zero:
        reach = reach * (truth < 0.0)
    envelope: Array = model.relative * np.abs(truth) + reach + _NORMAL / EPSILON
    return envelope


def find_worst(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the worst row of each operator: one that exceeds its bound, or the largest share."""
    worst: dict[str, Row] = {}
    for row in rows:
        current = worst.get(row.operator)
        if current is None or (row.exceeds, row.share) > (current.exceeds, current.share):
            worst[row.operator] = row
    return worst
