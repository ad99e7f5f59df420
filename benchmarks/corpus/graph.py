"""Small edits of an ONNX graph, like those of tools between the exporter and the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper


def find_node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    """Return the node with this name."""
    (match,) = [candidate for candidate in model.graph.node if candidate.name == name]
    return match


def find_nodes(model: onnx.ModelProto, operator: str) -> list[onnx.NodeProto]:
    """Return all nodes of an operator in order. Raises LookupError if there is none."""
    match = [candidate for candidate in model.graph.node if candidate.op_type == operator]
    if not match:
        raise LookupError(f"no {operator} among {sorted({n.op_type for n in model.graph.node})}")
    return match


def get_attribute(node: onnx.NodeProto, name: str) -> Any:
    """Return the value of an existing attribute."""
    (match,) = [candidate for candidate in node.attribute if candidate.name == name]
    return helper.get_attribute_value(match)


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    """Set the value of an attribute, which may be new."""
    other_attributes = [candidate for candidate in node.attribute if candidate.name != name]
    del node.attribute[:]
    node.attribute.extend([*other_attributes, helper.make_attribute(name, value)])


def add_initializer(model: onnx.ModelProto, name: str, values: NDArray[np.generic]) -> str:
    """Add an initializer and return its name."""
    model.graph.initializer.append(numpy_helper.from_array(values, name))
    return name


def get_value(model: onnx.ModelProto, name: str) -> NDArray[np.generic]:
    """Return the value of an initializer or a Constant node."""
    for tensor in model.graph.initializer:
        if tensor.name == name:
            return numpy_helper.to_array(tensor)
    for candidate in model.graph.node:
        if candidate.op_type == "Constant" and name in candidate.output:
            return numpy_helper.to_array(get_attribute(candidate, "value"))
    raise LookupError(f"'{name}' is no constant")


def insert_after(
    model: onnx.ModelProto, tensor: str, operator: str, **attributes: Any
) -> onnx.NodeProto:
    """Insert a node after `tensor` and connect its consumers and graph outputs to the result.

    Returns the node, to which more inputs can be added.
    """
    result_name = f"{tensor}_{operator}"
    inserted = helper.make_node(operator, [tensor], [result_name], name=result_name, **attributes)
    _rename_inputs(model.graph, tensor, result_name)
    producer_index = next(
        (i for i, candidate in enumerate(model.graph.node) if tensor in candidate.output), -1
    )
    model.graph.node.insert(producer_index + 1, inserted)  # `insert` copies the node.
    for output in model.graph.output:
        if output.name == tensor:  # The output keeps its name, so the inner tensor is renamed.
            _rename(model, tensor, f"before_{result_name}")
            _rename(model, result_name, tensor)
    return model.graph.node[producer_index + 1]


def _rename_inputs(subgraph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename an input of nodes, including those in branches and loops."""
    for candidate in subgraph.node:
        for index, name in enumerate(candidate.input):
            if name == old:
                candidate.input[index] = new
        for attribute in candidate.attribute:
            if attribute.HasField("g"):
                _rename_inputs(attribute.g, old, new)


def _rename(model: onnx.ModelProto, old: str, new: str) -> None:
    for node in model.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old:
                    names[index] = new
