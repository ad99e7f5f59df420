"""Operators that round floats to whole numbers, or assign them to buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gate.reference.error_models import bare
from gate.reference.torch_session import DispatchMode

Floats = NDArray[np.float64]

_ROUNDINGS: Mapping[str, Callable[[Floats], Floats]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "trunc": np.trunc,
    "fix": np.trunc,
    "sign": np.sign,
}

_NODES: Mapping[Callable[[Floats], Floats], tuple[str, ...]] = {
    np.floor: ("Floor",),
    np.ceil: ("Ceil",),
    np.rint: ("Round",),
    np.sign: ("Sign",),
    # Exporters write a cast to integers and back, or Sign(x) * Floor(Abs(x)).
    np.trunc: ("Cast", "Floor"),
}
"""ONNX operators that the exporters write for each ATen operator."""

FAKE_QUANTIZERS = frozenset({"fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"})
"""ATen operators that round floats to the steps of a quantized type and return floats."""

_NEAR = 1e-3
"""Largest difference between the operands of a call and its node, as a share of the largest
value."""

STEPS = frozenset(
    {
        *_ROUNDINGS, *FAKE_QUANTIZERS, "div", "floor_divide", "remainder", "fmod", "frac",
        "bucketize", "searchsorted",
    }
)  # fmt: skip
"""Names of ATen operators. `div`: with a rounding mode."""


class FakeQuantization(DispatchMode):
    """Records whether the model rounds floats to the steps of a quantized type."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_used = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_used = self.is_used or bare(func._schema.name) in FAKE_QUANTIZERS
        return func(*args, **(kwargs or {}))


def _unchanged(values: Floats) -> Floats:
    return values


def bare_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without axes of size 1."""
    return tuple(size for size in shape if size != 1)


@dataclass(frozen=True)
class Discretization:
    """One call of an operator that is a step function of its operand."""

    operand: Floats
    """The float that is rounded: an argument, a scaled argument, or a quotient."""
    decide: Callable[[Floats], Floats]
    """Returns the whole numbers for operands; monotonic."""
    nodes: tuple[str, ...]
    """ONNX operators that may compute this call."""
    to_integers: Callable[[Floats], Floats] = _unchanged
    """Returns the whole numbers from a result of the operator."""
    from_integers: Callable[[Floats], Floats] = _unchanged
    """Returns the result of the operator from whole numbers."""
    edges: Floats | None = None
    """Sorted boundaries of the buckets. None: the operand is rounded."""
    is_quantized: bool = False
    """True for `FAKE_QUANTIZERS`. A runtime with integer arithmetic does not expose the operand."""

    @property
    def buckets(self) -> int | None:
        """Return the number of boundaries, or None if the operand is rounded."""
        return None if self.edges is None else len(self.edges)

    def chosen_by(self, operator: str, chosen: NDArray[Any]) -> NDArray[Any] | None:
        """Return the whole numbers of a node of the file in the shape of the operand, or None if
        the node can't compute this call."""
        if self.buckets is not None:
            if chosen.shape != (self.buckets, *self.operand.shape):
                return None
            below = np.asarray(np.count_nonzero(chosen, axis=0))
            return below if operator == "Greater" else self.buckets - below
        if bare_shape(chosen.shape) != bare_shape(self.operand.shape):
            return None
        integers = chosen.reshape(self.operand.shape).astype(np.float64)
        return np.copysign(integers, self.operand) if self.decide is np.trunc else integers

    def is_near(self, operand: NDArray[Any]) -> bool:
        """Return True if the operand of a node may correspond to the model's."""
        if bare_shape(operand.shape) != bare_shape(self.operand.shape):
            return False
        x, y = self.operand, operand.astype(np.float64).reshape(self.operand.shape)
        if self.decide is np.trunc:
            x, y = np.abs(x), np.abs(y)
        size = np.abs(x).max(initial=0.0, where=np.isfinite(x))
        return np.allclose(x, y, rtol=_NEAR, atol=_NEAR * size, equal_nan=True)


def find_discretization(name: str, stated: Mapping[str, Any]) -> Discretization | None:
    """Return the discretization of a call, or None if it is no step function.

    `name`: name in ATen without namespace; `stated`: arguments by their names in the schema.
    """
    if name in FAKE_QUANTIZERS or name in ("bucketize", "searchsorted"):
        return _find_quantization(stated) if name in FAKE_QUANTIZERS else _find_buckets(stated)
    x, mode = stated.get("self"), stated.get("rounding_mode")
    if name not in STEPS or not _is_float(x) or (name == "div" and mode is None):
        return None
    wide = _to_float64(x)
    if name in _ROUNDINGS:
        decide, scale = _ROUNDINGS[name], 10.0 ** stated.get("decimals", 0)
        if scale == 1.0:
            return Discretization(wide, decide, _NODES[decide])
        return Discretization(
            wide * scale, decide, _NODES[decide], lambda y: y * scale, lambda n: n / scale
        )
    divisor = _to_float64(stated.get("other", 1.0))  # none of frac
    truncates = mode == "trunc" or name in ("fmod", "frac")
    divide: Callable[[Floats], Floats] = np.trunc if truncates else np.floor
    with np.errstate(all="ignore"):
        quotient = np.asarray(wide / divisor)
    if name not in ("remainder", "fmod", "frac"):
        return Discretization(quotient, divide, _NODES[divide])
    return Discretization(
        quotient,
        divide,
        ("Mod",) if name == "fmod" else _NODES[divide],
        lambda y: (wide - y) / divisor,
        lambda integers: wide - integers * divisor,
    )


def _find_buckets(stated: Mapping[str, Any]) -> Discretization | None:
    x, edges = stated.get("self"), stated.get("boundaries", stated.get("sorted_sequence"))
    if not _is_float(x) or not isinstance(edges, torch.Tensor) or edges.ndim != 1:
        return None
    side = "right" if stated.get("right") or stated.get("side") == "right" else "left"
    decide: Any = partial(np.searchsorted, _to_float64(edges), side=side)
    return Discretization(_to_float64(x), decide, ("Greater", "Less"), edges=_to_float64(edges))


def _find_quantization(stated: Mapping[str, Any]) -> Discretization | None:
    x = stated["self"]
    if not _is_float(x):
        return None
    scale, zero_point = _to_float64(stated["scale"]), _to_float64(stated["zero_point"])
    shape = [1] * x.ndim
    if "axis" in stated:
        shape[stated["axis"]] = -1
        scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    ends = stated["quant_min"] - zero_point, stated["quant_max"] - zero_point
    return Discretization(
        np.asarray(_to_float64(x) / scale),
        lambda steps: np.asarray(np.clip(np.rint(steps), *ends)),
        ("QuantizeLinear",),
        lambda y: y / scale,
        lambda integers: integers * scale,
        is_quantized=True,
    )


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _to_float64(value: Any) -> Floats:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().to(torch.float64).numpy()
    return np.asarray(value, np.float64)
