"""Random rounding: how far may another honest float32 implementation be off?

Monte Carlo arithmetic (D. S. Parker, "Monte Carlo Arithmetic: exploiting randomness in
floating-point arithmetic", UCLA CSD-970002, 1997): a model runs while the result of every operator
is moved at random, as far as an honest implementation of that operator may be off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gate.parity.dispatch import DispatchMode

_UNIT = 2.0**-24
"""Relative error of one correct rounding to float32."""
_APPROXIMATED = 4.0
"""Units by which a function may be off that is computed from an approximation: 2 ulp, as the CUDA
C++ programming guide documents for expf, tanhf, erff and sinf."""
EXACT = 2.0**20
"""Integers below it are counts, indices, or sums that every implementation gets exactly."""


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# Without gradients PyTorch shows composite operators (softmax, max_pool2d) whole, else their parts.
_FUNCTIONS = _aten(
    "_log_softmax _safe_softmax _softmax atan atan2 celu cos elu erf exp exp2 expm1 gelu glu "
    "log log10 log1p log2 log_sigmoid log_sigmoid_forward log_softmax logaddexp logit logsumexp "
    "mish pow rsqrt selu sigmoid silu sin softmax softplus tan tanh"
)
_REDUCTIONS = _aten(
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d linalg_norm linalg_vector_norm "
    "logsumexp mean norm std std_mean sum var var_mean"
)
_EXACT_OPERATORS = _aten(
    "_to_copy _unsafe_view abs adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d amax "
    "amin cat clamp clamp_max clamp_min clip clone column_stack concat concatenate "
    "constant_pad_nd contiguous cummax cummin dropout dstack embedding eye feature_dropout fill "
    "flip fliplr flipud full full_like gather hardtanh hstack im2col index index_fill index_put "
    "index_select masked_fill masked_select max max_pool1d max_pool2d max_pool2d_with_indices "
    "max_pool3d max_pool3d_with_indices maximum median meshgrid min minimum movedim neg "
    "new_full new_ones new_zeros ones ones_like pad permute_copy pixel_shuffle pixel_unshuffle "
    "reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 repeat repeat_interleave "
    "replication_pad1d replication_pad2d replication_pad3d roll rot90 scatter sign "
    "slice_scatter sort stack take_along_dim threshold tile topk tril triu unfold_copy "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d vstack where zeros zeros_like"
)
"""They move or choose numbers, without computing any."""


class RandomRounding(DispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what operators return in float32 is moved at random, reproducibly by the seed.

    An element moves by up to 1 unit of 2^-24, by up to 4 behind a function that has to be
    approximated (exp, erf, ...), and by up to sqrt(n / 3) behind a sum or mean of n terms: the
    random walk of n roundings, one after the other (N. Higham, "Accuracy and Stability of Numerical
    Algorithms", 2002, section 4.2), where PyTorch may add pairwise.

    Views, in-place results, zeros and small integers stay, and so does what operators only move or
    choose (cat, relu, max pooling, ...).
    """

    def __init__(self, seed: int, *, scale: float = 1.0) -> None:
        """`scale`: all of that so many times as far."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = torch.Generator().manual_seed(seed)
        self._unit = scale * _UNIT

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        schema = func._schema  # type: ignore[attr-defined]
        aliased = any(value.alias_info is not None for value in schema.returns)
        if aliased or schema.name in _EXACT_OPERATORS:
            return returned
        if isinstance(returned, torch.Tensor):
            return self._toss(returned, _units(schema.name, args, returned))
        if isinstance(returned, tuple):
            return tuple(
                self._toss(value, _units(schema.name, args, value))
                if isinstance(value, torch.Tensor)
                else value
                for value in returned
            )
        return returned

    def _toss(self, tensor: torch.Tensor, units: float) -> torch.Tensor:
        if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
            return tensor
        tossed = torch.rand(tensor.shape, generator=self._random)
        tossed.mul_(2.0 * units * self._unit).add_(1.0 - units * self._unit)
        exact = (tensor == tensor.round()) & (tensor.abs() < EXACT)
        return torch.where(exact, tensor, tensor * tossed)


def _units(name: str, args: tuple[Any, ...], returned: torch.Tensor) -> float:
    units = _APPROXIMATED if name in _FUNCTIONS else 1.0
    if name in _REDUCTIONS and args and isinstance(args[0], torch.Tensor) and returned.numel():
        units = max(units, math.sqrt(args[0].numel() / returned.numel() / 3.0))
    return units
