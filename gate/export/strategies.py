"""The strategies traced, direct, scripted and dynamo."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from gate import installation
from gate.errors import ExportError
from gate.export.export_warnings import shorten_message
from gate.export.failures import ExportFailure, explain_error, opset_for_all
from gate.export.request import Axes, ExportRequest, axes_text
from gate.export.torchscript_settings import CustomSymbolics, exporter_keywords, recorded_settings
from gate.model.forward_signature import PositionalModel
from gate.onnx_file.reading import subgraphs
from gate.records.export import Strategy

ExporterOptions = dict[str, bool | int | float | str | None]
"""The settings of an exporter, as a flat dictionary for the record."""

Writer = Callable[..., ExporterOptions]
"""Writes a request to a path in the opset of `symbolics`. Raises StrategyFailed, and OSError if the
file can't be written."""


class StrategyFailed(Exception):
    """Raised when a strategy wrote no file or a wrong one. Another strategy may work."""

    def __init__(
        self,
        failure: ExportFailure,
        *,
        since: int | None = None,
        explain: Callable[[], ExportFailure] | None = None,
    ) -> None:
        """`since`: the lowest opset that works, if known. `explain` finds more details at the cost
        of several exports."""
        super().__init__(failure.cause)
        self.failure = failure
        self.since = since
        self.explain = explain

    @classmethod
    def because(cls, code: str, *, since: int | None = None, **params: Any) -> StrategyFailed:
        """Create a failure that the gate found itself, from a code of `FAILURES`."""
        return cls(ExportFailure.from_code(code, **params), since=since)

    @classmethod
    def from_error(
        cls,
        error: Exception,
        *,
        strategy: str,
        opset: int,
        explain: Callable[[], ExportFailure] | None = None,
    ) -> StrategyFailed:
        """Return the failure for what an exporter raised."""
        failure = ExportFailure.from_error(error, strategy=strategy, opset=opset)
        since = opset_for_all(failure.operators)
        return cls(failure, since=since, explain=explain if failure.operators else None)


