"""What Python's builtins make of tensors and shapes."""

from __future__ import annotations

import ast
import copy
import importlib
import typing
import warnings
from collections.abc import Callable
from typing import Any

import torch

from gate.lint.numbers import numbers_from, tell_size
from gate.lint.scope import Arguments, FunctionScope
from gate.lint.value import (
    NOTHING,
    Kind,
    StaticValue,
    common_axis,
    of_object,
    python,
    tensor,
    unknown,
)

_Call = Callable[[ast.Call, Arguments, FunctionScope], StaticValue]


def _number(node: ast.Call, arguments: Arguments, scope: FunctionScope) -> StaticValue:
    value = arguments.positional[0] if arguments.positional else python()
    if isinstance(value.object, int | float):
        return python()
    return numbers_from(node, arguments, scope, by=_name(node))


def _bool(_node: ast.Call, arguments: Arguments, _scope: FunctionScope) -> StaticValue:
    # The condition that it stands in tells of it, where it matters.
    value = arguments.positional[0] if arguments.positional else python()
    if value.tensor:
        return tensor(mask=True, truth=True) if not value.constant else python()
    return StaticValue(value.kind, flag=value.flag)


def _len(node: ast.Call, arguments: Arguments, scope: FunctionScope) -> StaticValue:
    value = arguments.positional[0] if arguments.positional else unknown()
    if value.tensor and not value.constant:
        scope.tell("TRC005", node)
        return python()
    if isinstance(value.object, list | tuple | dict | str | torch.nn.Module):
        return of_object(len(value.object))  # type: ignore[arg-type]
    return python()


def _range(node: ast.Call, arguments: Arguments, scope: FunctionScope) -> StaticValue:
    bounds = [value.object for value in arguments.positional]
    if any(value.tensor for value in arguments.positional):
        scope.tell("TRC008", node, message="the loop has as many turns in the file as the "
                   "example's number asked for")  # fmt: skip
        return StaticValue(Kind.PYTHON, read=True)
    if bounds and all(isinstance(one, int) for one in bounds):
        return of_object(range(*bounds))
    return StaticValue(Kind.PYTHON, loop=any(v.kind is Kind.SIZE for v in arguments.positional))


def _iterates(node: ast.Call, arguments: Arguments, scope: FunctionScope) -> StaticValue:
    """A builtin that goes through what it is given: as a loop does."""
    for value in arguments.positional:
        if value.tensor and not value.constant:
            scope.tell("TRC008", node, message=f"{_name(node)} loops over a tensor: the file has "
                       "as many turns as the example had rows", rewrite="use the operation on the "
                       "whole tensor: torch.sum, torch.any, torch.amax")  # fmt: skip
            return tensor() if _name(node) in ("sum", "min", "max") else StaticValue(Kind.TENSORS)
    return unknown()


def _list(node: ast.Call, arguments: Arguments, scope: FunctionScope) -> StaticValue:
    value = arguments.positional[0] if arguments.positional else StaticValue(Kind.PYTHON, object=[])
    if value.tensor:
        return _iterates(node, arguments, scope)
    return StaticValue(value.kind, object=value.object, axis=value.axis, items=value.items,
                 loop=value.loop)  # fmt: skip


def _extreme(node: ast.Call, arguments: Arguments, scope: FunctionScope) -> StaticValue:
    """`min` and `max` of sizes compare them, so the example decides."""
    sizes = [v for v in arguments.positional if v.kind in (Kind.SIZE, Kind.SHAPE)]
    if sizes:
        scope.tell("TRC016", node, message=f"{_name(node)} of sizes is decided by the example: "
                   "wrong where an axis is dynamic")  # fmt: skip
        return StaticValue(Kind.SIZE, axis=common_axis(sizes))
    several = len(arguments.positional) > 1
    if several and any(v.tensor and not v.constant for v in arguments.positional):
        scope.tell("TRC008", node, message=f"{_name(node)} of tensors is decided by the example",
                   rewrite="use torch.minimum or torch.maximum")  # fmt: skip
        return tensor()
    numbers = [v.object for v in arguments.positional]
    if several and all(isinstance(one, int | float) for one in numbers):
        return of_object(min(numbers) if _name(node) == "min" else max(numbers))
    return _iterates(node, arguments, scope)


