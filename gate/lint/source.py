"""Syntax tree of a function; suppressed lines."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from gate.model.source_code import below_import_path

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
        case ast.Call(func=ast.Attribute(value=changed, attr=name)) if _is_mutator(name):
            targets = [changed]
            sources = [*node.args, *(keyword.value for keyword in node.keywords)]
        case ast.FunctionDef(name=name, body=body):
            targets, sources = [ast.Name(id=name)], [*body]
    to = frozenset(place for target in targets for place in _assigned_names(target, owner))
    read = [place for source in sources for place in reads(source, owner)]
    if isinstance(node, ast.AugAssign):
        read += to
    return to, frozenset(read)


def changes(node: ast.AST, owner: str) -> Iterator[str]:
    """Return what a node changes in place: by an index, an attribute or a method."""
    match node:
        case ast.Assign(targets=targets):
            parts = [part for target in targets for part in ast.walk(target)]
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target) | ast.For(target=target):
            parts = list(ast.walk(target))
        case ast.Call(func=ast.Attribute(value=changed, attr=name)) if _is_mutator(name):
            yield from _assigned_names(changed, owner)
            return
        case _:
            return
    for part in parts:
        match part:
            case ast.Attribute(value=ast.Name(id=name)) if name == owner:
                pass  # another value of its own
            case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                yield from _assigned_names(part, owner)
    if isinstance(node, ast.AugAssign):  # of a tensor, a change in place
        yield from _assigned_names(node.target, owner)


def _is_mutator(method: str) -> bool:
    return method in _MUTATORS or (method.endswith("_") and not method.endswith("__"))


def _assigned_names(target: ast.expr, owner: str) -> Iterator[str]:
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _assigned_names(part, owner)
        case ast.Name(id=name):
            yield name
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == owner:
            yield f"self.{attribute}"
        case ast.Attribute(value=inner, attr=attribute):
            yield f"self.{attribute}"  # of another module, which may read it
            yield from _assigned_names(inner, owner)
        case ast.Subscript(value=inner) | ast.Starred(value=inner):
            yield from _assigned_names(inner, owner)
        case ast.Call(func=inner):
            yield from _assigned_names(inner, owner)
        case _:
            yield UNKNOWN


def reads(node: ast.AST, owner: str) -> Iterator[str]:
    """Return what a node and its children read. `owner`: the name of `self` in the function."""
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == owner:
            yield f"self.{attribute}"
        case ast.Name(id=name, ctx=ast.Load()):
            yield name
        case _:
            for child in ast.iter_child_nodes(node):
                yield from reads(child, owner)


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_NOQA = re.compile(r"#\s*noqa:\s*((?:[A-Z]+\d+[,\s]*)+)")

_CODE = re.compile(r"[A-Z]+\d+")


class Unreadable(Exception):
    """There is no source; the message says why."""


@dataclass(frozen=True)
class FunctionSource:
    """A function and the syntax tree of its definition, with the line numbers of its file."""

    function: FunctionType
    definition: Definition
    path: str
    """Below the import path."""
    lines: tuple[str, ...]
    """Of the whole file."""

    @classmethod
    def of(cls, function: FunctionType) -> FunctionSource:
        """Raises Unreadable where the source is not there, or is not the one that runs."""
        file = inspect.getsourcefile(function.__code__) or function.__code__.co_filename
        lines = tuple(linecache.getlines(file, function.__globals__))
        if not lines:
            raise Unreadable(f"its source {below_import_path(file)} is not there")
        definition = _find(_tree("".join(lines)), function)
        return cls(function, definition, below_import_path(file), lines)

    @property
    def name(self) -> str:
        """`package.module.Class.method`."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def text(self, node: ast.AST) -> str:
        """The source of a node in one line."""
        found = ast.get_source_segment("".join(self.lines), node)
        return " ".join((found if found is not None else ast.unparse(node)).split())

    def silences(self, code: str, node: ast.expr | ast.stmt) -> bool:
        """True if a line of the node names the code behind `# noqa:`."""
        for line in self.lines[node.lineno - 1 : node.end_lineno or node.lineno]:
            noqa = _NOQA.search(line)
            if noqa and code in _CODE.findall(noqa.group(1)):
                return True
        return False


def python_function(thing: Any) -> FunctionType | None:
    """The function behind decorators, methods and partials; None where there is no Python code."""
    while True:
        if isinstance(thing, functools.partial):
            thing = thing.func
        elif inspect.ismethod(thing):
            thing = thing.__func__
        elif isinstance(thing, staticmethod | classmethod) or hasattr(thing, "__wrapped__"):
            thing = thing.__wrapped__
        else:
            return thing if isinstance(thing, FunctionType) else None


def trees_of(kinds: Iterable[type]) -> list[ast.Module]:
    """The files of classes, and of those that they inherit from, but for torch's; none where one
    of them can't be read."""
    files = set()
    try:
        for kind in {base for one in kinds for base in one.__mro__}:
            if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
                files.add(inspect.getsourcefile(kind) or "")
        texts = ["".join(linecache.getlines(file)) for file in sorted(files)]
        return [_tree(text) for text in texts] if all(texts) else []
    except (OSError, TypeError, Unreadable):
        return []


@functools.lru_cache(maxsize=256)
def _tree(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise Unreadable(f"its file is no longer valid Python ({error.msg})") from error


def _find(tree: ast.Module, function: FunctionType) -> Definition:
    code = function.__code__
    found: list[Definition] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            first: int = node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        else:
            continue
        if first == code.co_firstlineno and _arguments(node) == _names(code):
            found.append(node)
    if len(found) != 1:
        raise Unreadable(
            "its definition was not found: the file changed since, the code was generated, or "
            "several lambdas share a line"
        )
    return found[0]


def _arguments(node: Definition) -> list[str]:
    arguments = node.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _names(code: Any) -> list[str]:
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