def export_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy on the CPU without gradients. Raises ExportError if that fails."""
    try:
        with torch.no_grad():  # else copies of TorchScript parameters are not leaf tensors
            copied = copy.deepcopy(model).cpu()
        for parameter in copied.parameters():  # one by one: a ScriptModule refuses requires_grad_()
            parameter.requires_grad_(False)
        return copied
    except Exception as error:
        raise ExportError(
            f"the model can't be copied: {shorten_message(error)}. The export works on a copy, so "
            "that it can't change the model: remove what can't be copied (locks, open files, "
            "tensors that were computed)."
        ) from error


@contextlib.contextmanager
def neutral(model: nn.Module) -> Iterator[None]:
    """Set eval mode, disable gradients and the fast path of attention; restore all switches after.

    The fused attention of torch's fast path can't be exported. The ordinary operators compute the
    same.
    """
    from torch.onnx import (  # type: ignore[attr-defined]  # deprecated, not in __all__
        TrainingMode,
        select_model_mode_for_export,
    )

    fused = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with select_model_mode_for_export(model, TrainingMode.EVAL):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


def settings_of(request: ExportRequest, keywords: dict[str, Any]) -> ExporterOptions:
    """Return the settings that an exporter received, including the common ones."""
    names = {"input_names": request.input_names, "output_names": request.output_names}
    flat: ExporterOptions = {**keywords, **{key: ",".join(value) for key, value in names.items()}}
    return {**flat, "fused_attention": False, "grad": False}


_TEMPORARY = "parity_gate_value_"
"""Prefix of temporary names for outputs whose names are numbers, which torch's exporter refuses.
Detector backbones return `{"0": …, "1": …}`."""


def temporary_names(names: Sequence[str]) -> list[str]:
    """Return the names with a temporary name for each number."""
    return [f"{_TEMPORARY}{name}" if name.isdecimal() else name for name in names]


def rename(path: Path, names: Sequence[str]) -> None:
    """Replace the temporary names of `names` in the file `path`. Raises OSError.

    Inner values that the exporter gave one of these names are renamed.
    """
    numeric = [name for name in names if name.isdecimal()]
    if not numeric:
        return
    new = {f"{_TEMPORARY}{name}": name for name in numeric}
    new |= {name: f"inner_{name}" for name in numeric}
    model = onnx.ModelProto.FromString(path.read_bytes())
    _rename(model.graph, new)
    path.write_bytes(model.SerializeToString(deterministic=True))


def rename_outputs(path: Path, names: Sequence[str]) -> None:
    """Rename the outputs of the file `path` by position. Raises OSError.

    The exporter loses the name of an output that a function of the file computes. A wrong number of
    outputs is left to the verification of the file.
    """
    model = onnx.ModelProto.FromString(path.read_bytes())
    pairs = zip((value.name for value in model.graph.output), names, strict=False)
    inputs = {value.name for value in model.graph.input}
    new = {old: name for old, name in pairs if old != name and old not in inputs}
    if not new:
        return
    displaced = {name: f"inner_{name}" for name in new.values() if name not in new}
    _rename(model.graph, displaced | new)
    path.write_bytes(model.SerializeToString(deterministic=True))


def name_axes(path: Path, axes: Axes) -> None:
    """Label these axes of the outputs of the file `path` if they have no fixed size.

    The dynamo exporter derives expressions such as `2*height` and accepts no names for outputs.
    Raises OSError.
    """
    if not axes:
        return
    model = onnx.load(path, load_external_data=False)
    for value in model.graph.output:
        shape = value.type.tensor_type.shape.dim
        for axis, label in axes.get(value.name, {}).items():
            if axis < len(shape) and not shape[axis].HasField("dim_value"):
                shape[axis].dim_param = label
    path.write_bytes(model.SerializeToString(deterministic=True))


def _rename(graph: onnx.GraphProto, new: dict[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = new.get(value.name, value.name)
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new.get(name, name) for name in names]
        for inner in subgraphs(node):
            _rename(inner, new)


def write_dynamo(
    request: ExportRequest, path: Path, *, symbolics: CustomSymbolics
) -> ExporterOptions:
    """Export the module by `torch.export` to `path`, and weights of more than 2 GB to a file in the
    same folder. Return the settings.

    PyTorch writes opset 18 and above and converts the file to lower opsets. If that fails, the file
    stays at 18 without an error, so the opset has to be read from the file.

    Raises StrategyFailed, and OSError if the file can't be written.
    """
    if not installation.is_installed("onnxscript"):
        needs, _, install = installation.remedy("export").partition(": ")
        raise StrategyFailed.because("not_installed", needs=needs, install=install)
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
        _export(request, module, path, keywords, strategy="dynamo")
    name_axes(path, request.declared)
    inputs = {name: request.axes[name] for name in request.input_names if name in request.axes}
    shapes = axes_text({**inputs, **request.declared})
    return settings_of(request, plain | {"dynamic_shapes": shapes})


def _export(
    request: ExportRequest,
    module: nn.Module,
    path: Path,
    keywords: dict[str, Any],
    *,
    strategy: Strategy,
) -> None:
    """Call the exporter of PyTorch. Raises StrategyFailed, and OSError if the file can't be
    written."""
    try:
        torch.onnx.export(module, request.arguments, str(path), **keywords)
    except OSError:
        raise
    except Exception as error:
        separate = None if module is request.model else module
        explain = partial(
            _explain, error, request, strategy=strategy, keywords=keywords, module=separate
        )
        opset = keywords["opset_version"]
        raise StrategyFailed.from_error(
            error, strategy=strategy, opset=opset, explain=explain
        ) from error


def _explain(
    error: Exception,
    request: ExportRequest,
    *,
    strategy: Strategy,
    keywords: dict[str, Any],
    module: nn.Module | None = None,
) -> ExportFailure:
    """Explain an error after the export. `module`: the exported module. None: the model itself,
    whose flat forward has been removed by then."""
    with request.flat() if module is None else contextlib.nullcontext(module) as exported:
        return explain_error(
            error, exported, request.arguments, strategy=strategy, exporter_keywords=keywords
        )


def _script_failure(request: ExportRequest, code: str, error: Exception) -> StrategyFailed:
    """Explain why TorchScript refuses a model, instead of torch's messages about internals. Uses
    `code` if no reason is recognized."""
    for name in request.call.keyword_only:
        return StrategyFailed.because("keyword_only", name=name)
    for name, hint in request.call.structured.items():
        if hint is None:
            return StrategyFailed.because("unannotated", name=name)
    with contextlib.suppress(Exception):  # then there is another reason
        mixed = _mixed_values(
            request.call(request.model, request.arguments), "what forward returns"
        )
        if mixed is not None:
            return StrategyFailed.because("mixed_values", **mixed)
    return StrategyFailed.because(code, brief=shorten_message(error))


def _mixed_values(value: Any, location: str) -> dict[str, Any] | None:
    """Find the first dict or list with values of several types, which TorchScript lacks."""
    if isinstance(value, Mapping):
        items, kind = {f"{location}[{key!r}]": item for key, item in value.items()}, "dict"
    elif isinstance(value, list | tuple):
        items = {f"{location}[{number}]": item for number, item in enumerate(value)}
        kind = "list" if isinstance(value, list) else ""
    else:
        return None
    kinds = sorted({_kind(item) for item in items.values()})
    if kind and len(kinds) > 1:
        return {"place": location, "kind": kind, "types": ", ".join(kinds)}
    nested = (_mixed_values(item, location) for location, item in items.items())
    return next(filter(None, nested), None)


def _kind(value: Any) -> str:
    if isinstance(value, tuple):  # described by its items in order
        return f"tuple of {', '.join(_kind(item) for item in value)}"
    return "dict" if isinstance(value, Mapping) else type(value).__name__


_CHECK_TRACE = True

_STRICT_TRACE = True


def write_traced(
    request: ExportRequest, path: Path, *, symbolics: CustomSymbolics
) -> ExporterOptions:
    """Trace the model on the batch, export the trace to `path`; return the settings.

    Raises StrategyFailed, and OSError where the file can't be written.
    """
    with request.flat() as module:
        trace = _trace(module, request)
    set_ = _write(request, trace, path, strategy="traced", opset=symbolics.opset)
    return {**set_, "check_trace": _CHECK_TRACE, "strict_trace": _STRICT_TRACE}


def _trace(module: nn.Module, request: ExportRequest) -> torch.jit.ScriptModule:
    try:
        trace: torch.jit.ScriptModule = torch.jit.trace(  # type: ignore[no-untyped-call]
            module, request.arguments, check_trace=_CHECK_TRACE, strict=_STRICT_TRACE
        )
    except torch.jit.TracingCheckError as error:  # type: ignore[attr-defined]
        raise StrategyFailed.because("unequal_traces") from error
    except Exception as error:
        raise StrategyFailed.because("trace_failed", brief=shorten_message(error)) from error
    return trace


def write_direct(
    request: ExportRequest, path: Path, *, symbolics: CustomSymbolics
) -> ExporterOptions:
    """Export the module to `path` by the exporter's own trace; return the settings.

    This resolves some fused operators (multi-head attention, `swapaxes`) that the exporter can't
    write from a traced module. Raises StrategyFailed, and OSError if the file can't be written.
    """
    with request.flat() as module:
        return _write(request, module, path, strategy="direct", opset=symbolics.opset)


def write_scripted(
    request: ExportRequest, path: Path, *, symbolics: CustomSymbolics
) -> ExporterOptions:
    """Compile the model by `torch.jit.script` and export it to `path`; return the settings.

    Keeps `if`, `for` and `while` on data. A trace around the compiled model flattens structured
    inputs and outputs and optional tensors. Raises StrategyFailed, and OSError if the file can't be
    written.
    """
    try:
        scripted = torch.jit.script(request.model)
    except Exception as error:
        raise _script_failure(request, "script_failed", error) from error
    if not request.plain or request.call.takes_none:
        try:
            scripted = torch.jit.trace(  # type: ignore[no-untyped-call]
                PositionalModel(scripted, request.call), request.arguments, check_trace=False
            )
        except Exception as error:
            raise _script_failure(request, "not_flat", error) from error
    return _write(request, scripted, path, strategy="scripted", opset=symbolics.opset)


def _write(
    request: ExportRequest, module: nn.Module, path: Path, *, strategy: Strategy, opset: int
) -> ExporterOptions:
    """Export `module`, which takes and returns flat tensors, to `path`; return the settings.

    `strategy`: the strategy that created the module. Raises StrategyFailed, and OSError if the file
    can't be written.
    """
    from torch.onnx import TrainingMode

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
        **exporter_keywords(request.settings, request.model),
        "input_names": temporary_names(request.input_names),
        "output_names": temporary_names(request.output_names),
        "dynamic_axes": dict(
            zip(temporary_names(tuple(request.axes)), request.axes.values(), strict=True)
        ),
    }
    _export(request, module, path, keywords, strategy=strategy)
    if request.settings.export_modules_as_functions:
        rename_outputs(path, temporary_names(request.output_names))
    rename(path, (*request.input_names, *request.output_names))
    options: ExporterOptions = {
        "training": "eval",
        **recorded_settings(request.settings),
        "dynamic_axes": axes_text(request.axes),
    }
    return settings_of(request, plain | options)
