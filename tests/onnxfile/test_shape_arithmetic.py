"""Which nodes compute shapes, by the shapes in the file."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

from gate.onnx_file.sessions import shape_arithmetic


def model(*, inner=None):
    """`/s/Add` adds to a shape, `/x/Add` to the images, `/rows/Mul` to as many numbers as there are
    samples."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], "/s/Shape"),
        helper.make_node("Add", ["s", "s"], ["t"], "/s/Add"),
        helper.make_node("Add", ["x", "x"], ["y"], "/x/Add"),
        helper.make_node("Gather", ["x", "zero"], ["column"], "/column/Gather", axis=1),
        helper.make_node("Mul", ["column", "column"], ["squared"], "/rows/Mul"),
        helper.make_node("Size", ["x"], ["size"], "/size"),
        helper.make_node("Range", ["zero", "size", "zero"], ["range"], "/range/Range"),
        helper.make_node("Concat", ["many", "many"], ["much"], "/many/Concat", axis=0),
        helper.make_node("Mul", ["s", "s"], ["u"], "twice"),
        helper.make_node("Mul", ["x", "x"], ["z"], "twice"),
        helper.make_node("Add", ["s", "s"], ["v"], "/acme/Add", domain="acme"),
        *(inner or []),
    ]
    weights = [
        numpy_helper.from_array(np.array(0), "zero"),
        numpy_helper.from_array(np.zeros(64, np.int64), "many"),
        numpy_helper.from_array(np.array(True), "true"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("acme", 1)]
    return helper.make_model(graph, opset_imports=sets)


SHAPES = {
    "Shape:/s/Shape": True,
    "Add:/s/Add": True,
    "Add:/x/Add": False,
    "Mul:/rows/Mul": False,
    "Range:/range/Range": False,
    "Concat:/many/Concat": False,
    "Mul:twice": False,
    "Add:/acme/Add": False,
    "Add:/of/an/optimizer": False,
    "Conv:/conv/Conv": False,
}


@pytest.mark.parametrize(("node", "small"), SHAPES.items())
def test_only_what_is_known_for_a_shape_is_one(node, small):
    assert (node in shape_arithmetic(model())) is small


def test_nodes_of_branches_too():
    branches = {
        side: helper.make_graph(
            [helper.make_node("Add", [side_of, side_of], [f"{side}_out"], f"/{side}/Add")],
            side, [], [ValueInfoProto(name=f"{side}_out")],
        )
        for side, side_of in (("then", "s"), ("else", "x"))
    }  # fmt: skip
    node = helper.make_node(
        "If", ["true"], ["branched"], "/if", then_branch=branches["then"],
        else_branch=branches["else"],
    )  # fmt: skip
    names = {"Add:/then/Add", "Add:/else/Add", "If:/if"}
    assert names & shape_arithmetic(model(inner=[node])) == {"Add:/then/Add"}
