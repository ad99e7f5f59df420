"""Operators and comparisons of values, computed where both sides are known."""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Callable
from typing import Any

from gate.lint.operations import FEW, wider
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

_NUMBERS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_SIMPLE = (bool, int, float, str, type(None))


def combine(operation: ast.operator, left: StaticValue, right: StaticValue) -> StaticValue:
    """The value of an arithmetic operation."""
    if left.tensor or right.tensor:
        return _of_tensors(operation, left, right)
    kinds = {left.kind, right.kind}
    for kind in (Kind.SHAPE, Kind.SIZE):
        if kind in kinds:
            sizes = [value for value in (left, right) if value.kind is kind]
            return StaticValue(kind, axis=common_axis(sizes))
    if Kind.TENSORS in kinds:
        return StaticValue(Kind.TENSORS if kinds <= {Kind.TENSORS, Kind.PYTHON} else Kind.UNKNOWN)
    if kinds == {Kind.PYTHON}:
        return StaticValue(Kind.PYTHON, object=_computed(operation, left, right),
                     read=left.read or right.read)  # fmt: skip
    return unknown()


def _of_tensors(operation: ast.operator, left: StaticValue, right: StaticValue) -> StaticValue:
    result = _computed(operation, left, right)
    if result is not NOTHING:
        return of_object(result)
    tensors = [value for value in (left, right) if value.tensor]
    minus = isinstance(operation, ast.Sub)
    others = all(value.tensor or value.kind is Kind.PYTHON for value in (left, right))
    return tensor(
        wider(left, right),
        unit=all(value.unit for value in tensors),
        mask=all(value.mask for value in tensors),
        fixed=others and all(value.constant for value in tensors),
        lowered=minus or any(value.lowered for value in tensors),
    )


def _computed(operation: ast.AST, left: StaticValue, right: StaticValue) -> Any:
    """The result, where both sides are known and small."""
    compute = _NUMBERS.get(type(operation))
    small = [isinstance(v.object, int | float) or _few(v) for v in (left, right)]
    texts = isinstance(operation, ast.cmpop) and all(
        isinstance(v.object, (*_SIMPLE, tuple)) for v in (left, right)
    )
    if compute is None or not (all(small) or texts):
        return NOTHING
    try:
        return compute(left.object, right.object)
    except Exception:
        return NOTHING


def signed(value: StaticValue, *, minus: bool) -> StaticValue:
    """The value of `-x`, else of `+x` and `~x`."""
    if minus and isinstance(value.object, int | float):
        return of_object(-value.object)
    if minus and value.elements is not None:
        return of_object(-value.elements)
    if value.tensor:
        return tensor(value.rank, unit=value.unit, mask=value.mask, lowered=minus,
                      fixed=value.constant)  # fmt: skip
    return StaticValue(value.kind, axis=value.axis) if value.kind is Kind.SIZE else python()


def compared(operation: ast.cmpop, left: StaticValue, right: StaticValue) -> StaticValue:
    """The value of a comparison."""
    if isinstance(operation, ast.Is | ast.IsNot | ast.In | ast.NotIn):
        relation = _is if isinstance(operation, ast.Is | ast.IsNot) else _in
        truth = relation(left, right)
        positive = isinstance(operation, ast.Is | ast.In)
        return python() if truth is None else of_object(truth is positive)
    if left.tensor or right.tensor:
        return tensor(wider(left, right), mask=True)
    kinds = {left.kind, right.kind}
    if Kind.SIZE in kinds or Kind.SHAPE in kinds:
        return StaticValue(Kind.SIZE)
    if kinds != {Kind.PYTHON}:
        return unknown()
    return StaticValue(
        Kind.PYTHON, object=_computed(operation, left, right), read=left.read or right.read
    )


def _few(value: StaticValue) -> bool:
    return value.elements is not None and value.elements.numel() <= FEW


def _in(left: StaticValue, right: StaticValue) -> bool | None:
    if isinstance(left.object, _SIMPLE) and isinstance(right.object, list | tuple | dict | str):
        with contextlib.suppress(TypeError):
            return left.object in right.object
    return None


def _is(left: StaticValue, right: StaticValue) -> bool | None:
    if left.object is not NOTHING and right.object is not NOTHING:
        return left.object is right.object
    for one, other in ((left, right), (right, left)):
        if one.object is None and other.kind not in (Kind.PYTHON, Kind.UNKNOWN):
            return False
    return None
