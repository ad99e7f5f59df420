"""Options and custom symbolics of the TorchScript exporter."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gate.errors import ExportError, ModelError
from gate.export.export_warnings import shorten_message
from gate.model.loading import import_user_module
from gate.records.export import ExportSettings

Function = Callable[..., Any]

Target = torch._ops.OpOverload


class CustomSymbolics:
    """The argument of the function that `export.custom_symbolics: package.module:register` names:

        def register(symbolics):
            symbolics.legacy("mine::hard_swish", symbolic_function)
            symbolics.dynamo(torch.ops.mine.hard_swish.default, onnxscript_function)

    `opset` is the one that the file is written in. `translations` is the custom translation table
    of `torch.onnx.export(dynamo=True)`.
    """

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.translations: dict[Target, Function] = {}
        self.symbolics: dict[str, Function] = {}

    def legacy(self, name: str, function: Function) -> None:
        """Export the operator `namespace::name` by `function(g, *inputs)` in the strategies traced,
        direct and scripted. Raises ExportError if torch has no operator of this name.
        """
        _require_callable(function, name)
        namespace, _, operator = name.partition("::") if isinstance(name, str) else ("", "", "")
        if not (namespace.isidentifier() and operator.isidentifier()):
            raise ExportError(
                f"not the name of an operator: {name!r}. Expected namespace::name, for example "
                "mine::hard_swish, without an overload."
            )
        if not hasattr(getattr(torch.ops, namespace), operator):
            raise ExportError(
                f"torch has no operator {name}. Check the spelling, and import the module that "
                "defines it before you register the function."
            )
        self.symbolics[name] = function

    def dynamo(self, target: Target, function: Function) -> None:
        """Export the operator `torch.ops.namespace.name.default` by the onnxscript function
        `function(*inputs)` in the strategy dynamo. Raises ExportError for any other target."""
        if not isinstance(target, Target):
            overloads = f"an operator, expected one overload of it: {target}.default"
            text = f"{target!r}, expected an operator such as torch.ops.mine.hard_swish.default"
            is_packet = isinstance(target, torch._ops.OpOverloadPacket)
            raise ExportError(f"dynamo() got {overloads if is_packet else text}.")
        _require_callable(function, str(target))
        self.translations[target] = function


@contextlib.contextmanager
def registered(spec: str | None, *, opset: int) -> Iterator[CustomSymbolics]:
    """Call `package.module:register`, and keep its registrations for the `with` block only.

    Yields the registered functions, none if `spec` is None. Restores the functions of torch and
    earlier registrations afterwards, also after an exception. Raises ExportError if the function
    does not exist, fails or registers nothing.
    """
    symbolics = CustomSymbolics(opset)
    if spec is not None:
        _call(_function(spec), symbolics, spec)
    with contextlib.ExitStack() as overrides:
        for name, function in symbolics.symbolics.items():
            overrides.enter_context(overriding(name, function, opset=opset))
        yield symbolics


@contextlib.contextmanager
def overriding(name: str, function: Function, *, opset: int) -> Iterator[None]:
    """Let the TorchScript-based exporter write the operator `name` by `function` at `opset`.

    `unregister_custom_op_symbolic` of torch leaves an empty entry, on which the next export fails
    with "min() arg is an empty sequence" instead of the operator's name, and drops earlier
    registrations. So this function saves and restores the entry.
    """
    from torch.onnx._internal.torchscript_exporter import registration

    entries = registration.registry._registry
    original = entries.get(name)
    if original is not None:
        entries[name] = copy.deepcopy(original)
    try:
        torch.onnx.register_custom_op_symbolic(name, function, opset)  # type: ignore[attr-defined]
        yield
    finally:
        entries.pop(name, None)
        if original is not None:
            entries[name] = original


def _function(spec: str) -> Function:
    module_name, colon, name = spec.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise ExportError(
            f"export.custom_symbolics is {spec!r}, expected package.module:function, for example "
            "mypackage.onnx:register."
        )
    try:
        module = import_user_module(module_name, purpose=f"export.custom_symbolics: {spec}")
    except ModelError as error:
        raise ExportError(str(error)) from error
    function = getattr(module, name, None)
    if not callable(function):
        problem = "is not callable" if hasattr(module, name) else "is not there"
        raise ExportError(
            f"export.custom_symbolics: {spec}: {name} {problem}, expected a function in "
            f"{module_name} that takes the registry: def {name}(symbolics)."
        )
    register: Function = function
    return register


def _call(function: Function, symbolics: CustomSymbolics, spec: str) -> None:
    try:
        function(symbolics)
    except ExportError as error:
        raise ExportError(f"export.custom_symbolics: {spec}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ExportError(
            f"export.custom_symbolics: {spec} raised {shorten_message(error)}. Expected a function "
            "that takes the registry and calls symbolics.legacy(…) or symbolics.dynamo(…)."
        ) from error
    if not (symbolics.symbolics or symbolics.translations):
        raise ExportError(
            f"export.custom_symbolics: {spec} registered nothing. Call symbolics.legacy(…) or "
            "symbolics.dynamo(…) in it, or leave the setting out."
        )


def _require_callable(function: object, name: str) -> None:
    if not callable(function):
        raise ExportError(
            f"the symbolic function of {name} is {function!r}, expected a function that returns "
            "ONNX values."
        )


# PyTorch calls all of them deprecated. A version that lacks one must not ignore it silently.
_VERSIONED_FIELDS = (
    "custom_opsets",
    "autograd_inlining",
    "export_modules_as_functions",
    "operator_export_type",
)


def check_exporter_settings(settings: ExportSettings, model: nn.Module) -> None:
    """Check the settings before the export. Raises ExportError for a switch that this version of
    PyTorch lacks, and for a class without an instance in `model`."""
    for field in _VERSIONED_FIELDS:
        default = ExportSettings.model_fields[field].default
        if getattr(settings, field) != default and field not in _parameters():
            raise ExportError(
                f"export.{field} is set, and the exporter of the installed PyTorch "
                f"{torch.__version__} does not support it. Remove the setting."
            )
    _function_classes(settings, model)


def exporter_keywords(settings: ExportSettings, model: nn.Module) -> dict[str, Any]:
    """Return the keywords for `torch.onnx.export(dynamo=False)` that this version accepts."""
    from torch.onnx import OperatorExportTypes

    keywords = {
        "custom_opsets": dict(settings.custom_opsets) or None,
        "autograd_inlining": settings.autograd_inlining,
        "export_modules_as_functions": _function_classes(settings, model),
        "operator_export_type": getattr(OperatorExportTypes, settings.operator_export_type),
    }
    return {name: value for name, value in keywords.items() if name in _parameters()}


def recorded_settings(settings: ExportSettings) -> dict[str, bool | str | None]:
    """Return the settings as a flat dictionary for the record."""
    opsets = ",".join(f"{domain}={v}" for domain, v in settings.custom_opsets.items())
    functions = settings.export_modules_as_functions
    return {
        "custom_opsets": opsets or None,
        "autograd_inlining": settings.autograd_inlining,
        "export_modules_as_functions": (
            functions if isinstance(functions, bool) else ",".join(functions)
        ),
        "operator_export_type": settings.operator_export_type,
    }


def _function_classes(settings: ExportSettings, model: nn.Module) -> bool | set[type[nn.Module]]:
    setting = settings.export_modules_as_functions
    if isinstance(setting, bool):
        return setting
    return {kind for name in setting for kind in _classes(name, model)}


def _classes(name: str, model: nn.Module) -> Iterator[type[nn.Module]]:
    """Return the classes of this name, with or without its module."""
    kinds = {type(module) for module in model.modules()}
    names = {kind: f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    matching = [kind for kind, full_name in names.items() if f".{full_name}".endswith(f".{name}")]
    if not matching:
        raise ExportError(
            f"export.export_modules_as_functions names {name}, and no module of the model is one. "
            f"It has: {', '.join(sorted(names.values()))}. Name one of them, or true for all."
        )
    yield from matching


def _parameters() -> frozenset[str]:
    return frozenset(inspect.signature(torch.onnx.export).parameters)
