"""The calls into torch: copy, eval mode, forward, trace, export. The caller's model stays."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.onnx import (  # type: ignore[attr-defined]  # the last is deprecated, not in __all__
    OperatorExportTypes,
    TrainingMode,
    select_model_mode_for_export,
)

from gate.errors import ExportError
from gate.export.example import Example
from gate.export.refusals import Refusal, brief
from gate.export.settings import ExportSettings

Rung = Literal["traced", "direct"]
Axes = dict[str, dict[int, str]]
Arguments = tuple[torch.Tensor, ...]

_CHECK_TRACE = True
_STRICT_TRACE = True


@dataclass(frozen=True)
class Climb:
    """Which rung carried, why the one before did not, and all that torch was told."""

    rung: Rung
    note: str | None
    dynamic_axes: Axes
    settings: dict[str, bool | int | float | str | None]
    hazards: tuple[str, ...]


def private_copy(model: nn.Module) -> nn.Module:
    """A deep copy on the CPU without gradients. Raises ExportError if it can't be copied."""
    try:
        return copy.deepcopy(model).cpu().requires_grad_(False)
    except Exception as error:
        raise ExportError(
            f"the model can't be copied: {brief(error)}. The export works on a copy, so that it "
            "can't change the model: remove what can't be copied (locks, open files, tensors "
            "that were computed)."
        ) from error


def climb(model: nn.Module, batch: Example, settings: ExportSettings, path: Path) -> Climb:
    """Write `path` by the first rung that carries. `model` is changed: give a `private_copy`.

    Raises ExportError, and OSError where the file can't be written.
    """
    arguments = batch.tensors()
    with _neutral(), select_model_mode_for_export(model, TrainingMode.EVAL):
        returned = _forward(model, batch, arguments)
        shapes = _named_shapes(returned, settings)
        axes = _dynamic_axes(shapes, settings)
        keywords = _keywords(settings, axes)
        rung, note = _write(model, arguments, path, keywords, traceable=_is_plain(returned))
    return Climb(rung, note, axes, _told(keywords), _batchless(shapes, axes, settings))


