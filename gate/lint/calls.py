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
from gate.lint.flags import FLAGS, flag
from gate.lint.numbers import numbers_from
from gate.lint.scope import Arguments, FunctionScope, Local, ShapeMethod, Super, TensorMethod
from gate.lint.source import python_function
from gate.lint.torch_calls import of_torch, shape_method, tensor_method
from gate.lint.value import NOTHING, Kind, StaticValue, of_object, python, tensor, unknown

_NUMERIC = ("numpy", "math", "cmath", "statistics")
_PLAIN = (type, types.FunctionType, types.BuiltinFunctionType)
_Answer = Callable[[ast.Call, Any, Arguments, FunctionScope], StaticValue]
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)


def call(
    node: ast.Call, function: StaticValue, arguments: Arguments, scope: FunctionScope
) -> StaticValue:
    """What the call returns."""
    known = function.known
    if known is NOTHING:
        return unknown()
    if isinstance(known, _PLAIN) and known in BUILTINS:
        return BUILTINS[known](node, arguments, scope)
    answer = next((answer for kind, answer in _BY_TYPE if isinstance(known, kind)), _function)
    return answer(node, known, arguments, scope)


def _function(
    node: ast.Call, known: Any, arguments: Arguments, scope: FunctionScope
) -> StaticValue:
    package = _home(python_function(known) or known).partition(".")[0]
    name = str(getattr(known, "__name__", ""))
    if name in FLAGS and package in ("torch", "torchvision"):
        return flag(name, scope)
    if package == "torch":
        return of_torch(node, known, arguments, scope)
    if package in _NUMERIC and known is not math.prod:
        return numbers_from(node, arguments, scope, by=f"{package}.{name}")
    if package in sys.stdlib_module_names:
        return unknown()
    if python_function(known) is None:
        called = python_function(vars(type(known)).get("__call__"))
        if called is None:
            scope.walk.unread(known, "it is compiled code, without Python source")
            return unknown()
        known = types.MethodType(called, known)
    return scope.walk.follow(known, arguments, scope)


def _local(
    _node: ast.Call, known: Local, arguments: Arguments, scope: FunctionScope
) -> StaticValue:
    return scope.walk.call_local(known, arguments)


def _module(
    _node: ast.Call, known: nn.Module, arguments: Arguments, scope: FunctionScope
) -> StaticValue:
    return scope.walk.call_module(known, arguments, scope)


def _class(_node: ast.Call, known: type, arguments: Arguments, scope: FunctionScope) -> StaticValue:
    return _super(arguments, scope) if known is super else _made(known, arguments)


def _super(arguments: Arguments, scope: FunctionScope) -> StaticValue:
    if arguments.positional:
        after = arguments.positional[0].known
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
