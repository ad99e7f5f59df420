"""Formats of fewer bits that weights of float32 are rounded to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from gate.parity.graph.pool import Values


def rounded_to(values: Values, stored: Values) -> str | None:
    """The format whose rounding of `stored` is exactly `values`, where it changes anything."""
    if values.dtype.kind != "f" or values.shape != stored.shape:
        return None
    for name, rounded in FORMATS.items():
        want = rounded(stored)
        if np.array_equal(values, want, equal_nan=True) and not np.array_equal(want, stored):
            return name
    return None


def _half(values: Values) -> Values:
    with np.errstate(all="ignore"):
        return values.astype(np.float16).astype(np.float32)


def _bfloat(values: Values) -> Values:
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    rounded: Values = tensor.to(torch.bfloat16).float().numpy()
    return rounded


def _tf32(values: Values) -> Values:
    """To 10 bits of mantissa, half away from zero, as the tensor cores do."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


FORMATS: Mapping[str, Callable[[Values], Values]] = {
    "float16": _half,
    "TF32": _tf32,
    "bfloat16": _bfloat,
}
