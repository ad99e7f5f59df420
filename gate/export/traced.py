"""The traced export: `torch.jit.trace`, then the TorchScript-based exporter, every setting named.

Two rungs. "traced": the traced module is exported. "direct": the exporter traces the module
itself; taken where the first fails on an operator, because the exporter's own trace resolves
some fused ones (multi-head attention, `swapaxes`). The record says which one carried, and why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import nn

from gate import atomic
from gate.errors import ExportError, OnnxFileError, StorageError
from gate.evidence import ExportRecord, Subject
from gate.export.capture import Capture, captured
from gate.export.example import Example
from gate.export.exporter import Climb, climb, private_copy
from gate.export.onnx_file import read_subject, verify_file
from gate.export.settings import ExportSettings
from gate.export.telltale import hazards, tracer_warnings

_PROTOBUF_LIMIT = 2**31 - 2**24
"""Bytes of weights that fit one protobuf file, with 16 MiB left for the graph."""


@dataclass(frozen=True)
class Exported:
    """A file that was exported and verified, and how. `log` is what the exporter printed."""

    path: Path
    subject: Subject
    record: ExportRecord
    log: str


def export_traced(
    model: nn.Module,
    example: Mapping[str, NDArray[Any]],
    *,
    settings: ExportSettings,
    output: Path,
) -> Exported:
    """Export `model` to the single file `output`, atomically; the model itself is not touched.

    `example` maps input names (or anything, then by position) to arrays of shape (samples, ...).
    Works on a deep copy on the CPU in eval mode. The same model and settings give the same bytes.
    Raises ExportError if the model can't be copied, run, traced or exported, or if the file is
    not the one that was asked for (names, opset, dynamic batch); the exporter's log is then kept
    as `<output>.export.log`. Raises StorageError if the file can't be written. In both cases an
    older `output` stays as it was.
    """
    _refuse_too_large(model)
    batch = Example.bind(example, settings.input_names).batch(settings.batch_size)
    copied = private_copy(model)
    log_path = output.with_name(f"{output.name}.export.log")
    capture = Capture()
    try:
        with atomic.replacing(output) as temporary:
            with captured() as capture:
                carried = climb(copied, batch, settings, temporary)
            subject = _verified(temporary, settings, carried)
    except ExportError as error:
        kept = _keep_log(log_path, capture.text)
        raise ExportError(f"{error}{kept}") from error
    log_path.unlink(missing_ok=True)
    record = ExportRecord(
        strategy=carried.rung,
        settings=_settings_used(settings, carried),
        tracer_warnings=tracer_warnings(capture.warnings),
        hazards=(*carried.hazards, *hazards(capture.warnings)),
    )
    return Exported(output, subject, record, capture.text)


def _refuse_too_large(model: nn.Module) -> None:
    size = sum(
        value.numel() * value.element_size()
        for value in (*model.parameters(), *model.buffers())
        if not nn.parameter.is_lazy(value)
    )
    if size > _PROTOBUF_LIMIT:
        raise ExportError(
            f"the model has {size} bytes of weights, a single ONNX file holds at most "
            f"{_PROTOBUF_LIMIT}. Export a smaller model, or half precision."
        )


def _verified(path: Path, settings: ExportSettings, carried: Climb) -> Subject:
    """Check the written file against what was asked for."""
    try:
        verify_file(path, opset=settings.opset)
        subject = read_subject(path)
    except OnnxFileError as error:
        raise ExportError(f"the exporter wrote a file that is not valid: {error}") from error
    inputs = [spec.name for spec in subject.inputs]
    if settings.export_params and tuple(inputs) != settings.input_names:
        raise ExportError(
            f"the exported file has the inputs {inputs}, expected {list(settings.input_names)}. "
            "forward ignores an argument: leave it out, or use it."
        )
    outputs = [spec.name for spec in subject.outputs]
    if tuple(outputs) != settings.output_names:
        raise ExportError(
            f"the exported file has the outputs {outputs}, expected "
            f"{list(settings.output_names)}. Name what forward returns, in its order."
        )
    for spec in (*subject.inputs, *subject.outputs):
        dynamic = bool(spec.shape) and isinstance(spec.shape[0], str)
        if spec.name in carried.dynamic_axes and not dynamic:
            raise ExportError(
                f"{spec.name} has the shape {list(spec.shape)} in the file, expected a dynamic "
                "first axis. forward fixes the batch size (len(x), int(x.shape[0])): use -1 or "
                "x.shape[0] as it is."
            )
    return subject


def _settings_used(settings: ExportSettings, carried: Climb) -> dict[str, Any]:
    return {
        "strategy_asked": settings.strategy,
        "rung_note": carried.note,
        "dynamic_batch": settings.dynamic_batch,
        "batch_size": settings.batch_size,
        **carried.settings,
    }


def _keep_log(path: Path, text: str) -> str:
    """Write the log beside the output; a full disk must not hide the error that is told."""
    if not text.strip():
        return ""
    with contextlib.suppress(StorageError):
        atomic.write_text(path, text)
        return f" The exporter's log is {path}."
    return ""
