"""Random rounding: how far rounding alone may move the reference on one input.

Monte Carlo arithmetic (D. S. Parker, "Monte Carlo Arithmetic: exploiting randomness in
floating-point arithmetic", UCLA CSD-970002, 1997): the model runs again while the last bit of
every input and of every operator's result is tossed. What that changes, another correct float32
implementation may change too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gate.parity.runner import Batch
from gate.parity.stand import Stand
from gate.parity.statistics import Array

_ULP = 2.0**-23
"""Distance of 1.0 to the next float32."""
_EXACT = 2.0**20
"""Integers below it are counts, indices, or sums that every implementation gets exactly."""
_DRAWS = 3
_SEEDS = 2**63
"""A policy may have a negative seed, a generator may not."""


def jittered(stand: Stand, batch: Batch) -> list[list[Array]]:
    """The reference's outputs under some draws of random rounding, seeded by the policy.

    Empty if the model can't be computed so: then nothing is excused by rounding.
    """
    draws = []
    for draw in range(_DRAWS):
        seed = stand.policy.determinism.seed % _SEEDS + draw
        random = np.random.default_rng(seed)
        moved = {name: _input(array, random) for name, array in batch.items()}
        try:
            with _RandomRounding(seed):
                draws.append(stand.reference.run(moved))
        except Exception:
            return []
    return draws


class _RandomRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tosses the last bit of what operators return in float32; views, in-place results, zeros
    and small integers stay."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        if any(value.alias_info is not None for value in func._schema.returns):  # type: ignore[attr-defined]
            return returned
        if isinstance(returned, torch.Tensor):
            return self._toss(returned)
        if isinstance(returned, tuple):
            return tuple(
                self._toss(value) if isinstance(value, torch.Tensor) else value
                for value in returned
            )
        return returned

    def _toss(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
            return tensor
        steps = torch.randint(-1, 2, tensor.shape, generator=self._random, dtype=torch.int8)
        exact = (tensor == tensor.round()) & (tensor.abs() < _EXACT)
        return torch.where(exact, tensor, tensor * (1.0 + steps * _ULP))


def _input(array: Array, random: np.random.Generator) -> Array:
    if array.dtype.kind != "f":
        return array
    values = array.astype(np.float64)
    exact = (values == np.round(values)) & (np.abs(values) < _EXACT)
    moved = values * (1.0 + random.integers(-1, 2, array.shape) * _ULP)
    with np.errstate(over="ignore"):
        return np.where(exact, values, moved).astype(array.dtype)
