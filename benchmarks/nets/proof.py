"""Prove independently of the gate that a file is correct, by comparison with float64.

A net counts as correct if the file differs only by rounding, with a wide margin. A wrong exporter
exceeds the margin by far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.nets.pair import Outputs

Values = NDArray[np.float64]
_MARGIN = 1000.0
"""Allowed error in units of PyTorch's own rounding error in the same column."""
_RELATIVE = 3e-5
"""Allowed error relative to the largest value in the column."""
_TIES = 0.02
"""Share of integers that may differ because of ties."""
_SHAKY = 1e-3
"""Rounding error relative to the column's maximum above which a net is ill-conditioned."""


@dataclass(frozen=True)
class Proof:
    """The result of the comparison."""

    wrong: str = ""
    """Outputs that differ by more than rounding; empty if there are none."""
    shaky: str = ""
    """Outputs for which float32 itself is inaccurate; empty if there are none."""


def prove(model: list[Outputs], file: list[Outputs], truth: list[Outputs]) -> Proof:
    """Compare the values batch by batch. Each argument is a list of outputs, each in batches."""
    wrong, shaky = [], []
    for index, (r32, c, r64) in enumerate(zip(model, file, truth, strict=True)):
        name = f"out{index}"
        if [a.shape for a in r32] != [a.shape for a in c]:
            wrong.append(f"{name} has other shapes")
            continue
        if r32[0].dtype.kind != "f":
            differ = _differing_share(r32, c)
            if differ > _TIES:
                wrong.append(f"{name} differs in {differ:.1%} of its integers")
            continue
        r32_values, c_values, r64_values = _concatenate(r32), _concatenate(c), _concatenate(r64)
        if not _equal_nonfinite(r32_values, c_values):
            wrong.append(f"{name} is not finite in other places")
            continue
        rounding, error, scale = (
            _column_maxima(a)
            for a in (
                _absolute_difference(r32_values, r64_values),
                _absolute_difference(c_values, r64_values),
                r64_values,
            )
        )
        excess = error > np.maximum(_MARGIN * rounding, _RELATIVE * scale)
        if excess.any():
            worst = float((error / np.maximum(scale, 1e-300)).max())
            wrong.append(f"{name} is off by {worst:.2g} of the column in {excess.sum()} columns")
        if (rounding > _SHAKY * scale).any():
            shaky.append(f"{name}: float32 itself is off by {(rounding / scale).max():.2g}")
    return Proof("; ".join(wrong), "; ".join(shaky))


def _concatenate(batches: Outputs) -> Values:
    """Concatenate batches to shape (samples, columns), where the last axis becomes the columns.

    Without a common last axis, all values are in one column.
    """
    last = batches[0].shape[-1] if batches[0].ndim > 1 else 1
    has_common_axis = all(a.ndim > 1 and a.shape[-1] == last for a in batches)
    columns = last if has_common_axis else 1
    return np.concatenate([a.astype(np.float64).reshape(-1, columns) for a in batches])


def _absolute_difference(first: Values, second: Values) -> Values:
    with np.errstate(invalid="ignore"):
        return np.where(first == second, 0.0, np.abs(first - second))


def _column_maxima(values: Values) -> Values:
    finite = np.where(np.isfinite(values) & (np.abs(values) < 1e30), np.abs(values), 0.0)
    return np.asarray(finite.max(axis=0))


def _equal_nonfinite(first: Values, second: Values) -> bool:
    return bool((np.isfinite(first) == np.isfinite(second)).all() and not np.isnan(first).any())


def _differing_share(first: Outputs, second: Outputs) -> float:
    differ = sum(int((a != b).sum()) for a, b in zip(first, second, strict=True))
    return differ / max(sum(a.size for a in first), 1)
