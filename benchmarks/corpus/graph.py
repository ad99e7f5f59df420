"""Small edits of an ONNX graph, like those of tools between exporter and server."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper


def node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    """The node of that name."""
    (found,) = [one for one in model.graph.node if one.name == name]
    return found


def nodes(model: onnx.ModelProto, operator: str) -> list[onnx.NodeProto]:
    """All nodes of an operator, in order; at least one."""
    found = [one for one in model.graph.node if one.op_type == operator]
    if not found:
        raise LookupError(f"no {operator} among {sorted({n.op_type for n in model.graph.node})}")
    return found


def attribute(of: onnx.NodeProto, name: str) -> Any:
    """The value of an attribute that is there."""
    (found,) = [one for one in of.attribute if one.name == name]
    return helper.get_attribute_value(found)


def set_attribute(of: onnx.NodeProto, name: str, value: Any) -> None:
    """Give an attribute another value, or its first."""
    kept = [one for one in of.attribute if one.name != name]
    del of.attribute[:]
    of.attribute.extend([*kept, helper.make_attribute(name, value)])


def constant(model: onnx.ModelProto, name: str, values: NDArray[np.generic]) -> str:
    """Add an initializer; returns its name."""
    model.graph.initializer.append(numpy_helper.from_array(values, name))
    return name


def value_of(model: onnx.ModelProto, name: str) -> NDArray[np.generic]:
    """The value of an initializer or of a Constant node."""
    for tensor in model.graph.initializer:
        if tensor.name == name:
            return numpy_helper.to_array(tensor)
    for one in model.graph.node:
        if one.op_type == "Constant" and name in one.output:
            return numpy_helper.to_array(attribute(one, "value"))
    raise LookupError(f"'{name}' is no constant")


def behind(model: onnx.ModelProto, tensor: str, operator: str, **attributes: Any) -> onnx.NodeProto:
    """Put a node of one input behind `tensor`: its readers, and the graph's outputs, get its
    result instead. Returns the node, to which more inputs can be added."""
    fresh = f"{tensor}_{operator}"
    made = helper.make_node(operator, [tensor], [fresh], name=fresh, **attributes)
    _rename_read(model.graph, tensor, fresh)
    at = next((i for i, one in enumerate(model.graph.node) if tensor in one.output), -1)
    model.graph.node.insert(at + 1, made)  # as a copy
    for output in model.graph.output:
        if output.name == tensor:  # the output keeps its name, the tensor inside gets another
            _rename(model, tensor, f"before_{fresh}")
            _rename(model, fresh, tensor)
    return model.graph.node[at + 1]


def _rename_read(of: onnx.GraphProto, old: str, new: str) -> None:
    """Where a node reads `old`, in branches and loops too."""
    for one in of.node:
        for place, name in enumerate(one.input):
            if name == old:
                one.input[place] = new
        for held in one.attribute:
            if held.HasField("g"):
                _rename_read(held.g, old, new)


def _rename(model: onnx.ModelProto, old: str, new: str) -> None:
    for one in model.graph.node:
        for names in (one.input, one.output):
            for place, name in enumerate(names):
                if name == old:
                    names[place] = new
