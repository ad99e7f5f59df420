"""What the TorchScript-based exporter can't write, found by exporting again and again.

It stops at the first operator that it does not know. A placeholder is registered for that one,
which notes where it is met, and the export is repeated, until nothing more is missing. The list is
that of the real exporter, after its own passes: what they remove or rename is not in it.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gate.export.custom import overriding
from gate.export.refusals.messages import operator_in
from gate.export.refusals.places import module_path, node_scope, source_line
from gate.export.refusals.unsupported import UnsupportedOperator

_MOST_KINDS = 64
_DOMAIN = "parity_gate"

Met = dict[UnsupportedOperator, None]
"""In order of execution, each once."""


@dataclass(frozen=True)
class LegacyExport:
    """One way to call the exporter. `keywords` are those of `torch.onnx.export`."""

    arguments: tuple[Any, ...]
    opset: int
    keywords: dict[str, Any]

    def error(self, module: nn.Module) -> Exception | None:
        """What the export of `module` raises; the file is thrown away."""
        fixed = {"dynamo": False, "opset_version": self.opset, "verbose": False}
        try:
            file: Any = io.BytesIO()  # works, and is left out of the annotation
            torch.onnx.export(module, self.arguments, file, **{**self.keywords, **fixed})
        except Exception as error:
            return error
        return None


def unwritten(
    export: LegacyExport, module: nn.Module, *, original: nn.Module | None = None
) -> tuple[UnsupportedOperator, ...]:
    """The operators of `module`, as it is handed to the exporter.

    One export for each kind of operator that is missing, and one more; another one if `original`
    is given, the module before it was traced: the exporter's own trace knows whole paths. A traced
    or scripted module has no shapes, so that placeholders can stop an export early: what it did
    not reach is looked up in the module's graph.
    """
    kinds: dict[str, UnsupportedOperator] = {}
    met, error = _met(export, module, kinds)
    while (missing := operator_in(error) if error is not None else None) is not None:
        if missing.name in kinds or len(kinds) == _MOST_KINDS:
            break
        if missing.reason and kinds:
            break  # a placeholder's result may itself be what is not supported here
        kinds[missing.name] = missing
        met, error = _met(export, module, kinds)
    if error is not None and isinstance(module, torch.jit.ScriptModule):
        met |= _in_graph(module, kinds)
    better = _met(export, original, kinds)[0] if original is not None and kinds else {}
    found = (_of(kind, better) or _of(kind, met) or [kind] for kind in kinds.values())
    return tuple(operator for places in found for operator in places)


def _met(
    export: LegacyExport, module: nn.Module, kinds: dict[str, UnsupportedOperator]
) -> tuple[Met, Exception | None]:
    """Where placeholders for `kinds` were met in one export, and what stopped it."""
    met: Met = {}
    with contextlib.ExitStack() as placeholders:
        for name, kind in kinds.items():
            write = _placeholder(kind, module, met)
            placeholders.enter_context(overriding(name, write, opset=export.opset))
        return met, export.error(module)


def _of(kind: UnsupportedOperator, met: Met) -> list[UnsupportedOperator]:
    return [operator for operator in met if operator.name == kind.name]


def _placeholder(kind: UnsupportedOperator, module: nn.Module, met: Met) -> Callable[..., Any]:
    """A symbolic function that writes a node of the same types, and notes where it stands."""

    def write(g: Any, *inputs: Any, **_attributes: Any) -> Any:
        node = g.original_node
        met[_placed(kind, node, module)] = None
        tensors = [value for value in inputs if _is_tensor(value)]
        outputs = g.op(f"{_DOMAIN}::Missing", *tensors, outputs=node.outputsSize())
        written = [outputs] if isinstance(outputs, torch._C.Value) else outputs
        for value, original in zip(written, node.outputs(), strict=True):
            value.setType(original.type())
        return outputs

    return write


def _in_graph(module: torch.jit.ScriptModule, kinds: dict[str, UnsupportedOperator]) -> Met:
    graph: Any = module.inlined_graph
    nodes = [node for node in _nested(graph) if node.kind() in kinds]
    return {_placed(kinds[node.kind()], node, module): None for node in nodes}


def _nested(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nested(inner)


def _placed(kind: UnsupportedOperator, node: Any, module: nn.Module) -> UnsupportedOperator:
    scope = node_scope(node.scopeName(), node.getModuleHierarchy())
    return replace(kind, place=module_path(scope, module), source=source_line(node.sourceRange()))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch._C.Value) and value.type().kind() == "TensorType"