def _round(node: ast.Call, arguments: Arguments, scope: FunctionScope) -> StaticValue:
    value = arguments.positional[0] if arguments.positional else python()
    if value.kind is Kind.SIZE:
        tell_size(node, [value], scope)
    return value if value.tensor else python()


def _enumerate(node: ast.Call, arguments: Arguments, scope: FunctionScope) -> StaticValue:
    turns = Arguments((python(), *arguments.positional[:1]))
    return _zip(node, turns, scope)


def _zip(node: ast.Call, arguments: Arguments, scope: FunctionScope) -> StaticValue:
    for value in arguments.positional:
        if value.tensor and not value.constant:
            _iterates(node, Arguments((value,)), scope)
    turn = StaticValue(Kind.UNKNOWN, items=dict(enumerate(map(_first_of, arguments.positional))))
    loop = any(value.loop for value in arguments.positional)
    return StaticValue(Kind.UNKNOWN, loop=loop, items={0: turn})


def _first_of(value: StaticValue) -> StaticValue:
    if value.kind in (Kind.TENSOR, Kind.TENSORS):
        return tensor()
    if isinstance(value.object, list | tuple) and value.object:
        return of_object(value.object[0])
    if isinstance(value.object, torch.nn.Module):
        return next(iter(map(of_object, value.object.children())), unknown())
    return python() if value.kind is Kind.PYTHON and not value.items else unknown()


def _isinstance(_node: ast.Call, arguments: Arguments, _scope: FunctionScope) -> StaticValue:
    if len(arguments.positional) != 2:
        return python()
    value, against = arguments.positional
    classes = against.object if isinstance(against.object, tuple) else (against.object,)
    if not all(isinstance(cls, type) for cls in classes):
        return python()
    if value.tensor:
        return of_object(any(issubclass(torch.Tensor, cls) for cls in classes))
    if value.kind is Kind.PYTHON and value.object is not NOTHING:
        return of_object(isinstance(value.object, classes))
    return python()


def _hasattr(_node: ast.Call, arguments: Arguments, _scope: FunctionScope) -> StaticValue:
    if len(arguments.positional) == 2:
        value, name = arguments.positional
        if isinstance(value.object, torch.nn.Module) and isinstance(name.object, str):
            return of_object(hasattr(value.object, name.object))
    return python()


def _getattr(_node: ast.Call, _arguments: Arguments, _scope: FunctionScope) -> StaticValue:
    return unknown()


def _same(_node: ast.Call, arguments: Arguments, _scope: FunctionScope) -> StaticValue:
    return arguments.positional[-1] if arguments.positional else unknown()


def _nothing(_node: ast.Call, _arguments: Arguments, _scope: FunctionScope) -> StaticValue:
    return StaticValue(Kind.PYTHON, object=None)


def _name(node: ast.Call) -> str:
    return ast.unparse(node.func)


BUILTINS: dict[Any, _Call] = {
    int: _number,
    float: _number,
    complex: _number,
    bool: _bool,
    len: _len,
    range: _range,
    list: _list,
    tuple: _list,
    reversed: _list,
    iter: _list,
    sorted: _iterates,
    set: _iterates,
    sum: _iterates,
    any: _iterates,
    all: _iterates,
    min: _extreme,
    max: _extreme,
    round: _round,
    enumerate: _enumerate,
    zip: _zip,
    isinstance: _isinstance,
    hasattr: _hasattr,
    getattr: _getattr,
    print: _nothing,
    warnings.warn: _nothing,
    typing.cast: _same,
    copy.copy: _same,
    importlib.import_module: _getattr,
}
"""The function to what it returns."""
