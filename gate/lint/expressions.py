"""What an expression is: evaluates it on `StaticValue`s, and tells of what it breaks on the way."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from torch import nn

from gate.lint import attributes, calls, indexing
from gate.lint.arithmetic import combine, compared, signed
from gate.lint.conditions import all_of, all_or_any, chosen, condition, decided, negated
from gate.lint.items import has_items, item, keyed, known_items, sequence, sliced
from gate.lint.rewritten import floor_division
from gate.lint.scope import Arguments, FunctionScope, Local
from gate.lint.value import (
    Kind,
    StaticValue,
    join,
    of_object,
    python,
    ranks_differ,
    tensor,
    unknown,
)


def evaluate(node: ast.expr, scope: FunctionScope) -> StaticValue:
    """The value of an expression. Never raises for valid syntax."""
    handler = _BY_TYPE.get(type(node))
    if handler is not None:
        return handler(node, scope)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            evaluate(child, scope)
    return python() if isinstance(node, ast.JoinedStr | ast.FormattedValue) else unknown()


def evaluate_test(node: ast.expr, scope: FunctionScope) -> StaticValue:
    """The value of an expression of which only the truth is asked: whoever asks tells of it."""
    if isinstance(node, ast.BoolOp):
        return all_or_any(node, _parts(node, scope, evaluate_test))
    return evaluate(node, scope)


def assign(target: ast.expr, value: StaticValue, scope: FunctionScope) -> None:
    """Bind names, unpack tuples, and look at what is written through an index."""
    if isinstance(target, ast.Name):
        scope.names[target.id] = value
    elif isinstance(target, ast.Starred):
        assign(target.value, unknown(), scope)
    elif isinstance(target, ast.Tuple | ast.List):
        for position, part in enumerate(target.elts):
            assign(part, item(value, position), scope)
    elif isinstance(target, ast.Subscript):
        indexed = evaluate(target.value, scope)
        index = indexing.IndexExpression.of(target.slice, lambda part: evaluate(part, scope))
        if indexed.tensor:
            indexing.write(target, indexed, index, (value, scope))
    elif isinstance(target, ast.Attribute):
        owner = evaluate(target.value, scope)
        if target.attr == "data" and owner.tensor:
            scope.tell("TRC006", target)
        elif isinstance(owner.object, nn.Module):
            scope.names[ast.unparse(target)] = value  # `self.last` is no other name


def _attribute(node: ast.Attribute, scope: FunctionScope) -> StaticValue:
    owner = evaluate(node.value, scope)
    if isinstance(owner.object, nn.Module) and ast.unparse(node) in scope.names:
        return scope.names[ast.unparse(node)]
    if not owner.tensor:
        return attributes.of_other(owner, node.attr, scope)
    if node.attr == "data":
        scope.tell("TRC006", node, level="warning" if owner.constant else None)
    return attributes.of_tensor(owner, node.attr)


def _subscript(node: ast.Subscript, scope: FunctionScope) -> StaticValue:
    owner = evaluate(node.value, scope)
    if owner.tensor:
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            scope.tell("TRC012", node, message="an input is a dict: the file takes its tensors by "
                       "position, in the order of the example's keys")  # fmt: skip
            return tensor()
        index = indexing.IndexExpression.of(node.slice, lambda part: evaluate(part, scope))
        return indexing.read(node, owner, index, scope)
    if isinstance(node.slice, ast.Slice):
        ends = (node.slice.lower, node.slice.upper, node.slice.step)
        return sliced(owner, [evaluate(end, scope).object if end else None for end in ends])
    key = evaluate(node.slice, scope)
    if key.tensor and not key.constant and has_items(owner):
        scope.tell("TRC001", node.slice, message="Python takes the item that the example asks for",
                   rewrite="stack the items and index the tensor, or use torch.where")  # fmt: skip
    return keyed(owner, key)


def _sequence(node: ast.Tuple | ast.List | ast.Set, scope: FunctionScope) -> StaticValue:
    values = [evaluate(part, scope) for part in node.elts]
    if any(isinstance(part, ast.Starred) for part in node.elts):
        tensors = all(value.kind in (Kind.TENSOR, Kind.TENSORS) for value in values)
        return StaticValue(Kind.TENSORS if tensors else Kind.UNKNOWN)
    return sequence(values, tuple if isinstance(node, ast.Tuple) else list)


def _dict(node: ast.Dict, scope: FunctionScope) -> StaticValue:
    for key in node.keys:
        if key is not None:
            evaluate(key, scope)
    values = [evaluate(value, scope) for value in node.values]
    return StaticValue(Kind.DICT, items=dict(enumerate(values)))


def _binary(node: ast.BinOp, scope: FunctionScope) -> StaticValue:
    sides = [evaluate(part, scope) for part in (node.left, node.right)]
    for part, value in zip((node.left, node.right), sides, strict=True):
        if value.truth:
            scope.tell("TRC008", part, message="Python's True or False of the example is computed "
                       "with", rewrite="use the mask itself, torch.logical_not, &, |")  # fmt: skip
    floor_division(node, sides, scope)
    return combine(node.op, *sides)


def _compare(node: ast.Compare, scope: FunctionScope) -> StaticValue:
    left, *others = (evaluate(part, scope) for part in (node.left, *node.comparators))
    found = []
    for operation, right in zip(node.ops, others, strict=True):
        found.append(compared(operation, left, right))
        left = right
    truths = [decided(value) for value in found]
    if len(found) > 1 and (False in truths or None not in truths):
        return of_object(False not in truths)
    return found[0] if len(found) == 1 else all_of(found)


def _boolean(node: ast.BoolOp, scope: FunctionScope) -> StaticValue:
    parts = _parts(node, scope, evaluate)
    chosen(node, parts, scope)
    return all_or_any(node, parts)


def _parts(
    node: ast.BoolOp, scope: FunctionScope, read: Callable[[ast.expr, FunctionScope], StaticValue]
) -> list[StaticValue]:
    """The parts up to the one that decides."""
    parts: list[StaticValue] = []
    for part in node.values:
        parts.append(read(part, scope))
        if decided(parts[-1]) is isinstance(node.op, ast.Or):
            break
    return parts


def _unary(node: ast.UnaryOp, scope: FunctionScope) -> StaticValue:
    if isinstance(node.op, ast.Not):
        return negated(evaluate_test(node.operand, scope))
    return signed(evaluate(node.operand, scope), minus=isinstance(node.op, ast.USub))


def _choice(node: ast.IfExp, scope: FunctionScope) -> StaticValue:
    test = evaluate_test(node.test, scope)
    truth = decided(test)
    if truth is not None:
        return evaluate(node.body if truth else node.orelse, scope)
    same = ast.dump(node.body) == ast.dump(node.orelse)
    changes = not same and not (test.flag and not scope.walk.reaches(node, scope))
    condition(test, node.test, scope, changes=changes)
    one, other = evaluate(node.body, scope), evaluate(node.orelse, scope)
    if test.tensor and ranks_differ(one, other):
        scope.tell("TRC015", node)
    return join([one, other])


def _call(node: ast.Call, scope: FunctionScope) -> StaticValue:
    function = evaluate(node.func, scope)
    positional, keywords, spread = [], {}, False
    for part in node.args:
        given = evaluate(part, scope)
        if isinstance(part, ast.Starred):
            parts = known_items(given)
            if parts and not spread:
                positional += parts
                continue
            spread = True
            given = item(given, None)
        positional.append(given)
    for keyword in node.keywords:
        given = evaluate(keyword.value, scope)
        if keyword.arg is None:
            spread = True
        else:
            keywords[keyword.arg] = given
    return calls.call(node, function, Arguments(tuple(positional), keywords, spread), scope)


def _comprehension(
    node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, scope: FunctionScope
) -> StaticValue:
    inner = FunctionScope(scope.code, scope.walk, scope.path, {}, scope.owner, scope,
                  depth=scope.depth)  # fmt: skip
    for part in node.generators:
        assign(part.target, iterate(part.iter, inner), inner)
        for test in part.ifs:
            condition(evaluate_test(test, inner), test, inner)
    if isinstance(node, ast.DictComp):
        evaluate(node.key, inner)
        evaluate(node.value, inner)
        return StaticValue(Kind.DICT)
    element = evaluate(node.elt, inner)
    kinds = {Kind.TENSOR: Kind.TENSORS, Kind.UNKNOWN: Kind.UNKNOWN}
    return StaticValue(kinds.get(element.kind, Kind.PYTHON))


def iterate(node: ast.expr, scope: FunctionScope) -> StaticValue:
    """What a loop over this expression gives in each turn; tells of loops over tensors."""
    value = evaluate(node, scope)
    if value.tensor and not value.constant:
        scope.tell("TRC008", node, message="a loop over a tensor has as many turns in the file as "
                   "the example had rows", rewrite="use operations on the whole tensor, or "
                   "strategy: scripted")  # fmt: skip
    elif value.loop:
        scope.tell("TRC016", node, message="the loop has as many turns in the file as the example's"
                   " size asked for: wrong where that axis is dynamic")  # fmt: skip
    return value.items[0] if value.loop and value.items else item(value, None)


def _named(node: ast.NamedExpr, scope: FunctionScope) -> StaticValue:
    value = evaluate(node.value, scope)
    assign(node.target, value, scope)
    return value


_BY_TYPE: dict[type[ast.expr], Callable[[Any, FunctionScope], StaticValue]] = {
    ast.Name: lambda node, scope: scope.look_up(node.id),
    ast.Constant: lambda node, _scope: StaticValue(Kind.PYTHON, object=node.value),
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    **dict.fromkeys((ast.Tuple, ast.List, ast.Set), _sequence),
    ast.Dict: _dict,
    ast.BinOp: _binary,
    ast.Compare: _compare,
    ast.BoolOp: _boolean,
    ast.UnaryOp: _unary,
    ast.IfExp: _choice,
    ast.Call: _call,
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp), _comprehension),
    ast.Lambda: lambda node, scope: StaticValue(Kind.PYTHON, object=Local(node, scope)),
    ast.NamedExpr: _named,
    ast.Starred: lambda node, scope: evaluate(node.value, scope),
}
