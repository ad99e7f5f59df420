"""Measure the size of a fault without ONNX and the gate, from both PyTorch models in float64."""

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
"""Smallest relative floor: half a unit in the last place of float32."""

_MASK = 1e9
"""Values at least this large that are equal on both sides are masks and are ignored."""

Outputs = list[NDArray[np.generic]]


def measure_effect(edited: nn.Module, model: nn.Module, samples: Arrays) -> float:
    """Return the largest rms(e64 - r64) / rms(r32 - r64) of any output, sample, channel or column.

    Returns infinity if shapes, integers or the positions of non-finite values differ.
    """
    outputs = zip(
        compute_outputs(edited, samples, double=True),
        compute_outputs(model, samples, double=True),
        compute_outputs(model, samples),
        strict=True,
    )
    return max(_output_effect(*arrays) for arrays in outputs)


def _output_effect(
    e64: NDArray[np.generic], r64: NDArray[np.generic], r32: NDArray[np.generic]
) -> float:
    if e64.shape != r64.shape:
        return math.inf
    if r64.dtype.kind != "f":
        return 0.0 if np.array_equal(e64, r64) else math.inf
    finite = np.isfinite(r64) & ((np.abs(r64) < _MASK) | (e64 != r64))
    if not np.array_equal(e64[~finite], r64[~finite], equal_nan=True):
        return math.inf
    difference = np.where(finite, e64 - r64, 0.0)
    rounding = np.where(finite & np.isfinite(r32), r32 - r64, 0.0)
    size = np.where(finite, r64, 0.0)
    return max(
        _largest_ratio(
            _rms(difference, axes),
            np.maximum(_rms(rounding, axes), _SMALLEST_FLOOR * _rms(size, axes)),
        )
        for axes in _groups(difference.ndim)
    )


def _groups(ndim: int) -> Iterator[tuple[int, ...]]:
    """Yield the axes to average over: all, then all but one."""
    all_axes = tuple(range(ndim))
    yield all_axes
    for kept_axis in {0, 1, ndim - 1} & set(all_axes):
        yield tuple(axis for axis in all_axes if axis != kept_axis)


def _rms(values: NDArray[np.generic], axes: tuple[int, ...]) -> NDArray[np.float64]:
    return np.asarray(np.sqrt(np.square(values.astype(np.float64)).mean(axis=axes)))


def _largest_ratio(difference: NDArray[np.float64], floor: NDArray[np.float64]) -> float:
    if not np.isfinite(difference).all() or (difference[floor == 0.0] > 0.0).any():
        return math.inf
    return float(
        np.divide(difference, floor, out=np.zeros_like(difference), where=floor > 0.0).max()
    )


class _Float64Mode(TorchFunctionMode):
    """Replace float32 by float64 in casts and factory calls of a model."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
        keywords = {
            name: torch.float64 if argument is torch.float32 else argument
            for name, argument in (kwargs or {}).items()
        }
        result = func(*args, **keywords)
        is_float32_factory = func in _FACTORIES and "dtype" not in keywords
        return result.double() if is_float32_factory and result.dtype == torch.float32 else result


_FACTORIES = {torch.zeros, torch.ones, torch.full, torch.tensor, torch.arange, torch.linspace,
              torch.eye, torch.empty}  # fmt: skip


def compute_outputs(model: nn.Module, samples: Arrays, *, double: bool = False) -> Outputs:
    """Return all outputs of a copy of the model for all samples in one batch."""
    copied = copy.deepcopy(model)
    tensors = [torch.from_numpy(array.copy()) for array in samples.values()]
    if double:
        copied = copied.double()
        tensors = [t.double() if t.is_floating_point() else t for t in tensors]
    with torch.no_grad(), _Float64Mode() if double else nullcontext():
        outputs = copied(*tensors)
    return [output.numpy() for output in torch.utils._pytree.tree_leaves(outputs)]
