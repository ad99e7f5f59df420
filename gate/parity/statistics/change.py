"""How far two results of one side are apart, column by column: repeated, or in other batches."""

from __future__ import annotations

import math

import numpy as np

from gate.parity.statistics.output import Array
from gate.parity.statistics.tally import Floats


def difference(left: Array, right: Array, reference: Array) -> float:
    """max|left - right| of two results of the same side, as float64.

    NaN or infinite in both is no agreement: the result is NaN, unless `reference` has the same
    there; on one side only it is infinite. NaN for arrays without an element, which prove nothing.
    """
    if left.size == 0:
        return math.nan
    if left.dtype.kind != "f":
        distance = float(np.abs(left.astype(np.float64) - right.astype(np.float64)).max())
        return 0.0 if np.array_equal(left, right) else max(distance, 1.0)
    one, other, base = (array.astype(np.float64) for array in (left, right, reference))
    finite = np.isfinite(one) & np.isfinite(other)
    if (np.isfinite(one) != np.isfinite(other)).any():
        return math.inf
    alike = (np.isnan(one) & np.isnan(other) & np.isnan(base)) | ((one == other) & (one == base))
    if not (finite | alike).all():
        return math.nan
    return float(np.abs(one[finite] - other[finite]).max(initial=0.0))


def by_column(left: Array, right: Array, reference: Array) -> Floats:
    """`difference` of each index of the last axis, shape (columns,); of integers, and where it is
    no number, of all together, shape (1,)."""
    whole = difference(left, right, reference)
    if left.dtype.kind != "f" or not math.isfinite(whole):
        return np.array([whole])
    with np.errstate(all="ignore"):
        apart = np.abs(np.subtract(left, right, dtype=np.float64))
    return columns(np.where(np.isfinite(apart), apart, 0.0))


def columns(errors: Floats) -> Floats:
    """The largest of each index of the last axis, shape (columns,); of what has one axis or none,
    of all together."""
    if errors.ndim < 2 or not errors.size:
        return np.array([errors.max(initial=0.0)])
    return np.asarray(errors.max(axis=tuple(range(errors.ndim - 1)), initial=0.0))


def worse_columns(left: Floats, right: Floats) -> Floats:
    """The larger of each column, NaN where any is; of all together where an axis has no constant
    length. What has one column is meant for all."""
    if len(left) != len(right) and 1 not in (len(left), len(right)):
        left, right = np.array([left.max()]), np.array([right.max()])
    return np.asarray(np.maximum(left, right))


def worst_ratio(moved: Floats, unit: Floats) -> float:
    """The largest change in units of its column: 0 without any change, infinite where there is no
    unit, NaN where either is unknown."""
    if len(moved) != len(unit) and 1 not in (len(moved), len(unit)):
        moved, unit = np.array([moved.max()]), np.array([unit.max()])
    if np.isnan(moved).any() or np.isnan(unit).any():
        return math.nan
    with np.errstate(all="ignore"):
        ratios = np.where(moved == 0.0, 0.0, moved / unit)
    return float(ratios.max())
