"""Which module a node comes from, as far as its name says.

The exporter that traces names nodes `/layer1/layer1.0/relu_1/Relu`, from a module that was traced
before `/layer1/0/relu/Relu`; dynamo writes the path into the node's metadata. None of them is
sure: the second call of a traced module and the second module of a scripted class carry the name
of the module around them only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_SCOPES = "pkg.torch.onnx.name_scopes"
_INDEXED = re.compile(r"(.+)_(\d+)")


@dataclass(frozen=True)
class ModuleScope:
    """The innermost module that a node's name leads to."""

    path: str
    call: int | None
    """Counts the calls of the module, from 0; None where the name does not tell."""


class Paths:
    """The module tree of a model, to find modules in by the names of nodes."""

    def __init__(self, model: nn.Module) -> None:
        first = {id(module): path for path, module in model.named_modules()}
        self._canonical = {
            path: first[id(module)] for path, module in model.named_modules(remove_duplicate=False)
        }
        """Every path of a module to its first: shared modules have several."""
        self._by_name: dict[str, list[str]] = {}
        """The paths that end with a name."""
        for path in self._canonical:
            self._by_name.setdefault(path.rpartition(".")[2], []).append(path)
        self.norms = tuple(
            path
            for path, module in model.named_modules()
            if isinstance(module, _BatchNorm) and any(True for _ in module.children())
        )
        """Paths of BatchNorms that call modules, as timm's, which hold their activation."""

    def scope(self, node: onnx.NodeProto) -> ModuleScope | None:
        """None if the name leads nowhere."""
        for entry in node.metadata_props:
            if entry.key == _SCOPES:
                return self._listed(entry.value)
        parts = node.name.split("/")
        return self._walk(parts[1:-1]) if len(parts) > 1 and not parts[0] else None

    def _listed(self, text: str) -> ModuleScope | None:
        try:
            listed = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return None
        if not isinstance(listed, list):
            return None
        modules = [path for path in listed if path in self._canonical]
        return ModuleScope(self._canonical[modules[-1]], None) if modules else None

    def _walk(self, parts: Sequence[str]) -> ModuleScope:
        """Follow the segments down the tree as far as they lead."""
        path, calls = "", [0]
        for part in parts:
            child, times = self._child(path, part)
            if child is None:
                return ModuleScope(self._canonical[path], None)
            path, calls = child, [*calls, times]
        # Within the second call of a parent the calls are counted from 0 again.
        return ModuleScope(self._canonical[path], None if any(calls[:-1]) else calls[-1])

    def _child(self, path: str, part: str) -> tuple[str | None, int]:
        for name, times in ((part, 0), *_with_index(part)):
            for last in (name, name.rpartition(".")[2]):
                child = f"{path}.{last}" if path else last
                if child in self._canonical:
                    return child, times
        return self._deeper(path, part)

    def _deeper(self, path: str, part: str) -> tuple[str | None, int]:
        """The only nearest module of that name farther down: where code calls another method of a
        module than its forward (`self.vae.decode(x)`), names leave the module out."""
        around = f"{path}." if path else ""
        for name, times in ((part, 0), *_with_index(part)):
            last = name.rpartition(".")[2]
            found = [inner for inner in self._by_name.get(last, ()) if inner.startswith(around)]
            depths = [inner.count(".") for inner in found]
            nearest = [i for i, depth in zip(found, depths, strict=True) if depth == min(depths)]
            if len(nearest) == 1 and not last.isdigit():
                return nearest[0], times
        return None, 0


def _with_index(part: str) -> list[tuple[str, int]]:
    found = _INDEXED.fullmatch(part)
    return [(found[1], int(found[2]))] if found else []
