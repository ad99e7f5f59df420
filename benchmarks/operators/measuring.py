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
"""What the gate calls suspicious; the rest is the scatter of a rms of few elements."""
_NORMAL = 2.0**-126
"""Below it a runtime may flush to zero."""


@dataclass(frozen=True)
class Row:
    """One case on ONNX Runtime, optimizations off or on; errors in units of 2^-24."""

    operator: str
    onnx: str
    label: str
    optimized: bool
    share: float
    """rms(c - r64) in units of the noise floor: the larger of PyTorch's own error and that of
    random rounding, and one rounding of the truth at least."""
    largest: float | None
    """The largest of |c - r64| in units of what the error model allows that element; None for
    sums, whose errors have no bound but a variance."""
    runtime: float
    """rms(c - r64) in units of 2^-24 rms(r64)."""
    own: float
    """rms(r32 - r64) in the same units: PyTorch's."""
    allowed: float
    """That of random rounding."""

    @property
    def exceeds(self) -> bool:
        """True if ONNX Runtime is farther off than its error model says."""
        return not (self.share <= LIMIT and (self.largest or 0.0) <= 1.0)

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"exceeds": self.exceeds}


def measure(case: Case) -> list[Row]:
    """One row with optimizations off, and one with them on where that makes a difference."""
    tensors = [torch.from_numpy(array) for array in case.inputs]
    with torch.inference_mode(), np.errstate(all="ignore"):
        truth = case.compute(*[tensor.double() for tensor in tensors]).numpy()
        reference = case.compute(*tensors).numpy()
        tossed = [_tossed(case, tensors, seed) for seed in range(_DRAWS)]
        plain, optimized = (case.run(optimized=on).reshape(truth.shape) for on in (False, True))
        rows = [_row(case, truth, reference, tossed, plain)]
        if not np.array_equal(plain, optimized, equal_nan=True):
            rows.append(_row(case, truth, reference, tossed, optimized, optimized=True))
    return rows


def _tossed(case: Case, tensors: list[torch.Tensor], seed: int) -> Array:
    with RandomRounding(seed):
        return case.compute(*tensors).numpy()


def _row(
    case: Case,
    truth: Array,
    reference: Array,
    tossed: list[Array],
    candidate: Array,
    *,
    optimized: bool = False,
) -> Row:
    judged = np.isfinite(truth) & np.isfinite(reference) & ~((truth != 0) & (abs(truth) < _NORMAL))
    runtime, own = _rms(candidate - truth, judged), _rms(reference - truth, judged)
    allowed = float(np.median([_rms(draw - truth, judged) for draw in tossed]))
    one = EPSILON * _rms(truth, judged)
    floor = max(own, allowed, one, _NORMAL)
    largest = None
    if case.elementwise:
        bound = EPSILON * _envelope(MODELS.get(case.operator, DEFAULT), case.inputs[0], truth)
        largest = float((np.abs(candidate - truth) / bound)[judged].max(initial=0.0))
    units = max(one, _NORMAL)
    return Row(
        case.operator, case.onnx, case.label, optimized, runtime / floor, largest,
        runtime / units, own / units, allowed / units,
    )  # fmt: skip


def _rms(errors: Array, judged: Array) -> float:
    return (
        float(np.sqrt(np.square(errors[judged], dtype=np.float64).mean())) if judged.any() else 0.0
    )


def _envelope(model: ErrorModel, x: Array, truth: Array) -> Array:
    reach = model.absolute + model.scaled * np.abs(x.astype(np.float64))
    if model.below_zero:
        reach = reach * (truth < 0.0)
    envelope: Array = model.relative * np.abs(truth) + reach + _NORMAL / EPSILON
    return envelope


def worst(rows: Iterable[Row]) -> dict[str, Row]:
    """By operator the row with the largest share, or that exceeds its largest error."""
    found: dict[str, Row] = {}
    for row in rows:
        other = found.get(row.operator)
        if other is None or (row.exceeds, row.share) > (other.exceeds, other.share):
            found[row.operator] = row
    return found
