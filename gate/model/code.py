"""The code of a built model: the modules of its classes and functions, with their imports."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from gate.model.modules import Modules
from gate.records.model_code import ModelCode


def code_of(model: nn.Module, *, factory: str = "", chain: str = "") -> ModelCode:
    """The source files that define `model`, and the packages that they stand on.

    Files are those of the modules of the factory and of a release's chain, of the classes of all
    submodules and of the functions that were hung onto them (hooks, a `forward` of the instance,
    what these close over), and of whatever those files import, transitively, as far as it lies
    outside of Python and of the installed packages. What a factory reads besides (a YAML file) is
    not among them. The model is not run and not changed.
    """
    return modules_of(model, factory=factory, chain=chain).code()


def modules_of(model: nn.Module, *, factory: str = "", chain: str = "") -> Modules:
    """The same, with the paths of the files."""
    modules = Modules()
    for named in filter(None, (factory, chain)):
        modules.add(named.partition(":")[0])
    for home in sorted(set(_homes(model))):
        modules.add(home, needed=True)
    for path, module in model.named_modules():
        why = _generated(module)
        if why is not None:
            modules.unread[f"{type(model).__name__}.{path}".rstrip(".")] = why
    return modules


def _homes(model: nn.Module) -> Iterator[str]:
    """Names of modules in which a class or function of the model is defined."""
    for kind in {type(module) for module in model.modules()}:
        yield from (base.__module__ for base in kind.__mro__)
    for module in model.modules():
        for value in vars(module).values():
            yield from _of_functions(value, set())


def _of_functions(value: Any, visited: set[int]) -> Iterator[str]:
    """Of a function, or a dict of such, and of the functions that it closes over."""
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, functools.partial):
        yield from _of_functions(value.func, visited)
    elif inspect.ismethod(value):
        yield from _of_functions(value.__func__, visited)
    elif isinstance(value, FunctionType):
        yield value.__module__ or "__main__"
        for cell in value.__closure__ or ():
            try:
                yield from _of_functions(cell.cell_contents, visited)
            except ValueError:  # not filled yet
                continue
    elif isinstance(value, dict):
        for item in value.values():
            if isinstance(item, FunctionType | functools.partial) or inspect.ismethod(item):
                yield from _of_functions(item, visited)


def _generated(module: nn.Module) -> str | None:
    """Why there is no source file of the module's forward, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is TorchScript: its code came with the weights"
    if isinstance(module, fx.GraphModule):
        return "torch.fx generated its code"
    return None
