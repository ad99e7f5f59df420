"""The TorchScript-based exporter (`dynamo=False`): one call, every setting named."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gate.export.axes import axes_text
from gate.export.refusals.operators import refused
from gate.export.refusals.refusal import ExportRefusal
from gate.export.request import Request
from gate.export.strategies.exporter import ExporterOptions, RungFailed, settings_of
from gate.export.strategies.naming import accepted, rename
from gate.records.strategy import Strategy


def write_legacy(
    request: Request, module: nn.Module, path: Path, *, strategy: Strategy, opset: int
) -> ExporterOptions:
    """Export `module`, which takes and returns flat tensors, to `path`; say what was set.

    `strategy` is the one that made the module. Raises RungFailed, and OSError where the file
    can't be written.
    """
    from torch.onnx import OperatorExportTypes, TrainingMode

    plain: ExporterOptions = {
        "dynamo": False,
        "opset_version": opset,
        "export_params": request.settings.export_params,
        "do_constant_folding": request.settings.do_constant_folding,
        "keep_initializers_as_inputs": False,
        "verbose": False,  # also: no doc strings with this machine's paths in the file
    }
    keywords: dict[str, Any] = plain | {
        "training": TrainingMode.EVAL,
        "operator_export_type": OperatorExportTypes.ONNX,
        "input_names": accepted(request.input_names),
        "output_names": accepted(request.output_names),
        "dynamic_axes": dict(
            zip(accepted(tuple(request.axes)), request.axes.values(), strict=True)
        ),
    }
    try:
        torch.onnx.export(module, request.arguments, str(path), **keywords)
    except OSError:
        raise
    except Exception as error:
        find = partial(_explain, error, request, strategy=strategy, keywords=keywords)
        explain = partial(find, None if module is request.model else module)
        raise RungFailed.of(error, strategy=strategy, opset=opset, explain=explain) from error
    rename(path, (*request.input_names, *request.output_names))
    described: ExporterOptions = {
        "training": "eval",
        "operator_export_type": "ONNX",
        "dynamic_axes": axes_text(request.axes),
    }
    return settings_of(request, plain | described)


def _explain(
    error: Exception,
    request: Request,
    module: nn.Module | None,
    *,
    strategy: Strategy,
    keywords: dict[str, Any],
) -> ExportRefusal:
    """Asked after the export: the model itself (None) is flat no more by then."""
    with request.flat() if module is None else contextlib.nullcontext(module) as exported:
        return refused(
            error, exported, request.arguments, strategy=strategy, exporter_keywords=keywords
        )
