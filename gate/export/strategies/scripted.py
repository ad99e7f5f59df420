"""The strategy `scripted`: `torch.jit.script`, which keeps `if`, `for` and `while` on data, then
the TorchScript-based exporter."""

from __future__ import annotations

from pathlib import Path

import torch

from gate.export.custom import Symbolics
from gate.export.refusals.refusal import brief
from gate.export.request import Flat, Request
from gate.export.strategies.exporter import ExporterOptions, RungFailed
from gate.export.strategies.torchscript import write_legacy


def write_scripted(request: Request, path: Path, *, symbolics: Symbolics) -> ExporterOptions:
    """Compile the model, export it to `path`; say what was set.

    Structured inputs and outputs are flattened by a trace around the compiled model, which keeps
    what is compiled. Raises RungFailed, and OSError where the file can't be written.
    """
    try:
        scripted = torch.jit.script(request.model)
    except Exception as error:
        raise RungFailed.because(
            f"torch.jit.script failed: {brief(error)}",
            "Annotate the types of arguments that are not tensors, and take out of forward what "
            "TorchScript has no words for.",
        ) from error
    if not request.plain:
        try:
            scripted = torch.jit.trace(  # type: ignore[no-untyped-call]
                Flat(scripted, request.call), request.arguments, check_trace=False
            )
        except Exception as error:
            raise RungFailed.because(
                f"the compiled model does not take or return flat tensors: {brief(error)}",
                "Take and return tensors, in tuples.",
            ) from error
    return write_legacy(request, scripted, path, strategy="scripted", opset=symbolics.opset)
