"""What a runtime computed, beside the golden vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gate.golden.folder import Array, PartVectors, Vectors
from gate.golden.record import GoldenOutput
from gate.golden.result import OutputResult


def compare(
    vectors: Vectors | PartVectors, computed: Mapping[str, Any]
) -> tuple[OutputResult, ...]:
    """Each golden output beside the computed one of the same name."""
    return tuple(
        _compared(output, vectors.outputs[output.name], computed.get(output.name))
        for output in vectors.golden.outputs
    )


def _compared(golden: GoldenOutput, want: Array, got: Any) -> OutputResult:
    """Written so that only a comparison that was made, of finite numbers, can pass."""
    result = OutputResult(name=golden.name, tolerance=golden.max_abs_diff)
    problem = _other_kind(want, got)
    if problem is not None:
        return result.model_copy(update={"problem": problem})
    diff = _max_abs_diff(want, got)
    agreement = None
    problems = []
    if not (math.isfinite(diff) and diff <= golden.max_abs_diff):
        problems.append(f"max_abs_diff {diff:.3g} is above the tolerance {golden.max_abs_diff:.3g}")
    if golden.top1_agreement is not None:
        agreement = float((np.argmax(want, axis=1) == np.argmax(got, axis=1)).mean())
        if not agreement >= golden.top1_agreement:
            problems.append(f"top-1 agreement {agreement:.4g} is below {golden.top1_agreement:.4g}")
    return result.model_copy(
        update={
            "max_abs_diff": diff,
            "top1_agreement": agreement,
            "problem": "; ".join(problems) or None,
        }
    )


def _other_kind(want: Array, got: Any) -> str | None:
    """Why the two can't be compared, or None."""
    if not isinstance(got, np.ndarray):
        return f"is missing, or no tensor ({type(got).__name__})"
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"is {got.dtype} {got.shape}, expected {want.dtype} {want.shape}"
    if got.dtype.kind == "f":
        other = np.isnan(got) != np.isnan(want)
        if other.any():
            return f"has {int(other.sum())} NaN values in other places than the vectors"
        infinite = np.isinf(got) | np.isinf(want)
        if (got[infinite] != want[infinite]).any():
            return "is infinite on one side only, or with another sign"
    return None


def _max_abs_diff(want: Array, got: Array) -> float:
    """Over the finite elements; equal infinities are equal. A difference of integers that float64
    can't tell counts as 1."""
    finite = np.isfinite(want) if want.dtype.kind == "f" else np.ones(want.shape, np.bool_)
    with np.errstate(all="ignore"):
        diffs = np.abs(want[finite].astype(np.float64) - got[finite].astype(np.float64))
    largest = float(diffs.max(initial=0.0))
    return largest or float((want[finite] != got[finite]).any())
