"""A walk visits all parts of a model: subgraphs, functions, sparse tensors."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gate.onnx_file.reading import nodes_of, subgraphs, tensors_of


def tensor(name: str) -> TensorProto:
    return numpy_helper.from_array(np.ones(2, np.float32), name)


def sparse(name: str) -> onnx.SparseTensorProto:
    indices = numpy_helper.from_array(np.array([0, 3]), f"{name}.indices")
    return helper.make_sparse_tensor(tensor(name), indices, [4])


def constant(name: str) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=tensor(f"in {name}"))


def graph(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    return helper.make_graph(list(nodes), name, [], [out], [tensor(f"initializer of {name}")])


def model() -> onnx.ModelProto:
    inner = graph("inner", constant("deep"))
    loop = helper.make_node("Loop", ["n"], ["l"], body=inner)
    branch = helper.make_node(
        "If", ["c"], ["y"], then_branch=graph("then", loop), else_branch=graph("else")
    )
    scattered = helper.make_node("Constant", [], ["s"], sparse_value=sparse("in attribute"))
    main = graph("main", branch, scattered)
    main.sparse_initializer.append(sparse("of main"))
    function = helper.make_function(
        "own", "F", [], ["f"], [constant("in function")], [helper.make_opsetid("", 17)]
    )
    return helper.make_model(main, functions=[function])


def test_all_nodes() -> None:
    kinds = [node.op_type for node in nodes_of(model())]
    assert sorted(kinds) == ["Constant", "Constant", "Constant", "If", "Loop"]


def test_all_tensors() -> None:
    assert {item.name for item in tensors_of(model())} == {
        "initializer of main", "initializer of then", "initializer of else",
        "initializer of inner", "in deep", "in in function", "of main", "of main.indices",
        "in attribute", "in attribute.indices",
    }  # fmt: skip


def test_subgraphs_of_one_node() -> None:
    branch = model().graph.node[0]
    assert {item.name for item in subgraphs(branch)} == {"then", "else"}
    assert not list(subgraphs(constant("x")))
