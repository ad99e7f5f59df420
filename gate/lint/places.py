"""The names and attributes that a node of the syntax tree writes and reads: `x`, and `self.x`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

UNKNOWN = "?"
"""A place that can't be named, so that it may be any."""
_MUTATORS = frozenset({"append", "extend", "insert", "update", "add", "setdefault", "pop", "remove",
                       "clear", "fill"})  # fmt: skip


def writes(node: ast.AST, owner: str) -> tuple[frozenset[str], frozenset[str]]:
    """The places that a node itself writes, and what it writes them from."""
    targets: list[ast.expr] = []
    sources: list[ast.AST] = []
    match node:
        case ast.Assign():
            targets, sources = node.targets, [node.value, *node.targets]
        case ast.AnnAssign(value=value) if value is not None:
            targets, sources = [node.target], [value, node.target]
        case ast.AugAssign() | ast.NamedExpr():
            targets, sources = [node.target], [node.value, node.target]
        case ast.For(target=target, iter=source) | ast.comprehension(target=target, iter=source):
            targets, sources = [target], [source]
        case ast.withitem(optional_vars=target) if target is not None:
            targets, sources = [target], [node.context_expr]
        case ast.Call(func=ast.Attribute(value=changed, attr=name)) if _in_place(name):
            targets = [changed]
            sources = [*node.args, *(keyword.value for keyword in node.keywords)]
        case ast.FunctionDef(name=name, body=body):
            targets, sources = [ast.Name(id=name)], [*body]
    to = frozenset(place for target in targets for place in _places(target, owner))
    read = [place for source in sources for place in reads(source, owner)]
    if isinstance(node, ast.AugAssign):
        read += to
    return to, frozenset(read)


def changes(node: ast.AST, owner: str) -> Iterator[str]:
    """What a node changes without another name for it: by an index, an attribute, a method."""
    match node:
        case ast.Assign(targets=targets):
            parts = [part for target in targets for part in ast.walk(target)]
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target) | ast.For(target=target):
            parts = list(ast.walk(target))
        case ast.Call(func=ast.Attribute(value=changed, attr=name)) if _in_place(name):
            yield from _places(changed, owner)
            return
        case _:
            return
    for part in parts:
        match part:
            case ast.Attribute(value=ast.Name(id=name)) if name == owner:
                pass  # another value of its own
            case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                yield from _places(part, owner)
    if isinstance(node, ast.AugAssign):  # of a tensor, a change in place
        yield from _places(node.target, owner)


def _in_place(method: str) -> bool:
    return method in _MUTATORS or (method.endswith("_") and not method.endswith("__"))


def _places(target: ast.expr, owner: str) -> Iterator[str]:
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _places(part, owner)
        case ast.Name(id=name):
            yield name
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == owner:
            yield f"self.{attribute}"
        case ast.Attribute(value=inner, attr=attribute):
            yield f"self.{attribute}"  # of another module, which may read it
            yield from _places(inner, owner)
        case ast.Subscript(value=inner) | ast.Starred(value=inner):
            yield from _places(inner, owner)
        case ast.Call(func=inner):
            yield from _places(inner, owner)
        case _:
            yield UNKNOWN


def reads(node: ast.AST, owner: str) -> Iterator[str]:
    """What a node and all in it read. `owner`: what the function calls its `self`."""
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == owner:
            yield f"self.{attribute}"
        case ast.Name(id=name, ctx=ast.Load()):
            yield name
        case _:
            for child in ast.iter_child_nodes(node):
                yield from reads(child, owner)
