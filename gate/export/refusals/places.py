"""Where in a model an operator stands: the module's path, and the line of its source.

Both are the same on every machine. torch tells them in four spellings: scopes and source ranges
of a TorchScript graph, traced or scripted, and the metadata of a `torch.export` graph.
"""

from __future__ import annotations

import re

from torch import nn

from gate.model.source_place import source_place

_PYTHON_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_TRACED_FRAME = re.compile(r"^(.+?)\((\d+)\): ", re.MULTILINE)
_HIERARCHY = re.compile(r"([^.()]+)\(([^()]*)\)")
_LIBRARY = "torch/"
_TORCHSCRIPT = "<--- HERE"
_LAST = "most recent call last"
_CONTAINERS = ("ModuleList", "ModuleDict")
"""Modules without a forward: they are part of a path and never of a scope."""


def source_line(text: str) -> str | None:
    """The innermost `file:line` of a stack that is not torch's own; None if there is no stack.

    `text` is a source range or an error of TorchScript's compiler (innermost first), or a stack
    as Python prints it (innermost last).
    """
    frames = _TRACED_FRAME.findall(text) or _PYTHON_FRAME.findall(text)
    if _TORCHSCRIPT not in text or _LAST in text:
        frames = frames if _TRACED_FRAME.search(text) else frames[::-1]
    places = [source_place(file, int(line)) for file, line in frames if file[:1] != "<"]
    own = [place for place in places if not place.startswith(_LIBRARY)]
    return next(iter(own or places), None)


def node_scope(scope: str, hierarchy: str) -> str:
    """The scope of a TorchScript node, from its `getModuleHierarchy()` where it has lost its own.

    The first export of a compiled module inlines it, and leaves the second no scopes.
    """
    if "/" in scope or not hierarchy:
        return scope
    parts = (part for part in _HIERARCHY.findall(hierarchy) if part[0] != "UNKNOWN_INSTANCE")
    return "/".join((scope, *(f"{kind}::{name}" for name, kind in parts)))


def module_path(scope: str, model: nn.Module) -> str:
    """`layer1.0.attn` for the scope `pkg.Net::/pkg.Block::layer1.0/pkg.Attn::attn` of `model`.

    Empty for the model itself. Each part of a scope is a path from the part before it; it may
    repeat that one, and it leaves out containers that have no forward.
    """
    modules = dict(model.named_modules())
    path = before = ""
    for part in scope.split("/"):
        name = part.rpartition("::")[2]
        if name:
            path = _below(path, name.removeprefix(f"{before}."), modules)
            before = name
    return path


def _below(path: str, name: str, modules: dict[str, nn.Module]) -> str:
    below = f"{path}." if path else ""
    if below + name in modules:
        return below + name
    through = [
        other
        for other in modules
        if other.startswith(below)
        and other.endswith(f".{name}")
        and _only_containers(below, other.removesuffix(f".{name}"), modules)
    ]
    if len(through) == 1:
        return through[0]
    return name if name in modules else below + name


def _only_containers(below: str, path: str, modules: dict[str, nn.Module]) -> bool:
    """True if every module from under `below` down to `path` is a container."""
    parts = path.removeprefix(below).split(".")
    paths = [below + ".".join(parts[: end + 1]) for end in range(len(parts))]
    return all(between in modules and _kind(modules[between]) in _CONTAINERS for between in paths)


def _kind(module: nn.Module) -> str:
    """The class's name, also of a module that was scripted or traced."""
    return str(getattr(module, "original_name", type(module).__name__))
