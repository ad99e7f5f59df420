"""The flow through the statements of a function: names are bound, branches are joined."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gate.lint.arithmetic import combine
from gate.lint.conditions import condition, decided, only_guards
from gate.lint.expressions import assign, evaluate, evaluate_test, iterate
from gate.lint.rewritten import floor_division
from gate.lint.scope import FunctionScope, Local
from gate.lint.value import Kind, StaticValue, join, of_object, ranks_differ, unknown

Names = dict[str, StaticValue]


def run(body: Sequence[ast.stmt], scope: FunctionScope) -> bool:
    """Go through statements. True if the end is never reached (return, raise, continue, break)."""
    for statement in body:
        handler = _BY_TYPE.get(type(statement))
        if handler is not None and handler(statement, scope):
            return True
    return False


def _expression(node: ast.Expr, scope: FunctionScope) -> None:
    evaluate(node.value, scope)


def _assign(node: ast.Assign, scope: FunctionScope) -> None:
    value = evaluate(node.value, scope)
    for target in node.targets:
        assign(target, value, scope)


def _annotated(node: ast.AnnAssign, scope: FunctionScope) -> None:
    if node.value is not None:
        assign(node.target, evaluate(node.value, scope), scope)


def _augmented(node: ast.AugAssign, scope: FunctionScope) -> None:
    before, by = evaluate(node.target, scope), evaluate(node.value, scope)
    floor_division(node, [before, by], scope)
    value = combine(node.op, before, by)
    if before.kind is Kind.SIZE and _shared(before, node.target, scope):
        scope.tell("TRC007", node)
    assign(node.target, value, scope)


def _shared(size: StaticValue, target: ast.expr, scope: FunctionScope) -> bool:
    """True if somebody else holds this very size: another name, a tuple, its shape."""
    own = target.id if isinstance(target, ast.Name) else None
    for name, value in scope.names.items():
        if name != own and (value is size or value is size.shape):
            return True
        if any(item is size for item in value.items.values()):
            return True
    return False


def _if(node: ast.If, scope: FunctionScope) -> bool:
    test = evaluate_test(node.test, scope)
    truth = decided(test)
    if truth is not None:
        return run(node.body if truth else node.orelse, scope)
    same = [ast.dump(s) for s in node.body] == [ast.dump(s) for s in node.orelse]
    guard = only_guards([*node.body, *node.orelse]) and not test.flag
    changes = not same and not (test.flag and not scope.walk.reaches(node, scope))
    condition(test, node.test, scope, changes=changes, guard=guard)
    before, returned = dict(scope.names), len(scope.returned)
    ended = run(node.body, scope)
    one, middle = scope.names, len(scope.returned)
    scope.names = dict(before)
    other_ended = run(node.orelse, scope)
    other = scope.names
    if test.tensor or test.read:
        _ranks(node, (one, other), scope)
        _returned_ranks(node, scope, (returned, middle))
    scope.names = other if ended else one if other_ended else _joined(one, other)
    return ended and other_ended


def _ranks(node: ast.If, branches: tuple[Names, Names], scope: FunctionScope) -> None:
    one, other = branches
    for name in one.keys() & other.keys():
        left, right = one[name], other[name]
        if left.tensor and right.tensor and ranks_differ(left, right):
            scope.tell("TRC015", node.test, message=f"{name} has another rank in each branch: the "
                       "exporter takes one for both")  # fmt: skip


def _returned_ranks(node: ast.If, scope: FunctionScope, marks: tuple[int, int]) -> None:
    start, middle = marks
    one, other = scope.returned[start:middle], scope.returned[middle:]
    if any(ranks_differ(left, right) for left in one for right in other):
        scope.tell("TRC015", node.test, message="the branches return tensors of different rank")


def _joined(one: Names, other: Names) -> Names:
    return {
        name: join([branch[name] for branch in (one, other) if name in branch])
        for name in one.keys() | other.keys()
    }


def _for(node: ast.For, scope: FunctionScope) -> bool:
    turn = iterate(node.iter, scope)
    _loop(node.body, scope, lambda: assign(node.target, turn, scope))
    return run(node.orelse, scope)


def _while(node: ast.While, scope: FunctionScope) -> bool:
    def test() -> None:
        value = evaluate_test(node.test, scope)
        if decided(value) is None:
            condition(value, node.test, scope)

    _loop(node.body, scope, test)
    return run(node.orelse, scope)


def _loop(body: Sequence[ast.stmt], scope: FunctionScope, start: Callable[[], None]) -> None:
    """Two turns: what the first binds is there in the second."""
    for _ in range(2):
        before = dict(scope.names)
        start()
        run(body, scope)
        scope.names = _joined(before, scope.names)


def _with(node: ast.With, scope: FunctionScope) -> bool:
    for part in node.items:
        value = evaluate(part.context_expr, scope)
        if part.optional_vars is not None:
            assign(part.optional_vars, value if value.tensor else unknown(), scope)
    return run(node.body, scope)


def _try(node: ast.Try, scope: FunctionScope) -> bool:
    before = dict(scope.names)
    ended = run([*node.body, *node.orelse], scope)
    for handler in node.handlers:
        after, scope.names = scope.names, dict(before)
        if not run(handler.body, scope):
            after = scope.names if ended else _joined(after, scope.names)
            ended = False
        scope.names = after
    return run(node.finalbody, scope) or ended


def _match(node: ast.Match, scope: FunctionScope) -> None:
    subject = evaluate(node.subject, scope)
    condition(subject, node.subject, scope)
    before, ends = dict(scope.names), []
    for case in node.cases:
        scope.names = dict(before)
        if not run(case.body, scope):
            ends.append(scope.names)
    scope.names = before
    for names in ends:
        scope.names = _joined(scope.names, names)


def _return(node: ast.Return, scope: FunctionScope) -> bool:
    value = of_object(None) if node.value is None else evaluate(node.value, scope)
    scope.returned.append(value)
    if scope.top and node.value is not None:
        _outputs(node, value, scope)
    return True


def _outputs(node: ast.Return, value: StaticValue, scope: FunctionScope) -> None:
    """What the model itself returns becomes the outputs of the file."""
    if value.kind is Kind.DICT:
        scope.tell("TRC012", node, message="the model returns a dict: the file has its tensors in "
                   "the order in which the keys were set", rewrite="name the outputs in that order,"
                   " or return a tuple")  # fmt: skip
    texts = [one for one in (value, *value.items.values()) if isinstance(one.object, str)]
    if texts:
        scope.tell("TRC012", node, level="error", message="the model returns text: it is not in "
                   "the file", rewrite="return tensors alone; keep texts beside it")  # fmt: skip


def _ends(node: ast.stmt, scope: FunctionScope) -> bool:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            evaluate(child, scope)
    return True


def _assert(node: ast.Assert, scope: FunctionScope) -> None:
    value = evaluate_test(node.test, scope)
    condition(value, node.test, scope, guard=True)


def _function(node: ast.FunctionDef, scope: FunctionScope) -> None:
    scope.names[node.name] = StaticValue(Kind.PYTHON, object=Local(node, scope))


def _import(node: ast.Import, scope: FunctionScope) -> None:
    for alias in node.names:
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        module = sys.modules.get(name)
        scope.names[alias.asname or name] = unknown() if module is None else of_object(module)


def _import_from(node: ast.ImportFrom, scope: FunctionScope) -> None:
    package = scope.code.function.__globals__.get("__package__") or ""
    try:
        name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        name = ""
    module = sys.modules.get(name)
    for alias in node.names:
        exists = hasattr(module, alias.name)
        value = of_object(getattr(module, alias.name)) if exists else unknown()
        scope.names[alias.asname or alias.name] = value


def _forget(node: ast.Delete, scope: FunctionScope) -> None:
    for target in node.targets:
        if isinstance(target, ast.Name):
            scope.names.pop(target.id, None)


_BY_TYPE: dict[type[ast.stmt], Callable[[Any, FunctionScope], bool | None]] = {
    ast.Expr: _expression,
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.If: _if,
    ast.For: _for,
    ast.While: _while,
    ast.With: _with,
    ast.Try: _try,
    ast.Match: _match,
    ast.Return: _return,
    ast.Raise: _ends,
    ast.Continue: _ends,
    ast.Break: _ends,
    ast.Assert: _assert,
    ast.FunctionDef: _function,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.Delete: _forget,
}
