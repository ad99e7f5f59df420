"""Differences on a probe that are no fault of the file: a lost NaN, an undefined conversion."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from gate.errors import GateError
from gate.measure.context import MeasurementContext
from gate.onnx_file.value_trace import OpenCast, not_held
from gate.records.instruments import UndefinedCast
from gate.reference.torch_session import DispatchMode
from gate.storage.arrays import Batch, OutputArray

_LOSING = (
    "relu", "clamp", "hardtanh", "max_pool", "maximum", "minimum", "amax", "amin", "max", "min",
    "softmax", "attention", "sigmoid", "tanh", "gelu", "elu", "erf", "hardswish", "topk", "mish",
    "softplus", "lstm", "gru", "rnn",
)  # fmt: skip
"""Parts of the names of operators that keep NaN in PyTorch, and may lose it in a runtime."""

_CONVERSIONS = {"aten::_to_copy", "aten::to", "aten::copy_"}


class _Watch(DispatchMode):  # type: ignore[no-untyped-call]
    """Records NaN that reaches such operators, and floats that an integer type does not hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meets_nan = False
        self.attends_nothing = False
        self.conversions: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        name = func._schema.name
        if any(part in name for part in _LOSING):
            results = returned if isinstance(returned, tuple | list) else (returned,)
            self.meets_nan = self.meets_nan or any(map(_has_nan, (*args, *results)))
            given = (*args, *(kwargs or {}).values())
            weighs = "softmax" in name or "attention" in name
            self.attends_nothing = self.attends_nothing or (weighs and any(map(_hides, given)))
        elif name in _CONVERSIONS:
            given, into = (args[1], args[0]) if name == "aten::copy_" else (args[0], returned)
            if given.is_floating_point() and not into.is_floating_point():
                self._convert(given, into.dtype)
        return returned

    def _convert(self, given: torch.Tensor, into: torch.dtype) -> None:
        dtype = torch.empty(0, dtype=into).numpy().dtype
        if dtype.kind in "iu":
            count = int(not_held(given.detach().double().numpy(), dtype).sum())
            self.conversions.append((dtype.name, count))


def _has_nan(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and bool(torch.isnan(value).any())
    )


def _hides(value: Any) -> bool:
    """Whether a row of scores, or of a mask, leaves nothing."""
    if not isinstance(value, torch.Tensor) or not value.ndim or not value.numel():
        return False
    if value.dtype == torch.bool:
        return bool((~value).all(-1).any())
    return value.is_floating_point() and bool((value == -torch.inf).all(-1).any())


def attends_nothing(stand: MeasurementContext, batch: Batch) -> bool:
    """Return True if the model weighs nothing but what a mask hides: kernels of attention return
    NaN, zeros or a mean there, and no correct file has to return the same."""
    return _watched(stand, batch).attends_nothing


def _watched(stand: MeasurementContext, batch: Batch) -> _Watch:
    watch = _Watch()
    try:
        with watch:
            stand.reference.run(batch)
    except GateError:
        return _Watch()
    return watch


def nan_is_lost(stand: MeasurementContext, batch: Batch) -> bool:
    """Return True if the file computes NaN as the model does, and ONNX Runtime loses it in an
    operator. Raises what ONNX Runtime raises."""
    trace = stand.nan_trace
    if trace is None or not trace.loses_nan(stand.binding.by_input(batch)):
        return False
    return _watched(stand, batch).meets_nan


def undefined_casts(
    stand: MeasurementContext, batch: Batch
) -> tuple[tuple[UndefinedCast, ...], list[list[OutputArray]]]:
    """Return the conversions that are undefined in the file and in the model, and for each output
    what the file makes of other results of them; nothing where only the file has them.

    Raises what ONNX Runtime raises.
    """
    found = stand.open_casts
    feed = stand.binding.by_input(batch)
    casts = found.on(feed) if found is not None else []
    if found is None or not casts or not _are_the_model_s(casts, _watched(stand, batch)):
        return (), []
    runs = [
        stand.binding.from_call(run)
        for run in found.variants(feed, casts, seed=abs(stand.policy.determinism.seed))
    ]
    records = tuple(
        UndefinedCast(tensor=cast.node, dtype=cast.dtype.name, elements=int(cast.open.sum()))
        for cast in casts
    )
    return records, [list(arrays) for arrays in zip(*runs, strict=True)]


def _are_the_model_s(casts: list[OpenCast], watch: _Watch) -> bool:
    """Whether each conversion is one of the model's too, by its type and number of elements."""
    left = Counter(watch.conversions)
    return all(left[cast.dtype.name, int(cast.open.sum())] > 0 for cast in casts)
