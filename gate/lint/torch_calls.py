"""Calls to torch: its functions, the methods of tensors and shapes, what it gives modules."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gate.lint import operations
from gate.lint.numbers import tell_size
from gate.lint.rewritten import tell_rewritten
from gate.lint.scope import Arguments, FunctionScope, ShapeMethod, TensorMethod
from gate.lint.value import Kind, StaticValue, of_object, python, tensor, unknown

_READS = {
    "item": "TRC002",
    "tolist": "TRC003",
    "numpy": "TRC001",
    "__array__": "TRC001",
    "__float__": "TRC001",
    "__int__": "TRC001",
    "__index__": "TRC001",
    "__bool__": "TRC008",
    "__len__": "TRC005",
}
_DROPOUTS: dict[Any, int] = {
    functional.dropout: 2,
    functional.dropout1d: 2,
    functional.dropout2d: 2,
    functional.dropout3d: 2,
    functional.alpha_dropout: 2,
    functional.feature_alpha_dropout: 2,
    torch.dropout: 2,
}
"""To the position of `training`."""
_ASKS = ("is_", "are_", "get_", "has_", "set_", "_is_", "_has_", "_get_", "_log_")
_COMPUTES = (
    "torch._C",
    "torch.nn",
    "torch.functional",
    "torch._tensor",
    "torch._jit_internal",
    "torch.linalg",
    "torch.fft",
    "torch.special",
    "torch._linalg_utils",
    "torch._lowrank",
)
"""Modules of torch whose functions return tensors; the others may return anything."""
_OFF_BY_DEFAULT = (functional.alpha_dropout, functional.feature_alpha_dropout)


def of_torch(
    node: ast.Call, callee: Any, arguments: Arguments, scope: FunctionScope
) -> StaticValue:
    """What a function of torch returns."""
    name = callee.__name__
    owner = getattr(callee, "__self__", None)
    if isinstance(owner, nn.Module):
        return _of_module(owner, name)
    if callee in _DROPOUTS:
        _dropout(node, callee, arguments, scope)
    tell_rewritten(name, node, arguments, scope)
    if name == "tensor":
        first = arguments.get(0, "data")
        if first is not None and _from_tensors(first):
            scope.tell("TRC001", node, message="torch.tensor copies the example's numbers into the"
                       " file as a constant", rewrite="use the tensor itself, torch.stack for "
                       "several, x.clone() for a copy")  # fmt: skip
        sizes = list(_sizes(first)) if first is not None else []
        if sizes:
            tell_size(node, sizes, scope, rewrite="use torch.as_tensor, or the size as it is")
    if name == "is_nonzero":
        return tensor(mask=True)
    if name.startswith(_ASKS):
        return python()
    home = str(getattr(callee, "__module__", None) or "torch")
    computes = home == "torch" or home.startswith(_COMPUTES)
    return operations.operation(name, arguments) if computes else unknown()


def _of_module(owner: nn.Module, name: str) -> StaticValue:
    """What a method that torch gives every module returns."""
    if name in ("forward", "__call__"):
        return tensor()
    if name in ("values", "children", "modules"):
        return of_object(owner)  # to loop over
    if name in ("items", "named_children", "named_modules"):
        child = next(map(of_object, owner.children()), unknown())
        turn = StaticValue(Kind.UNKNOWN, items={0: python(), 1: child})
        return StaticValue(Kind.UNKNOWN, items={0: turn})
    return unknown()


def tensor_method(
    node: ast.Call, method: TensorMethod, arguments: Arguments, scope: FunctionScope
) -> StaticValue:
    """What a method of a tensor returns."""
    owner, name = method.tensor, method.name
    if name in _READS:
        if not owner.constant:
            scope.tell(_READS[name], node)
        return StaticValue(Kind.PYTHON, read=True)
    if name in ("size", "numel", "nelement"):
        return python() if owner.constant else _size(name, arguments)
    if name in ("index_put", "index_put_"):
        _index_put(node, arguments, scope)
    whole = arguments.after(owner)
    if not owner.constant:
        tell_rewritten(name, node, whole, scope)
    return operations.operation(name, whole)


def _size(name: str, arguments: Arguments) -> StaticValue:
    axis = arguments.get(0, "dim")
    if axis is None:
        return StaticValue(Kind.SHAPE if name == "size" else Kind.SIZE, axis=0)
    number = axis.object if axis is not None else None
    return StaticValue(Kind.SIZE, axis=number if isinstance(number, int) else None)


def _index_put(node: ast.Call, arguments: Arguments, scope: FunctionScope) -> None:
    indices = arguments.get(0, "indices")
    items = list(indices.items.values()) if indices is not None else []
    ranks = [item.rank.offset for item in items if item.rank and item.rank.base == 0]
    if items and items[0].object is None and any(rank > 1 for rank in ranks):
        scope.tell("TRC010", node)


def shape_method(
    node: ast.Call, method: ShapeMethod, _arguments: Arguments, scope: FunctionScope
) -> StaticValue:
    """What a method of a shape, or of one of its numbers, returns."""
    if method.name in ("numel", "item", "__int__", "__float__", "__index__"):
        tell_size(node, [method.shape], scope)
        return python()
    return unknown()


def _dropout(
    node: ast.Call, callee: Callable[..., Any], arguments: Arguments, scope: FunctionScope
) -> None:
    if arguments.spread:
        return
    given = arguments.get(_DROPOUTS[callee], "train" if callee is torch.dropout else "training")
    if given is None and callee in _OFF_BY_DEFAULT:
        return
    share = arguments.get(1, "p")
    if share is not None and share.object in (0, 0.0):
        return
    if given is None:
        scope.tell("TRC013", node)
    elif given.kind is Kind.PYTHON and given.object is True:
        scope.tell("TRC013", node, message="this drops in eval mode too")


def _from_tensors(value: StaticValue) -> bool:
    if value.tensor:
        return not value.constant
    return value.kind is Kind.TENSORS or any(map(_from_tensors, value.items.values()))


def _sizes(value: StaticValue) -> Iterator[StaticValue]:
    """The sizes in it, and in its items."""
    if value.kind in (Kind.SIZE, Kind.SHAPE):
        yield value
    else:
        for item in value.items.values():
            yield from _sizes(item)
