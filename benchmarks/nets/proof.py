"""Independent proof of a pair: values of model and file compared with float64.

It knows nothing of the gate. A net counts as correct where the file is off by rounding, with a wide
margin: an exporter that is wrong is so by far more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.nets.pair import Outputs

Values = NDArray[np.float64]
_MARGIN = 1000.0
"""Times the rounding error of PyTorch itself, in the same column."""
_RELATIVE = 3e-5
"""Of the largest value in the column."""
_TIES = 0.02
"""Share of integers that may stand at a tie."""
_SHAKY = 1e-3
"""Of the column's largest value: PyTorch's own rounding error in a net that is ill-conditioned."""


@dataclass(frozen=True)
class Proof:
    """What was seen."""

    wrong: str = ""
    """Where the file is no rounding off; empty: nowhere."""
    shaky: str = ""
    """Where float32 itself gives no answer; empty: nowhere."""


def prove(model: list[Outputs], file: list[Outputs], truth: list[Outputs]) -> Proof:
    """Compare batch by batch; all three are lists of outputs, each a list of batches."""
    wrong, shaky = [], []
    for place, (r32, c, r64) in enumerate(zip(model, file, truth, strict=True)):
        name = f"out{place}"
        if [a.shape for a in r32] != [a.shape for a in c]:
            wrong.append(f"{name} has other shapes")
            continue
        if r32[0].dtype.kind != "f":
            differ = _share(r32, c)
            if differ > _TIES:
                wrong.append(f"{name} differs in {differ:.1%} of its integers")
            continue
        one, other, true = _joined(r32), _joined(c), _joined(r64)
        if not _same_nonfinite(one, other):
            wrong.append(f"{name} is not finite in other places")
            continue
        own, far, scale = (_by_column(a) for a in (_gap(one, true), _gap(other, true), true))
        excess = far > np.maximum(_MARGIN * own, _RELATIVE * scale)
        if excess.any():
            worst = float((far / np.maximum(scale, 1e-300)).max())
            wrong.append(f"{name} is off by {worst:.2g} of the column in {excess.sum()} columns")
        if (own > _SHAKY * scale).any():
            shaky.append(f"{name}: float32 itself is off by {(own / scale).max():.2g}")
    return Proof("; ".join(wrong), "; ".join(shaky))


def _joined(batches: Outputs) -> Values:
    """Shape (samples, columns): one row a sample, the last axis as columns; without a common batch
    axis one row a batch."""
    last = batches[0].shape[-1] if batches[0].ndim > 1 else 1
    same = all(a.ndim > 1 and a.shape[-1] == last for a in batches)
    columns = last if same else 1
    return np.concatenate([a.astype(np.float64).reshape(-1, columns) for a in batches])


def _gap(one: Values, other: Values) -> Values:
    with np.errstate(invalid="ignore"):
        return np.where(one == other, 0.0, np.abs(one - other))


def _by_column(values: Values) -> Values:
    finite = np.where(np.isfinite(values) & (np.abs(values) < 1e30), np.abs(values), 0.0)
    return np.asarray(finite.max(axis=0))


def _same_nonfinite(one: Values, other: Values) -> bool:
    return bool((np.isfinite(one) == np.isfinite(other)).all() and not np.isnan(one).any())


def _share(one: Outputs, other: Outputs) -> float:
    differ = sum(int((a != b).sum()) for a, b in zip(one, other, strict=True))
    return differ / max(sum(a.size for a in one), 1)
