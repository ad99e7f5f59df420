"""The strategy `traced`: `torch.jit.trace`, then the TorchScript-based exporter."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gate.export.custom import Symbolics
from gate.export.refusals.refusal import brief
from gate.export.request import Request
from gate.export.strategies.exporter import ExporterOptions, RungFailed
from gate.export.strategies.torchscript import write_legacy

_CHECK_TRACE = True
_STRICT_TRACE = True


def write_traced(request: Request, path: Path, *, symbolics: Symbolics) -> ExporterOptions:
    """Trace the model on the batch, export the trace to `path`; say what was set.

    Raises RungFailed, and OSError where the file can't be written.
    """
    with request.flat() as module:
        trace = _trace(module, request)
    set_ = write_legacy(request, trace, path, strategy="traced", opset=symbolics.opset)
    return {**set_, "check_trace": _CHECK_TRACE, "strict_trace": _STRICT_TRACE}


def _trace(module: nn.Module, request: Request) -> torch.jit.ScriptModule:
    try:
        trace: torch.jit.ScriptModule = torch.jit.trace(  # type: ignore[no-untyped-call]
            module, request.arguments, check_trace=_CHECK_TRACE, strict=_STRICT_TRACE
        )
    except torch.jit.TracingCheckError as error:  # type: ignore[attr-defined]
        raise RungFailed.because(
            "two traces of the model gave different graphs: forward draws random numbers, or "
            "depends on state that it changes itself",
            "Make eval mode repeatable.",
        ) from error
    except Exception as error:
        raise RungFailed.because(
            f"torch.jit.trace failed: {brief(error)}",
            "Try forward with the example alone, and take out what is not a tensor operation.",
        ) from error
    return trace