@contextlib.contextmanager
def _neutral() -> Iterator[None]:
    """No gradients; multi-head attention by its ordinary operators; all switches set back.

    The fused attention that torch takes without gradients can't be exported; what is computed is
    the same.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


def _forward(model: nn.Module, batch: Example, arguments: Arguments) -> object:
    try:
        return model(*arguments)
    except Exception as error:
        raise ExportError(
            f"the model does not accept the example ({batch.describe()}): {brief(error)}. "
            "Check the example's shapes and dtypes, and the order of export.input_names."
        ) from error


def _named_shapes(returned: object, settings: ExportSettings) -> dict[str, tuple[int, ...]]:
    shapes = [tuple(tensor.shape) for tensor in flat_tensors(returned)]
    names = settings.output_names
    if len(shapes) != len(names):
        raise ExportError(
            f"the model returns {len(shapes)} tensor(s), export.output_names has {len(names)} "
            f"({', '.join(names)}). Give one name for each returned tensor, in order."
        )
    return dict(zip(names, shapes, strict=True))


def flat_tensors(returned: object) -> list[torch.Tensor]:
    """The tensors of nested tuples, lists and dicts, as the exporter orders them; None left out."""
    if isinstance(returned, torch.Tensor):
        return [returned]
    if returned is None:
        return []
    if isinstance(returned, dict):
        return [tensor for value in returned.values() for tensor in flat_tensors(value)]
    if isinstance(returned, tuple | list):
        return [tensor for value in returned for tensor in flat_tensors(value)]
    raise ExportError(
        f"the model returns a {type(returned).__name__}, expected tensors (in tuples, lists or "
        "dicts). Return the tensors alone."
    )


def _is_plain(returned: object) -> bool:
    """True for what a traced module returns as it is: tensors, in tuples."""
    if isinstance(returned, tuple):
        return all(_is_plain(value) for value in returned)
    return isinstance(returned, torch.Tensor)


def _dynamic_axes(shapes: dict[str, tuple[int, ...]], settings: ExportSettings) -> Axes:
    if not settings.dynamic_batch:
        return {}
    batched = [name for name, shape in shapes.items() if shape[:1] == (settings.batch_size,)]
    return {name: {0: "batch"} for name in (*settings.input_names, *batched)}


def _batchless(
    shapes: dict[str, tuple[int, ...]], axes: Axes, settings: ExportSettings
) -> tuple[str, ...]:
    if not settings.dynamic_batch:
        return ()
    return tuple(
        f"output {name} has the shape {list(shape)} for {settings.batch_size} samples: "
        "its first axis is not the batch"
        for name, shape in shapes.items()
        if name not in axes
    )


def _keywords(settings: ExportSettings, axes: Axes) -> dict[str, Any]:
    return {
        "dynamo": False,
        "opset_version": settings.opset,
        "export_params": settings.export_params,
        "do_constant_folding": settings.do_constant_folding,
        "keep_initializers_as_inputs": False,
        "training": TrainingMode.EVAL,
        "operator_export_type": OperatorExportTypes.ONNX,
        "input_names": list(settings.input_names),
        "output_names": list(settings.output_names),
        "dynamic_axes": axes,
        "verbose": False,  # also: no doc strings with this machine's paths in the file
    }


def _told(keywords: dict[str, Any]) -> dict[str, bool | int | float | str | None]:
    """The keywords as a flat record, with those of the trace."""
    flat = keywords | {
        "training": "eval",
        "operator_export_type": "ONNX",
        "input_names": ",".join(keywords["input_names"]),
        "output_names": ",".join(keywords["output_names"]),
        "dynamic_axes": ";".join(
            f"{name}:{axis}={label}"
            for name, labels in keywords["dynamic_axes"].items()
            for axis, label in labels.items()
        ),
    }
    trace = {"check_trace": _CHECK_TRACE, "strict_trace": _STRICT_TRACE}
    return {**flat, **trace, "fused_attention": False, "grad": False}


def _write(
    model: nn.Module, arguments: Arguments, path: Path, keywords: dict[str, Any], *, traceable: bool
) -> tuple[Rung, str | None]:
    """Climb: rung by rung, the operator-level refusals of the first lead to the second."""
    note = "a traced module can't return dicts, lists or None"
    if traceable:
        traced = _traced(model, arguments)
        try:
            _export(traced, arguments, path, keywords)
        except torch.onnx.OnnxExporterError as error:
            note = Refusal.of(error).cause
        else:
            return "traced", None
    try:
        _export(model, arguments, path, keywords)
    except torch.onnx.OnnxExporterError as error:
        refusal = Refusal.of(error)
        before = "" if note == refusal.cause else f" (the traced module: {note})"
        raise ExportError(f"{refusal.cause}{before}. {refusal.remedy}") from error
    return "direct", note


def _export(module: nn.Module, arguments: Arguments, path: Path, keywords: dict[str, Any]) -> None:
    """Call the exporter. A full disk stays OSError, a refusal OnnxExporterError."""
    try:
        torch.onnx.export(module, arguments, str(path), **keywords)
    except (OSError, torch.onnx.OnnxExporterError):
        raise
    except Exception as error:
        refusal = Refusal.of(error)
        raise ExportError(f"{refusal.cause}. {refusal.remedy}") from error


def _traced(model: nn.Module, arguments: Arguments) -> torch.jit.ScriptModule:
    try:
        traced: torch.jit.ScriptModule = torch.jit.trace(  # type: ignore[no-untyped-call]
            model, arguments, check_trace=_CHECK_TRACE, strict=_STRICT_TRACE
        )
    except torch.jit.TracingCheckError as error:  # type: ignore[attr-defined]
        raise ExportError(
            "two traces of the model gave different graphs: forward draws random numbers, or "
            "depends on state that it changes itself. Make eval mode repeatable."
        ) from error
    except Exception as error:
        raise ExportError(
            f"torch.jit.trace failed: {brief(error)}. Try forward with the example alone, and "
            "take out what is not a tensor operation."
        ) from error
    return traced
