"""Measure the size of a fault without ONNX and the gate: both PyTorch models run in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.corpus.samples import Arrays

_SMALLEST_FLOOR = 2.0**-24
"""Of a value: half a unit of its last place in float32."""

_MASK = 1e9
"""What is as large and the same on both sides masks, and is no scale for what it does not mask."""

Computed = list[NDArray[np.generic]]


def effect_of(edited: nn.Module, model: nn.Module, samples: Arrays) -> float:
    """rms(e64 - r64) / rms(r32 - r64) on the samples, in the output, sample, channel or column
    where it is largest; infinite where shapes, integers or places that are not finite differ."""
    outputs = zip(
        computed(edited, samples, double=True),
        computed(model, samples, double=True),
        computed(model, samples),
        strict=True,
    )
    return max(_effect(*arrays) for arrays in outputs)


def _effect(e64: NDArray[np.generic], r64: NDArray[np.generic], r32: NDArray[np.generic]) -> float:
    if e64.shape != r64.shape:
        return math.inf
    if r64.dtype.kind != "f":
        return 0.0 if np.array_equal(e64, r64) else math.inf
    finite = np.isfinite(r64) & ((np.abs(r64) < _MASK) | (e64 != r64))
    if not np.array_equal(e64[~finite], r64[~finite], equal_nan=True):
        return math.inf
    moved = np.where(finite, e64 - r64, 0.0)
    off = np.where(finite & np.isfinite(r32), r32 - r64, 0.0)
    size = np.where(finite, r64, 0.0)
    return max(
        _worst(_rms(moved, axes), np.maximum(_rms(off, axes), _SMALLEST_FLOOR * _rms(size, axes)))
        for axes in _groups(moved.ndim)
    )


def _groups(ndim: int) -> Iterator[tuple[int, ...]]:
    """Axes over which is averaged: all, then all but one."""
    every = tuple(range(ndim))
    yield every
    for kept in {0, 1, ndim - 1} & set(every):
        yield tuple(axis for axis in every if axis != kept)


def _rms(values: NDArray[np.generic], axes: tuple[int, ...]) -> NDArray[np.float64]:
    return np.asarray(np.sqrt(np.square(values.astype(np.float64)).mean(axis=axes)))


def _worst(moved: NDArray[np.float64], floor: NDArray[np.float64]) -> float:
    if not np.isfinite(moved).all() or (moved[floor == 0.0] > 0.0).any():
        return math.inf
    return float(np.divide(moved, floor, out=np.zeros_like(moved), where=floor > 0.0).max())


class _InDouble(TorchFunctionMode):
    """What a model casts to float32, or makes in it, is float64 instead."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        named = {
            name: torch.float64 if one is torch.float32 else one
            for name, one in (kwargs or {}).items()
        }
        made = func(*args, **named)
        fresh = func in _FACTORIES and "dtype" not in named
        return made.double() if fresh and made.dtype == torch.float32 else made


_FACTORIES = {torch.zeros, torch.ones, torch.full, torch.tensor, torch.arange, torch.linspace,
              torch.eye, torch.empty}  # fmt: skip


def computed(model: nn.Module, samples: Arrays, *, double: bool = False) -> Computed:
    """All outputs of all samples at once, by a copy of the model."""
    copied = copy.deepcopy(model)
    tensors = [torch.from_numpy(array.copy()) for array in samples.values()]
    if double:
        copied = copied.double()
        tensors = [t.double() if t.is_floating_point() else t for t in tensors]
    with torch.no_grad(), _InDouble() if double else nullcontext():
        returned = copied(*tensors)
    return [one.numpy() for one in torch.utils._pytree.tree_leaves(returned)]
