"""Operators that ONNX Runtime's optimiser writes into the standard domain, which has them later or
not at all. ONNX Runtime computes them at every opset, and the checker refuses them."""

from __future__ import annotations

import onnx
from onnx import defs, helper

from gate.onnxfile.walk import nodes_of

DOMAIN = "com.microsoft"
"""Where they belong, as far as anybody else can tell."""
_FUSED = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
_STANDARD = ("", "ai.onnx")


def is_of_runtime(node: onnx.NodeProto, *, opset: int) -> bool:
    """Whether the standard domain of that opset lacks the operator, and ONNX Runtime has it."""
    if node.op_type not in _FUSED or node.domain not in _STANDARD:
        return False
    try:
        defs.get_schema(node.op_type, opset, "")
    except defs.SchemaError:
        return True
    return False


def in_own_domain(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with these operators in ONNX Runtime's own domain, which the checker takes; the
    very same object where there are none."""
    opset = max((o.version for o in model.opset_import if o.domain in _STANDARD), default=0)
    if not any(is_of_runtime(node, opset=opset) for node in nodes_of(model)):
        return model
    moved = onnx.ModelProto()
    moved.CopyFrom(model)
    for node in nodes_of(moved):
        if is_of_runtime(node, opset=opset):
            node.domain = DOMAIN
    if all(entry.domain != DOMAIN for entry in moved.opset_import):
        moved.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return moved
