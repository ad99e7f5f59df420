"""The strategy `dynamo`: `torch.export`, then the exporter that is built on it.

It writes opset 18 and above; what is asked for below is converted afterwards, and stays 18, without
an error, where that fails. So whoever asks for a number reads it back from the file.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from gate.export.axes import axes_text
from gate.export.custom import Symbolics
from gate.export.refusals.operators import refused
from gate.export.refusals.refusal import ExportRefusal
from gate.export.request import Request
from gate.export.strategies.exporter import ExporterOptions, RungFailed, settings_of
from gate.export.strategies.naming import name_axes
from gate.package import extras


def write_dynamo(request: Request, path: Path, *, symbolics: Symbolics) -> ExporterOptions:
    """Export the module to `path`, weights of more than 2 GB beside it; say what was set.

    Raises RungFailed, and OSError where the file can't be written.
    """
    if not extras.is_installed("onnxscript"):
        needs, _, install = extras.remedy("export").partition(": ")
        raise RungFailed.because(f"the strategy dynamo {needs}", f"{install}.")
    plain: ExporterOptions = {
        "dynamo": True,
        "opset_version": symbolics.opset,
        "export_params": request.settings.export_params,
        "optimize": request.settings.do_constant_folding,
        "keep_initializers_as_inputs": request.settings.keep_initializers_as_inputs,
        "external_data": request.large,
        "verbose": request.settings.verbose,
    }
    axes = tuple(request.axes.get(name) for name in request.input_names)
    keywords: dict[str, Any] = plain | {
        "input_names": list(request.input_names),
        "output_names": list(request.output_names),
        # A flat forward has one parameter, `*tensors`, for all of them.
        "dynamic_shapes": axes if request.plain else (axes,),
        "custom_translation_table": symbolics.translations or None,
    }
    with request.flat() as module:
        try:
            torch.onnx.export(module, request.arguments, str(path), **keywords)
        except OSError:
            raise
        except Exception as error:
            raise RungFailed.of(
                error,
                strategy="dynamo",
                opset=symbolics.opset,
                explain=partial(_explain, error, request, keywords),
            ) from error
    name_axes(path, request.declared)
    inputs = {name: request.axes[name] for name in request.input_names if name in request.axes}
    shapes = axes_text({**inputs, **request.declared})
    return settings_of(request, plain | {"dynamic_shapes": shapes})


def _explain(error: Exception, request: Request, keywords: dict[str, Any]) -> ExportRefusal:
    with request.flat() as module:
        return refused(
            error, module, request.arguments, strategy="dynamo", exporter_keywords=keywords
        )
