"""Whether a module that is loaded still is what its source file says."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType


def differs(name: str, source: bytes) -> bool:
    """True if a function or method of the loaded module `name` is not in `source`.

    Only where Python's own loader read the file: others (of test runners, of type checkers) rewrite
    what they load. A constant beside the functions leaves no trace in what is loaded.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is None or spec is None or type(spec.loader) is not _LOADER:
        return False
    try:
        there = set(_codes(compile(source, "", "exec", dont_inherit=True)))
    except (SyntaxError, ValueError):
        return True
    return any(code not in there for code in _running(module, str(spec.origin)))


_LOADER = importlib.machinery.SourceFileLoader


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _running(module: ModuleType, file: str) -> Iterator[CodeType]:
    """Code of the functions and methods that the module has of this file."""
    for value in list(vars(module).values()):
        members = [value]
        if isinstance(value, type) and value.__module__ == module.__name__:
            members += vars(value).values()
        for member in members:
            if isinstance(member, property):
                member = member.fget  # noqa: PLW2901
            # No getattr: an object that makes up its attributes would do so, as those of
            # torch.backends.cuda, which start CUDA.
            bound = isinstance(member, classmethod | staticmethod | MethodType)
            function = member.__func__ if bound else member
            if isinstance(function, FunctionType) and function.__code__.co_filename == file:
                yield function.__code__
