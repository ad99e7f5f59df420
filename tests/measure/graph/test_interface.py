from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

from tests.measure.graph.build import DOUBLE, found, model, node, report, value

RELU = [node("Relu", ["x"], ["y"], name="relu")]
BATCH = {"x": np.ones((3, 4), np.float32)}


class Table(nn.Module):
    """A result for each sample, and a table that is the same for all."""

    def forward(self, x):
        return x.relu(), torch.arange(16.0).reshape(4, 4)


class Scalar(nn.Module):
    def forward(self, x):
        return x.sum()


def fixed(rows_in, rows_out, *, folder, reference=None, batch=None):
    sizes = {"inputs": [value("x", rows_in)], "outputs": [value("y", rows_out)]}
    seen = report(model(RELU, **sizes), folder, reference, batch=batch or BATCH)
    return found(seen, "fixed_batch")


@pytest.mark.parametrize(
    ("rows_in", "rows_out", "places"),
    [
        (("b", 4), ("b", 4), []),
        (("b", 4), ("c", 4), []),
        ((3, 4), (3, 4), ["x", "y"]),
        ((3, 4), ("b", 4), ["x"]),
        (("b", 4), (2, 4), ["y"]),
        (("b", 4), (3, 4), []),  # the model returned three rows for three samples
    ],
)
def test_a_fixed_batch_axis(tmp_path, rows_in, rows_out, places):
    assert fixed(rows_in, rows_out, folder=tmp_path) == places


def test_an_output_without_batch_axis_is_not_fixed(tmp_path):
    nodes = [*RELU, node("Identity", ["t"], ["table"])]
    outputs = [value("y"), value("table", (4, 4))]
    made = model(nodes, {"t": np.ones((4, 4), np.float32)}, outputs=outputs)
    assert found(report(made, tmp_path, Table()), "fixed_batch") == []
    sizes = {"inputs": [value("x", (3, 4))], "outputs": [value("y", (3, 4)), outputs[1]]}
    made = model(nodes, {"t": np.ones((4, 4), np.float32)}, **sizes)
    assert found(report(made, tmp_path, Table()), "fixed_batch") == ["x", "y"]
    whole = model([node("ReduceSum", ["x"], ["y"], keepdims=0)], outputs=[value("y", [])])
    assert found(report(whole, tmp_path, Scalar()), "fixed_batch") == []


def test_what_no_output_depends_on(tmp_path):
    nodes = [*RELU, node("Neg", ["x"], ["n"], name="neg"), node("Add", ["n", "w"], ["m"])]
    weights = {"w": np.ones(4, np.float32), "v": np.ones(4, np.float32)}
    made = model(nodes, weights, inputs=[value("x"), value("more")])
    assert found(report(made, tmp_path), "unused_output") == ["more", "w", "v", "Neg:neg", "Add:m"]


def test_what_only_a_branch_uses_is_used(tmp_path):
    then = helper.make_graph([node("Add", ["x", "w"], ["t"])], "then", [], [value("t", None)])
    other = helper.make_graph([node("Sub", ["x", "v"], ["t"])], "else", [], [value("t", None)])
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Cast", ["sum"], ["flag"], to=onnx.TensorProto.BOOL),
        node("If", ["flag"], ["y"], then_branch=then, else_branch=other),
    ]
    weights = {"w": np.ones(4, np.float32), "v": np.ones(4, np.float32)}
    assert report(model(nodes, weights), tmp_path).findings == ()


def test_long_lists_are_cut_and_say_so(tmp_path):
    nodes = [*RELU, *(node("Neg", ["x"], [f"n{i}"]) for i in range(60))]
    seen = report(model(nodes), tmp_path)
    assert len(seen.findings) == 50
    assert seen.findings[-1].detail_params["more"] == 10
    assert seen.nodes == 61


def test_operators_of_other_domains(tmp_path):
    nodes = [
        node("FusedMatMul", ["x", "w"], ["a"], domain="com.microsoft"),
        node("Gelu", ["a"], ["b"], domain="com.microsoft"),
        node("Gelu", ["b"], ["c"], domain="com.microsoft"),
        node("Scaler", ["c"], ["d"], domain="ai.onnx.ml", offset=[0.0], scale=[1.0]),
        node("Relu", ["d"], ["y"]),
    ]
    made = model(nodes, {"w": np.ones((4, 4), np.float32)}, domains=["com.microsoft", "ai.onnx.ml"])
    seen = report(made, tmp_path)
    assert found(seen, "domain") == ["ai.onnx.ml", "com.microsoft"]
    params = [each.detail_params for each in seen.findings]
    assert {"count": 3, "operators": ["2 Gelu", "1 FusedMatMul"]} in params
    assert seen.operators["com.microsoft::Gelu"] == 2
    assert seen.operators["Relu"] == 1


@pytest.mark.parametrize(
    ("version", "codes"),
    [
        (12, ["old_opset"]),
        (13, []),
        (18, []),
        (onnx.defs.onnx_opset_version(), ["new_opset"]),
    ],
)
def test_opsets_that_are_old_or_too_new(tmp_path, version, codes):
    seen = report(model(RELU, opset=version), tmp_path)
    assert [each.detail_code for each in seen.findings if each.code == "opset"] == codes
    assert all(each.detail_params["version"] == version for each in seen.findings)


def test_a_function_of_another_opset(tmp_path):
    opsets = [helper.make_opsetid("", 17)]
    inner = helper.make_function("my", "F", ["a"], ["b"], [node("Relu", ["a"], ["b"])], opsets)
    call = node("F", ["x"], ["y"], domain="my")
    seen = report(model([call], opset=18, functions=[inner], domains=["my"]), tmp_path)
    assert found(seen, "opset") == ["opset_import"]
    (finding,) = seen.findings
    assert finding.detail_params == {"versions": [17, 18]}
    assert seen.operators == {"Relu": 1}


def test_a_double_input_is_told_by_its_computations(tmp_path):
    made = model(RELU, inputs=[value("x", kind=DOUBLE)], outputs=[value("y", kind=DOUBLE)])
    assert found(report(made, tmp_path), "float64") == ["Relu:relu"]
