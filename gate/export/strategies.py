"""The strategies of the TorchScript-based exporter (`dynamo=False`): one call, every setting named.

`traced`: `torch.jit.trace`, then the exporter. `direct`: the exporter's own trace, which resolves
some fused operators (multi-head attention, `swapaxes`) that it can't write when they come in a
traced module. `scripted`: `torch.jit.script`, which keeps `if`, `for` and `while` on data.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gate.export.axes import axes_text
from gate.export.custom import Symbolics
from gate.export.refusals.operators import refused
from gate.export.refusals.refusal import ExportRefusal, brief
from gate.export.request import Flat, Request
from gate.export.strategies.exporter import ExporterOptions, RungFailed, settings_of
from gate.export.strategies.naming import accepted, rename, rename_outputs
from gate.export.strategies.scripting import objection
from gate.export.switches import Switches
from gate.records.strategy import Strategy

_CHECK_TRACE = True
_STRICT_TRACE = True


def write_traced(request: Request, path: Path, *, symbolics: Symbolics) -> ExporterOptions:
    """Trace the model on the batch, export the trace to `path`; say what was set.

    Raises RungFailed, and OSError where the file can't be written.
    """
    with request.flat() as module:
        trace = _trace(module, request)
    set_ = _write(request, trace, path, strategy="traced", opset=symbolics.opset)
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


def write_direct(request: Request, path: Path, *, symbolics: Symbolics) -> ExporterOptions:
    """Export the module to `path`; say what was set.

    Raises RungFailed, and OSError where the file can't be written.
    """
    with request.flat() as module:
        return _write(request, module, path, strategy="direct", opset=symbolics.opset)


def write_scripted(request: Request, path: Path, *, symbolics: Symbolics) -> ExporterOptions:
    """Compile the model, export it to `path`; say what was set.

    Structured inputs and outputs, and tensors that may be None, are flattened by a trace around the
    compiled model, which keeps what is compiled. Raises RungFailed, and OSError where the file
    can't be written.
    """
    try:
        scripted = torch.jit.script(request.model)
    except Exception as error:
        why = objection(request) or (
            f"torch.jit.script failed: {brief(error)}",
            "Annotate the types of arguments that are not tensors, and take out of forward what "
            "TorchScript has no words for.",
        )
        raise RungFailed.because(*why) from error
    if not request.plain or request.call.takes_none:
        try:
            scripted = torch.jit.trace(  # type: ignore[no-untyped-call]
                Flat(scripted, request.call), request.arguments, check_trace=False
            )
        except Exception as error:
            why = objection(request) or (
                f"the compiled model does not take or return flat tensors: {brief(error)}",
                "Take and return tensors, in tuples.",
            )
            raise RungFailed.because(*why) from error
    return _write(request, scripted, path, strategy="scripted", opset=symbolics.opset)


def _write(
    request: Request, module: nn.Module, path: Path, *, strategy: Strategy, opset: int
) -> ExporterOptions:
    """Export `module`, which takes and returns flat tensors, to `path`; say what was set.

    `strategy` is the one that made the module. Raises RungFailed, and OSError where the file
    can't be written.
    """
    from torch.onnx import TrainingMode

    switches = Switches(request.settings)
    plain: ExporterOptions = {
        "dynamo": False,
        "opset_version": opset,
        "export_params": request.settings.export_params,
        "do_constant_folding": request.settings.do_constant_folding,
        "keep_initializers_as_inputs": request.settings.keep_initializers_as_inputs,
        "verbose": request.settings.verbose,
    }
    keywords: dict[str, Any] = plain | {
        "training": TrainingMode.EVAL,
        **switches.keywords(request.model),
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
    if request.settings.export_modules_as_functions:
        rename_outputs(path, accepted(request.output_names))
    rename(path, (*request.input_names, *request.output_names))
    described: ExporterOptions = {
        "training": "eval",
        **switches.described(),
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
