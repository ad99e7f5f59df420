"""A file is cut into subgraphs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gate import TestedFile
from gate.localize.file_graph import FileGraph, SubgraphSession, reference_name
from gate.onnx_file.reading import read_subject
from gate.policy.runtime_options import plain_setup

SIZE = 20
WEIGHT = np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype(np.float32)
"""A weight larger than what is stored in the graph."""
X = np.random.default_rng(1).normal(size=(3, SIZE)).astype(np.float32)


def make_node(
    op: str, inputs: list[str], outputs: list[str], **attributes: object
) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, name=outputs[0], **attributes)


def make_value(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def write_model(folder, nodes, *, initializers=(), inputs=(), ir: int = 9, external: bool = False):
    """Write a file x -> y of these nodes."""
    graph = helper.make_graph(
        nodes, "g", [make_value("x", "n", SIZE), *inputs], [make_value("y", "n", SIZE)],
        [numpy_helper.from_array(array, name) for name, array in initializers],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=ir)
    path = folder / "m.onnx"
    data = {"save_as_external_data": True, "location": "m.data", "size_threshold": 0}
    onnx.save(model, path, **(data if external else {}))
    return TestedFile(path, read_subject(path))


def run(piece, **references):
    """Run a piece and return its outputs. `fed`: references by tensor name."""
    session = SubgraphSession(piece, plain_setup("ort-cpu"))
    return session({"x": X}, references)


def test_initializers_listed_as_inputs(tmp_path):
    candidate = write_model(
        tmp_path, [make_node("MatMul", ["x", "w"], ["m"]), make_node("Relu", ["m"], ["y"])],
        initializers=[("w", WEIGHT)], inputs=[make_value("w", SIZE, SIZE)], ir=3,
    )  # fmt: skip
    graph = FileGraph(candidate)
    assert graph.tensors == ("m", "y")
    piece = graph.cut(["y"], {"m": np.dtype(np.float32)})
    np.testing.assert_array_equal(run(piece, m=-X)["y"], np.maximum(-X, 0))
    np.testing.assert_allclose(run(graph.marked(["m"]))["m"], X @ WEIGHT, rtol=1e-5, atol=1e-5)


class TestBranches:
    """Nodes with subgraphs may read outer tensors."""

    @pytest.fixture
    def graph(self, tmp_path):
        def branch(name: str, op: str, *inputs: str) -> onnx.GraphProto:
            inner = [make_node(op, list(inputs), [name])]
            return helper.make_graph(inner, name, [], [make_value(name, "n", SIZE)])

        nodes = [
            make_node("MatMul", ["x", "w"], ["m"]),
            make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
            make_node("Greater", ["sum", "zero"], ["positive"]),
            make_node("If", ["positive"], ["chosen"], then_branch=branch("t", "MatMul", "m", "w2"),
                 else_branch=branch("e", "Add", "m", "m")),
            make_node("Relu", ["chosen"], ["y"]),
        ]  # fmt: skip
        weights = [("w", WEIGHT), ("w2", WEIGHT.T.copy()), ("zero", np.float32(0))]
        return FileGraph(write_model(tmp_path, nodes, initializers=weights))

    def test_branches_are_cut(self, graph):
        piece = graph.cut(["chosen"], {"m": np.dtype(np.float32)})
        text = str(piece.model.graph)
        assert reference_name("m") in text
        assert {item.name for item in piece.model.graph.initializer} == {"w2", "zero"}
        expected = X @ WEIGHT.T if X.sum() > 0 else X + X
        np.testing.assert_allclose(run(piece, m=X)["chosen"], expected, rtol=1e-4, atol=1e-4)
        assert graph.nodes[3].attribute[0].g.node[0].input[0] == "m"
