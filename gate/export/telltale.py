"""Which warnings of an export mean something for the file, in words without machine paths."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from gate.export.capture import place

_IN_EXPORTER = "torch/onnx/"
_IN_TORCH = "torch/"
_HARMLESS = (
    "no signature found",  # a traced module has none; inputs are positional
    "Constant folding",  # an optimisation that was left out
    "Provided key",  # a name of dynamic_axes that another rung names differently
    "# The axis name",  # an axis of two inputs has one name, as it should
)


def tracer_warnings(caught: Iterable[warnings.WarningMessage]) -> tuple[str, ...]:
    """`place: message` of each TracerWarning, once, in order; torch's own library code left out.

    torch tells its tracer the same about itself: its modules are written to be traced.
    """
    return _unique(
        f"{place(warning)}: {_one_line(warning)}"
        for warning in caught
        if issubclass(warning.category, torch.jit.TracerWarning)  # type: ignore[attr-defined]
        and not _in_torch_library(place(warning))
    )


def hazards(caught: Iterable[warnings.WarningMessage]) -> tuple[str, ...]:
    """What the exporter itself warns of: operators left in training mode, batch-bound LSTMs."""
    return _unique(
        _one_line(warning)
        for warning in caught
        if issubclass(warning.category, UserWarning)
        and _IN_EXPORTER in warning.filename.replace("\\", "/")
        and not str(warning.message).startswith(_HARMLESS)
    )


def _in_torch_library(where: str) -> bool:
    # The tracer reports differing outputs of its own check from torch/jit: these do mean something.
    return where.startswith(_IN_TORCH) and not where.startswith("torch/jit/")


def _one_line(warning: warnings.WarningMessage) -> str:
    return " ".join(str(warning.message).split())


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))
