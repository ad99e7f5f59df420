"""A file is cut into subgraphs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gate import TestedFile
from gate.errors import OnnxFileError
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


def make_chain(folder, **settings):
    """Return the graph y = relu(x @ w + b) * x, with an additional unused node."""
    nodes = [
        make_node("MatMul", ["x", "w"], ["m"]),
        make_node("Add", ["m", "b"], ["a"]),
        make_node("Relu", ["a"], ["r"]),
        make_node("Neg", ["b"], ["constant"]),
        make_node("Mul", ["r", "x"], ["y"]),
    ]
    weights = [("w", WEIGHT), ("b", np.ones(SIZE, np.float32))]
    return FileGraph(write_model(folder, nodes, initializers=weights, **settings))


def run(piece, **references):
    """Run a piece and return its outputs. `fed`: references by tensor name."""
    session = SubgraphSession(piece, plain_setup("ort-cpu"))
    return session({"x": X}, references)


def test_input_dependent_tensors_are_in_node_order(tmp_path):
    graph = make_chain(tmp_path)
    assert graph.tensors == ("m", "a", "r", "y")
    assert graph.outputs == ("y",)
    assert graph.producer["a"] == 1


@pytest.mark.parametrize("external", [False, True])
def test_marked_tensors_are_additional_outputs(tmp_path, external):
    graph = make_chain(tmp_path, external=external)
    piece = graph.marked(["a", "m", "y"])
    assert (piece.outputs, piece.cuts) == (("y", "a", "m"), ())
    observed = run(piece)
    np.testing.assert_allclose(observed["m"], X @ WEIGHT, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        observed["y"], np.maximum(X @ WEIGHT + 1, 0) * X, rtol=1e-4, atol=1e-4
    )


def test_cut_graph_computes_from_references(tmp_path):
    graph = make_chain(tmp_path)
    piece = graph.cut(["r", "y"], {"m": np.dtype(np.float32), "r": np.dtype(np.float32)})
    assert set(piece.cuts) == {"m", "r"}
    observed = run(piece, m=np.full((3, SIZE), 2, np.float32), r=np.full((3, SIZE), 7, np.float32))
    np.testing.assert_array_equal(observed["r"], np.full((3, SIZE), 3))
    np.testing.assert_array_equal(observed["y"], 7 * X)


def test_cut_graph_contains_only_necessary_nodes_and_weights(tmp_path):
    piece = make_chain(tmp_path).cut(["r"], {"m": np.dtype(np.float32)})
    assert [item.name for item in piece.model.graph.node] == ["a", "r"]
    assert [item.name for item in piece.model.graph.initializer] == ["b"]


def test_graph_is_not_changed(tmp_path):
    graph = make_chain(tmp_path)
    before = [item.SerializeToString() for item in graph.nodes]
    graph.cut(["y"], {"r": np.dtype(np.float32)})
    graph.marked(["m"])
    assert [item.SerializeToString() for item in graph.nodes] == before
    assert graph.marked(()).outputs == ("y",)


def test_large_weights_are_not_copied_into_the_graph(tmp_path):
    graph = make_chain(tmp_path)
    (large,) = (item for item in graph.marked(()).model.graph.initializer if item.name == "w")
    assert (large.raw_data, list(large.dims)) == (b"", [SIZE, SIZE])
    np.testing.assert_array_equal(graph.weights["w"], WEIGHT)


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

    def test_branches_depend_on_outer_tensors(self, graph):
        assert graph.segment("chosen", {"m": None})[1] == ["m"]
        assert graph.sources("chosen", {"m"}, steps=1) == {"m"}
        indices, _ = graph.segment("chosen", {"m": None})
        assert set(graph.constants(indices)) == {"w2", "zero"}

    def test_branches_are_cut(self, graph):
        piece = graph.cut(["chosen"], {"m": np.dtype(np.float32)})
        text = str(piece.model.graph)
        assert reference_name("m") in text
        assert {item.name for item in piece.model.graph.initializer} == {"w2", "zero"}
        expected = X @ WEIGHT.T if X.sum() > 0 else X + X
        np.testing.assert_allclose(run(piece, m=X)["chosen"], expected, rtol=1e-4, atol=1e-4)
        assert graph.nodes[3].attribute[0].g.node[0].input[0] == "m"


class TestSegments:
    def test_segment_starts_at_the_nearest_cut(self, tmp_path):
        graph = make_chain(tmp_path)
        assert graph.segment("y", {"m": None, "a": None}) == ([2, 4], ["a"])
        assert graph.segment("y", {}) == ([0, 1, 2, 4], [])

    def test_computed_constants_are_found(self, tmp_path):
        two = numpy_helper.from_array(np.full(SIZE, 2, np.float32))
        nodes = [
            make_node("Identity", ["w"], ["same"]),
            make_node("Constant", [], ["two"], value=two),
            make_node("Constant", [], ["three"], value_float=3.0),
            make_node("MatMul", ["x", "same"], ["m"]),
            make_node("Add", ["m", "two"], ["a"]),
            make_node("Mul", ["a", "three"], ["y"]),
        ]
        graph = FileGraph(write_model(tmp_path, nodes, initializers=[("w", WEIGHT)]))
        result = graph.constants([3, 4, 5])
        assert set(result) == {"w", "two"}
        np.testing.assert_array_equal(result["w"], WEIGHT)

    @pytest.mark.parametrize(("steps", "found"), [(1, set()), (2, set()), (3, {"m"}), (9, {"m"})])
    def test_source_search_is_limited(self, tmp_path, steps, found):
        assert make_chain(tmp_path).sources("y", {"m"}, steps=steps) == found

    def test_source_search_stops_at_another_source(self, tmp_path):
        assert make_chain(tmp_path).sources("y", {"m", "r", "x"}, steps=9) == {"r", "x"}


class TestErrors:
    def test_short_external_data_is_refused(self, tmp_path):
        candidate = write_model(
            tmp_path, [make_node("MatMul", ["x", "w"], ["y"])], initializers=[("w", WEIGHT)],
            external=True,
        )  # fmt: skip
        data = tmp_path / "m.data"
        data.write_bytes(data.read_bytes()[:-8])
        tested_file = TestedFile(candidate.path, candidate.subject.model_copy(update={
            "sha256": type(candidate.subject.sha256).from_manifest(tmp_path, ["m.onnx", "m.data"]),
        }))  # fmt: skip
        with pytest.raises(OnnxFileError, match=r"m\.onnx can't be read.*export it again"):
            FileGraph(tested_file)


def test_weight_expanded_to_the_input_shape_is_constant(tmp_path):
    nodes = [
        make_node("Shape", ["x"], ["s"]),
        make_node("Expand", ["b", "s"], ["expanded"]),
        make_node("CastLike", ["b", "x"], ["cast"]),
        make_node("Neg", ["b"], ["negative"]),
        make_node("Add", ["x", "expanded"], ["y"]),
    ]
    graph = FileGraph(write_model(tmp_path, nodes, initializers=[("b", np.ones(SIZE, np.float32))]))
    names = ("x", "s", "expanded", "cast", "negative", "y")
    constant = [name for name in names if graph.is_constant(name)]
    assert constant == ["s", "expanded", "cast", "negative"]
