"""Operators in a file that ONNX Runtime does not have: a symbolic function that lowers nothing."""

from __future__ import annotations

from pathlib import Path

import onnx

from gate.onnxfile.walk import nodes_within

_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc")
"""Those that every build of ONNX Runtime carries."""
_MOST = 8


def foreign_operators(model: onnx.ModelProto) -> tuple[str, ...]:
    """`domain::operator at node` for each node that no runtime brings and no function of the file
    defines, subgraphs and the file's own functions included."""
    defined = {(function.domain, function.name) for function in model.functions}
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    return tuple(
        f"{node.domain}::{node.op_type} at {node.name or 'a node without name'}"
        for body in bodies
        for node in nodes_within(body)
        if node.domain not in _DOMAINS and (node.domain, node.op_type) not in defined
    )


def foreign_objection(path: Path) -> tuple[str, str] | None:
    """Cause and remedy, if the ONNX file `path` has an operator that ONNX Runtime can't run."""
    found = foreign_operators(onnx.load(path, load_external_data=False))
    if not found:
        return None
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return (
        "the file needs operators that ONNX Runtime does not have: "
        f"{', '.join(found[:_MOST])}{more}",
        "Write them by ONNX's own operators in the symbolic function, see "
        "docs/custom-operators.md.",
    )
