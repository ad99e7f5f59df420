"""Which guarded code reaches an output: a loss, an accuracy or a log line that nobody returns does
not.

By names alone, and never hopeful: what is returned, decides a branch or is given to a call for its
effect is followed back through all assignments; an attribute counts wherever a function that a
forward can reach reads one of this name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gate.lint.conditions import only_guards
from gate.lint.places import UNKNOWN, changes, reads, writes
from gate.lint.source import Definition

_ENDS = (
    ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Break, ast.Continue, ast.Delete,
    ast.Global, ast.Nonlocal,
)  # fmt: skip
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)


@dataclass(frozen=True)
class Guarded:
    """What a condition guards in a function, and the rest of the function."""

    definition: Definition
    statements: tuple[ast.stmt, ...]
    """They run only while the model is exported, or only while it is not."""
    left_out: tuple[ast.AST, ...]
    """Nodes that are no part of the rest."""

    @classmethod
    def of(cls, node: ast.If | ast.IfExp, definition: Definition) -> Guarded | None:
        """None: what is guarded is itself a part of something that is more than an assignment."""
        if isinstance(node, ast.IfExp):
            statement = _statement(node, definition)
            if isinstance(statement, _SIMPLE):
                return cls(definition, (statement,), (statement,))
            return None
        early = _early_return(node, definition)
        if early is not None:
            return cls(definition, (*node.body[:-1], *early), (node, *early))
        return cls(definition, (*node.body, *node.orelse), (node,))

    def written(self) -> frozenset[str] | None:
        """Names and attributes (`self.x`) that are written; None: it may end the function, or
        change what others hold."""
        nodes = [inner for one in self.statements for inner in ast.walk(one)]
        if any(isinstance(inner, _ENDS) for inner in nodes):
            return None
        places = {place for inner in nodes for place in writes(inner, self._owner)[0]}
        changed = {place for inner in nodes for place in changes(inner, self._owner)}
        flows = [writes(inner, self._owner) for inner in ast.walk(self.definition)]
        named = [
            writes(inner, self._owner)
            for inner in ast.walk(self.definition)
            if not isinstance(inner, ast.AugAssign | ast.Call)
        ]
        while True:  # what was assigned may be another name of the same thing
            more = {p for to, sources in named if changed & to for p in sources} - changed
            if not more:
                break
            changed |= more
        own = {place for to, _ in flows for place in to} - self._parameters
        foreign = {place for place in changed if "." not in place and place not in own}
        return None if foreign or UNKNOWN in places else frozenset(places | changed)

    def reaching(self) -> frozenset[str]:
        """Names and attributes whose values the rest of the function returns or acts on."""
        rest = list(_outside(self.definition, self.left_out))
        live = {place for node in rest for place in _acted_on(node, self._owner)}
        flows = [writes(node, self._owner) for node in rest]
        while True:
            more = {source for to, sources in flows if live & to for source in sources} - live
            if not more:
                return frozenset(live)
            live |= more

    @property
    def _owner(self) -> str:
        arguments = [*self.definition.args.posonlyargs, *self.definition.args.args]
        return arguments[0].arg if arguments else ""

    @property
    def _parameters(self) -> set[str]:
        """Of the function and of those in it: their callers hold the same things."""
        return {node.arg for node in ast.walk(self.definition) if isinstance(node, ast.arg)}


def attributes_read(trees: Iterable[ast.Module], *, left_out: Iterable[ast.AST]) -> frozenset[str]:
    """Names of attributes that functions read which a `forward` may reach, by their names."""
    skipped, bodies = tuple(left_out), dict[str, list[ast.AST]]()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                bodies.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Lambda):  # whoever holds it calls it by any name
                bodies.setdefault("forward", []).append(node)
    found: set[str] = set()
    ahead = ["forward", "__call__"]
    while ahead:
        for body in bodies.pop(ahead.pop(), ()):
            nodes = list(_outside(body, skipped))
            read = set(_attributes(nodes))
            found |= read
            ahead += [*read, *(node.id for node in nodes if isinstance(node, ast.Name))]
    return frozenset(found)


def _attributes(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Those that are read, and texts that are given to calls, such as `getattr`."""
    for node in nodes:
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                yield name
            case ast.Call(args=given):
                for part in given:
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.value


def _outside(node: ast.AST, left_out: tuple[ast.AST, ...]) -> Iterator[ast.AST]:
    if any(node is one for one in left_out):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside(child, left_out)


def _acted_on(node: ast.AST, owner: str) -> Iterator[str]:
    """What a node outside of the guard returns, decides by, or hands to a call for its effect."""
    match node:
        case ast.Return(value=value) | ast.Yield(value=value) if value is not None:
            yield from reads(value, owner)
        case ast.YieldFrom(value=value) | ast.Expr(value=ast.Call() as value):
            yield from reads(value, owner)
        case ast.If(test=test) if not only_guards([*node.body, *node.orelse]):
            yield from reads(test, owner)
        case ast.While(test=decides) | ast.For(iter=decides) | ast.Match(subject=decides):
            yield from reads(decides, owner)


def _statement(node: ast.expr, definition: Definition) -> ast.AST:
    """The innermost statement around an expression."""
    found: ast.AST = definition
    for statement in ast.walk(definition):  # outer ones first
        if isinstance(statement, ast.stmt) and any(inner is node for inner in ast.walk(statement)):
            found = statement
    return found


def _early_return(node: ast.If, definition: Definition) -> tuple[ast.stmt, ...] | None:
    """Of `if guard: return x` what stands between it and the same `return x` at the end."""
    block = [] if isinstance(definition, ast.Lambda) else definition.body
    place = next((number for number, one in enumerate(block) if one is node), None)
    if place is None or node.orelse or place + 1 == len(block):
        return None
    *between, last = block[place + 1 :]
    own = node.body[-1]
    if isinstance(own, ast.Return) and ast.dump(own) == ast.dump(last):
        return tuple(between)
    return None
