"""What the exporter of `torch.export` graphs can't translate, found by asking it node by node.

The graph is captured and decomposed as the exporter does it; then every operator is looked up in
its table. The exporter itself stops at the first one that is missing. No higher opset helps: what
torch 2.15's table has for higher ones alone (gelu, group_norm, rms_norm and
scaled_dot_product_attention) is decomposed in lower ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from gate.export.refusals.places import source_line
from gate.export.refusals.unsupported import UnsupportedOperator

_LOWEST = 18
"""The opset that torch's table is written in; lower ones are converted afterwards."""
_OCCURRENCE = re.compile(r"@\d+$")


def untranslated(
    module: nn.Module, arguments: tuple[Any, ...], opset: int, keywords: Mapping[str, Any]
) -> tuple[UnsupportedOperator, ...]:
    """The operators of `module`, in order of execution, subgraphs of `torch.cond` included.

    Raises what torch raises where the module can't be captured.
    """
    from torch.onnx._internal.exporter import _core, _dispatching, _dynamic_shapes

    table = keywords.get("custom_translation_table") or {}
    registry = _registry(max(opset, _LOWEST), table)
    shapes, _ = _dynamic_shapes.convert_str_to_export_dim(keywords.get("dynamic_shapes"))
    program = torch.export.export(
        module,
        arguments,
        keywords.get("kwargs"),
        dynamic_shapes=shapes,
        strict=False,
    )
    decomposed = _core._prepare_exported_program_for_export(program, registry=registry)
    missing = [
        node
        for node in _calls(decomposed.graph_module)
        if _dispatching.dispatch(node, registry)[0] is None
    ]
    return tuple(dict.fromkeys(_described(node) for node in missing))


def _registry(opset: int, table: Mapping[Any, Any]) -> Any:
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry.from_torchlib(opset_version=opset)
    for target, function in table.items():
        registry.register_op(target, function)
    return registry


def _calls(graph_module: nn.Module) -> Iterator[fx.Node]:
    for part in graph_module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                    yield node


def _described(node: fx.Node) -> UnsupportedOperator:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    target: Any = node.target
    return UnsupportedOperator(
        target._schema.name,
        place=_OCCURRENCE.sub("", paths[-1]) if paths else None,
        source=source_line(node.meta.get("stack_trace") or ""),
    )
