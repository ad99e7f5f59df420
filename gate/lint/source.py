"""Syntax tree of a function; suppressed lines."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from gate.model.source_code import below_import_path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_NOQA = re.compile(r"#\s*noqa:\s*((?:[A-Z]+\d+[,\s]*)+)")

_CODE = re.compile(r"[A-Z]+\d+")


class Unreadable(Exception):
    """Source is not available; the message is the reason."""


@dataclass(frozen=True)
class FunctionSource:
    """A function and the syntax tree of its definition, with the line numbers of its file."""

    function: FunctionType
    definition: Definition
    path: str
    """Path relative to the import path."""
    lines: tuple[str, ...]
    """Lines of the whole file."""

    @classmethod
    def from_function(cls, function: FunctionType) -> FunctionSource:
        """Parse a function. Raises Unreadable if the source is missing or has changed."""
        file = inspect.getsourcefile(function.__code__) or function.__code__.co_filename
        lines = tuple(linecache.getlines(file, function.__globals__))
        if not lines:
            raise Unreadable(f"its source {below_import_path(file)} is not there")
        definition = _find(parse("".join(lines)), function)
        return cls(function, definition, below_import_path(file), lines)

    def text(self, node: ast.AST) -> str:
        """Return the source of a node in one line."""
        segment = ast.get_source_segment("".join(self.lines), node)
        return " ".join((segment if segment is not None else ast.unparse(node)).split())

    def silences(self, code: str, node: ast.expr | ast.stmt) -> bool:
        """True if a line of the node names the code behind `# noqa:`."""
        comments = map(_NOQA.search, self.lines[node.lineno - 1 : node.end_lineno or node.lineno])
        return any(noqa and code in _CODE.findall(noqa.group(1)) for noqa in comments)


def python_function(callee: Any) -> FunctionType | None:
    """Return the function behind decorators, methods and partials; None without Python code."""
    while True:
        if isinstance(callee, functools.partial):
            callee = callee.func
        elif inspect.ismethod(callee):
            callee = callee.__func__
        elif isinstance(callee, staticmethod | classmethod) or hasattr(callee, "__wrapped__"):
            callee = callee.__wrapped__
        else:
            return callee if isinstance(callee, FunctionType) else None


@functools.lru_cache(maxsize=256)
def parse(text: str) -> ast.Module:
    """Return the syntax tree of a file. Raises Unreadable for one that is not valid Python."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise Unreadable(f"its file is no longer valid Python ({error.msg})") from error


def _find(tree: ast.Module, function: FunctionType) -> Definition:
    code = function.__code__
    parameters = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    definitions: list[Definition] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            first: int = node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        else:
            continue
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if first == code.co_firstlineno and [each.arg for each in arguments] == parameters:
            definitions.append(node)
    if len(definitions) != 1:
        raise Unreadable(
            "its definition was not found: the file changed since, the code was generated, or "
            "several lambdas share a line"
        )
    return definitions[0]
