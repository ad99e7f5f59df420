"""Formats of fewer bits that weights of float32 are rounded to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from gate.parity.graph.pool import Values


class Leeway(NamedTuple):
    """How far a number may move."""

    relative: float
    absolute: float
    """Where numbers are so small that a format has no bits left."""


def leeway(name: str | None) -> Leeway:
    """What keeping a number in a format makes of it, cut off or rounded; None: in float32."""
    return _LEEWAYS.get(name, _FLOAT32)


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
_FLOAT32 = Leeway(0.0, float(np.finfo(np.float32).tiny))
_LEEWAYS: Mapping[str | None, Leeway] = {
    "float16": Leeway(2.0**-10, 2.0**-23),  # converters make 1e-7 of what is smaller
    "bfloat16": Leeway(2.0**-7, float(np.finfo(np.float32).tiny)),
}
