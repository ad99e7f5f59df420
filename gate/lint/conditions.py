"""Conditions: which are decided before the model runs, and which a trace decides for ever."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import torch
from torch import nn

from gate.lint.scope import FunctionScope
from gate.lint.value import NOTHING, Kind, Rank, StaticValue, of_object, tensor

_PLAIN = (bool, int, float, str, list, tuple, dict, set, frozenset, type(None), nn.Module)
_CHANGES = (ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Yield)


def decided(value: StaticValue) -> bool | None:
    """The truth of a value that is the same for every input; None: it is not known."""
    thing = value.object
    if thing is NOTHING or value.flag:
        return None
    if isinstance(thing, torch.Tensor):
        elements = value.elements
        return bool(elements) if elements is not None and elements.numel() == 1 else None
    if isinstance(thing, _PLAIN):
        return bool(thing)
    return True if callable(thing) else None


def condition(
    value: StaticValue,
    node: ast.expr,
    scope: FunctionScope,
    *,
    changes: bool = True,
    guard: bool = False,
) -> None:
    """Tell of a condition that is not the same for every input.

    `changes`: the result depends on it. `guard`: it only raises or warns.
    """
    if value.flag:
        if changes and not guard:
            scope.tell(
                "TRC014",
                node,
                level="warning" if value.flag == "is_in_onnx_export" else "error",
                message=f"what {value.flag}() guards changes the result: the file does not "
                "compute what the model computes",
            )
    elif value.tensor and not value.constant:
        if guard:
            scope.tell("TRC008", node, level="note",
                       message="the file does not check this: it computes on")  # fmt: skip
        elif changes:
            scope.tell("TRC008", node)
    elif value.kind in (Kind.SIZE, Kind.SHAPE) and changes and not guard:
        scope.tell("TRC016", node)


def all_or_any(node: ast.BoolOp, parts: Sequence[StaticValue]) -> StaticValue:
    """The condition `and` or `or` makes of its parts, up to the one that decides."""
    stops = isinstance(node.op, ast.Or)
    found = [part for part in parts if decided(part) is None]
    if found and decided(parts[-1]) is stops:
        found.append(parts[-1])
    return all_of(found) if found else of_object(decided(parts[-1]))


def all_of(values: Sequence[StaticValue]) -> StaticValue:
    """A condition of several parts: what the most dangerous part is."""
    for part in values:
        if part.flag:
            return part
    for kind in (Kind.TENSOR, Kind.SIZE, Kind.UNKNOWN):
        for part in values:
            if part.kind is kind:
                return part
    return StaticValue(Kind.PYTHON, read=any(value.read for value in values))


def negated(value: StaticValue) -> StaticValue:
    """The value of `not x`."""
    truth = decided(value)
    if truth is not None:
        return of_object(not truth)
    return tensor(mask=True, truth=not value.constant) if value.tensor else value


def chosen(node: ast.BoolOp, parts: Sequence[StaticValue], scope: FunctionScope) -> None:
    """Tell of `and`, `or` that choose a value by a tensor. Where all are truths, nothing is chosen:
    the condition that they stand in later tells of them."""
    on_tensor = any(part.tensor and not part.constant for part in parts[:-1])
    if on_tensor and any(map(_no_truth, parts)):
        scope.tell("TRC008", node)


def _no_truth(value: StaticValue) -> bool:
    if value.tensor:
        return not value.mask and value.rank not in (None, Rank(0, 0))
    number = isinstance(value.object, int | float | str) and not isinstance(value.object, bool)
    return number or value.kind is Kind.TENSORS


def only_guards(body: Sequence[ast.stmt]) -> bool:
    """True if these statements raise, warn or log, and change nothing that is returned."""
    return not any(_changes(node) for statement in body for node in ast.walk(statement))


def _changes(node: ast.AST) -> bool:
    if isinstance(node, _CHANGES):
        return True
    in_place = (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.endswith("_")
        and not node.func.attr.endswith("__")
    )
    return in_place or isinstance(node, ast.Continue | ast.Break)
