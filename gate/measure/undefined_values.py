"""Detect differences that are not faults of the file: lost NaN, undefined casts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gate.measure.context import MeasurementContext
from gate.onnx_file.value_trace import OpenCast, overflows
from gate.records.instruments import UndefinedCast
from gate.reference.choices import CONVERSIONS
from gate.reference.torch_session import DispatchMode
from gate.storage.arrays import Batch, OutputArray

_LOSING = (
    "relu", "clamp", "hardtanh", "max_pool", "maximum", "minimum", "amax", "amin", "max", "min",
    "softmax", "attention", "sigmoid", "tanh", "gelu", "elu", "erf", "hardswish", "topk", "mish",
    "softplus", "lstm", "gru", "rnn",
)  # fmt: skip
"""Parts of names of operators that preserve NaN in PyTorch but may lose it in a runtime."""

_MARGIN = 2.0**-16
"""Relative distance to the limits of an integer type within which rounding may cause overflow."""

_LEEWAY = 16.0
"""Allowed error of an element, relative to its spread over other results of undefined casts."""

_CONVERSIONS = {f"aten::{name}" for name in (*CONVERSIONS, "copy_")}


class _Watch(DispatchMode):
    """Records NaN in operators that may lose it, and floats that overflow an integer type."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meets_nan = False
        self.attends_nothing = False
        self.conversions: list[tuple[str, NDArray[np.bool_], int]] = []
        """The type, which floats may overflow it, and how many do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        name = func._schema.name
        if any(part in name for part in _LOSING):
            results = returned if isinstance(returned, tuple | list) else (returned,)
            self.meets_nan = self.meets_nan or any(map(_has_nan, (*args, *results)))
            inputs = (*args, *(kwargs or {}).values())
            if "softmax" in name or "attention" in name:
                self.attends_nothing = self.attends_nothing or any(map(_hides, inputs))
        elif name in _CONVERSIONS:
            source, into = (args[1], args[0]) if name == "aten::copy_" else (args[0], returned)
            if source.is_floating_point() and not into.is_floating_point():
                self._convert(source, into.dtype)
        return returned

    def _convert(self, source: torch.Tensor, into: torch.dtype) -> None:
        dtype = torch.empty(0, dtype=into).numpy().dtype
        if dtype.kind in "iu":
            values = source.detach().double().numpy()
            beyond = overflows(values, dtype, margin=_MARGIN)
            self.conversions.append((dtype.name, beyond, int(overflows(values, dtype).sum())))


def _has_nan(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and bool(torch.isnan(value).any())
    )


def _hides(value: Any) -> bool:
    """Return whether a row of scores or of a mask hides everything."""
    if not isinstance(value, torch.Tensor) or not value.ndim or not value.numel():
        return False
    if value.dtype == torch.bool:
        return bool((~value).all(-1).any())
    return value.is_floating_point() and bool((value == -torch.inf).all(-1).any())


def attends_nothing(context: MeasurementContext, batch: Batch) -> bool:
    """Return whether a mask hides all inputs of an attention or softmax row.

    Kernels return NaN, zeros or a mean there, so a correct file may differ.
    """
    return context.watch(batch, _Watch).attends_nothing


def nan_is_lost(context: MeasurementContext, batch: Batch) -> bool:
    """Return whether file and model both compute NaN, but ONNX Runtime loses it in an operator.

    Raises the exceptions of ONNX Runtime.
    """
    trace = context.nan_trace
    if trace is None or not trace.loses_nan(context.binding.by_input(batch)):
        return False
    return context.watch(batch, _Watch).meets_nan


def undefined_casts(
    context: MeasurementContext, batch: Batch
) -> tuple[tuple[UndefinedCast, ...], list[list[OutputArray]]]:
    """Return casts that are undefined in file and model, and their effect.

    The effect is the outputs of the file for other results of these casts. Empty if only the file
    has such casts. Raises the exceptions of ONNX Runtime.
    """
    open_casts = context.open_casts
    feed = context.binding.by_input(batch)
    casts = open_casts.on(feed) if open_casts is not None else []
    if open_casts is None or not casts or not _are_in_model(casts, context.watch(batch, _Watch)):
        return (), []
    runs = [
        context.binding.from_call(run)
        for run in open_casts.variants(feed, casts, seed=abs(context.policy.determinism.seed))
    ]
    records = tuple(
        UndefinedCast(tensor=cast.node, dtype=cast.dtype.name, elements=int(cast.open.sum()))
        for cast in casts
    )
    return records, [list(arrays) for arrays in zip(*runs, strict=True)]


def _are_in_model(casts: list[OpenCast], watch: _Watch) -> bool:
    """Return whether the model also has each cast: the same floats to the same type."""
    return all(any(map(partial(_is_same, cast), watch.conversions)) for cast in casts)


def _is_same(cast: OpenCast, conversion: tuple[str, NDArray[np.bool_], int]) -> bool:
    name, beyond, count = conversion
    if name != cast.dtype.name or beyond.size != cast.open.size:
        return False
    inside = not (cast.open.ravel() & ~beyond.ravel()).any()
    return inside or count == int(cast.open.sum())  # in another layout


def explained(r: OutputArray, c: OutputArray, runs: Sequence[OutputArray]) -> NDArray[np.bool_]:
    """Return the elements whose error the spread over undefined results (`runs`) explains."""
    if any(run.shape != r.shape for run in runs):
        return np.ones(r.shape, np.bool_)
    values = np.stack([run.astype(np.float64) for run in runs])
    spread = values.max(axis=0) - values.min(axis=0)
    difference = np.abs(c.astype(np.float64) - r.astype(np.float64))
    classes = np.isfinite(values).any(axis=0) & ~np.isfinite(values).all(axis=0)
    within = np.isfinite(spread) & (spread > 0.0) & (difference <= _LEEWAY * spread)
    return np.asarray(within | classes)


def casts_on_samples(context: MeasurementContext) -> tuple[UndefinedCast, ...]:
    """Return the casts of the first samples that are undefined in the file and in the model.

    The outputs are still compared: where results differ, the model runs with those of the file
    (`gate.reference.choices`).
    """
    open_casts = context.open_casts
    if open_casts is None or not open_casts.exist:
        return ()
    elements: dict[tuple[str, str], int] = {}
    for batch in context.batches_with_truth():
        try:
            casts = open_casts.on(context.binding.by_input(batch))
        except Exception:  # the runtime reports a file that can't run
            return ()
        if casts and _are_in_model(casts, context.watch(batch, _Watch)):
            for cast in casts:
                key = cast.node, cast.dtype.name
                elements[key] = elements.get(key, 0) + int(cast.open.sum())
    return tuple(
        UndefinedCast(tensor=tensor, dtype=dtype, elements=count)
        for (tensor, dtype), count in elements.items()
    )
