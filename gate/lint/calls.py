"""Calls: to tensors, torch, NumPy and builtins, and on into the user's own functions."""

from __future__ import annotations

import ast
import collections
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gate.lint import operations
from gate.lint.builtin_calls import BUILTINS
from gate.lint.numbers import numbers_from
from gate.lint.scope import Arguments, FunctionScope, Local, ShapeMethod, Super, TensorMethod
from gate.lint.source import python_function
from gate.lint.torch_calls import of_torch, shape_method, tensor_method
from gate.lint.value import NOTHING, Kind, StaticValue, of_object, python, tensor, unknown

_NUMERIC = ("numpy", "math", "cmath", "statistics")
_PLAIN = (type, types.FunctionType, types.BuiltinFunctionType)
_Answer = Callable[[ast.Call, Any, Arguments, FunctionScope], StaticValue]
_BY_STRATEGY: dict[str, tuple[str, ...]] = {
    "traced": ("is_tracing", "_is_tracing", "_get_tracing_state", "is_in_onnx_export"),
    "scripted": ("is_scripting", "is_in_onnx_export"),
    "dynamo": ("is_compiling", "is_dynamo_compiling", "is_exporting", "is_in_onnx_export"),
}
_FLAGS = frozenset(name for names in _BY_STRATEGY.values() for name in names)
"""Functions of torch and torchvision that tell whether the model is being exported."""
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)


def call(
    node: ast.Call, function: StaticValue, arguments: Arguments, scope: FunctionScope
) -> StaticValue:
    """What the call returns."""
    callee = function.object
    if callee is NOTHING:
        return unknown()
    if isinstance(callee, _PLAIN) and callee in BUILTINS:
        return BUILTINS[callee](node, arguments, scope)
    answer = next((answer for kind, answer in _BY_TYPE if isinstance(callee, kind)), _function)
    return answer(node, callee, arguments, scope)


def _function(
    node: ast.Call, callee: Any, arguments: Arguments, scope: FunctionScope
) -> StaticValue:
    package = _home(python_function(callee) or callee).partition(".")[0]
    name = str(getattr(callee, "__name__", ""))
    if name in _FLAGS and package in ("torch", "torchvision"):
        return _flag(name, scope)
    if package == "torch":
        return of_torch(node, callee, arguments, scope)
    if package in _NUMERIC and callee is not math.prod:
        return numbers_from(node, arguments, scope, by=f"{package}.{name}")
    if package in sys.stdlib_module_names:
        return unknown()
    if python_function(callee) is None:
        called = python_function(vars(type(callee)).get("__call__"))
        if called is None:
            scope.walk.unread(callee, "it is compiled code, without Python source")
            return unknown()
        callee = types.MethodType(called, callee)
    return scope.walk.follow(callee, arguments, scope)


def _local(
    _node: ast.Call, callee: Local, arguments: Arguments, scope: FunctionScope
) -> StaticValue:
    return scope.walk.call_local(callee, arguments)


def _module(
    _node: ast.Call, callee: nn.Module, arguments: Arguments, scope: FunctionScope
) -> StaticValue:
    return scope.walk.call_module(callee, arguments, scope)


def _class(
    _node: ast.Call, callee: type, arguments: Arguments, scope: FunctionScope
) -> StaticValue:
    return _super(arguments, scope) if callee is super else _made(callee, arguments)


def _super(arguments: Arguments, scope: FunctionScope) -> StaticValue:
    if arguments.positional:
        after = arguments.positional[0].object
        return of_object(Super(scope.owner, after)) if isinstance(after, type) else unknown()
    function = scope.code.function
    for cls in type(scope.owner).__mro__:
        if python_function(vars(cls).get(function.__name__)) is function:
            return of_object(Super(scope.owner, cls))
    return unknown()


def _made(cls: type, arguments: Arguments) -> StaticValue:
    if issubclass(cls, _DICTS):
        return StaticValue(Kind.DICT)
    if issubclass(cls, torch.Size):
        return StaticValue(Kind.SHAPE)
    if issubclass(cls, torch.Tensor):
        return operations.operation(cls.__name__, arguments)
    if cls.__module__.split(".")[0] == "torch":
        return tensor() if issubclass(cls, torch.autograd.Function) else python()
    return unknown()


def _home(thing: Any) -> str:
    """The module that a function belongs to, `torch` for torch's builtins."""
    name = str(getattr(thing, "__name__", ""))
    home = getattr(thing, "__module__", None)
    if home is None:
        if getattr(torch, name, None) is thing:
            return "torch"
        home = getattr(getattr(thing, "__self__", None), "__name__", None)
        home = home or type(getattr(thing, "__self__", None)).__module__
    if isinstance(thing, torch.jit.ScriptFunction):
        return "torch"
    return str(home)


_BY_TYPE: tuple[tuple[type, _Answer], ...] = (
    (TensorMethod, tensor_method),
    (ShapeMethod, shape_method),
    (Local, _local),
    (nn.Module, _module),
    (type, _class),
)


def _flag(name: str, scope: FunctionScope) -> StaticValue:
    """What the function of this name returns: False, or what only an export makes true."""
    strategy = "traced" if scope.walk.strategy == "direct" else scope.walk.strategy
    if name in _BY_STRATEGY[strategy]:
        return StaticValue(Kind.PYTHON, flag=name)
    return of_object(False)
