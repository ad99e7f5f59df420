from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

from tests.measure.graph.build import found, model, node, report, value

ONES = {name: np.ones(4, np.float32) for name in ("scale", "bias", "mean", "var")}
DROP = {
    "half": np.asarray(0.5, np.float32),
    "none": np.asarray(0.0, np.float32),
    "yes": np.asarray(True),
    "no": np.asarray(False),
}


def norm(*outputs, **attributes):
    return node("BatchNormalization", ["x", *ONES], list(outputs), name="norm", **attributes)


def drop(*inputs, outputs=("y",), **attributes):
    return node("Dropout", ["x", *inputs], list(outputs), name="drop", **attributes)


TRAINING = ["BatchNormalization:norm"]
DROPPING = ["Dropout:drop"]


@pytest.mark.parametrize(
    ("built", "opset", "places"),
    [
        (norm("y"), 17, []),
        (norm("y", training_mode=0), 17, []),
        (norm("y", "m", "v", training_mode=1), 17, TRAINING),
        (norm("y", training_mode=1), 14, TRAINING),
        (norm("y"), 13, []),
        (norm("y", "m", "v", "sm", "sv"), 13, TRAINING),
        (norm("y", "m", "v", "sm", "sv"), 9, TRAINING),
        (drop(), 17, []),
        (drop("half"), 17, []),
        (drop("half", "no"), 17, []),
        (drop("half", "yes"), 17, DROPPING),
        (drop("", "yes"), 13, DROPPING),
        (drop("none", "yes"), 17, []),
        (drop(), 10, []),
        (drop(outputs=("y", "mask")), 10, []),
    ],
)
def test_normalisation_and_dropout_in_training_mode(tmp_path, built, opset, places):
    weights = ONES if built.op_type == "BatchNormalization" else DROP
    seen = report(model([built], weights, opset=opset), tmp_path)
    assert found(seen, "training_mode") == places


def test_the_mask_of_an_old_dropout_in_use(tmp_path):
    mask = value("mask", kind=onnx.TensorProto.BOOL)
    built = model([drop(outputs=("y", "mask"))], opset=10, outputs=[value("y"), mask])
    assert found(report(built, tmp_path), "training_mode") == DROPPING


@pytest.mark.parametrize(("old", "places"), [({}, DROPPING), ({"is_test": 1}, [])])
def test_before_opset_7_only_is_test_means_inference(tmp_path, old, places):
    seen = report(model([drop(**old)], opset=6), tmp_path)
    assert found(seen, "training_mode") == places


@pytest.mark.parametrize(
    ("nodes", "places"),
    [
        ([node("Constant", [], ["flag"], value_int=0), node("Cast", ["flag"], ["b"], to=9)], []),
        ([node("Identity", ["yes"], ["b"])], DROPPING),
        ([node("Identity", ["no"], ["c"]), node("Identity", ["c"], ["b"])], []),
        ([node("Not", ["no"], ["b"])], DROPPING),
    ],
)
def test_a_flag_is_followed_to_its_constant_or_distrusted(tmp_path, nodes, places):
    seen = report(model([*nodes, drop("half", "b")], DROP), tmp_path)
    assert found(seen, "training_mode") == places


def test_what_no_output_depends_on_is_no_training(tmp_path):
    unused = drop("half", "yes", outputs=("nowhere",))
    seen = report(model([unused, node("Relu", ["x"], ["y"])], DROP), tmp_path)
    assert found(seen, "training_mode") == []
    assert DROPPING[0] in found(seen, "unused_output")


def test_dropout_inside_a_branch(tmp_path):
    then = helper.make_graph([drop("half", "yes", outputs=("t",))], "then", [], [value("t", None)])
    other = helper.make_graph([node("Neg", ["x"], ["t"])], "else", [], [value("t", None)])
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Cast", ["sum"], ["flag"], to=onnx.TensorProto.BOOL),
        node("If", ["flag"], ["y"], name="if", then_branch=then, else_branch=other),
    ]
    seen = report(model(nodes, DROP), tmp_path)
    assert found(seen, "training_mode") == ["If:if / Dropout:drop"]
    assert seen.operators == {"Cast": 1, "Dropout": 1, "If": 1, "Neg": 1, "ReduceSum": 1}


def test_an_attribute_that_a_function_is_called_with(tmp_path):
    inner = node("BatchNormalization", ["a", "s", "s", "s", "s"], ["b"], name="norm")
    inner.attribute.add(name="training_mode", ref_attr_name="training_mode", type=2)
    constant = node("Constant", [], ["s"], value=numpy_helper.from_array(ONES["scale"]))
    opsets = [helper.make_opsetid("", 17)]
    norms = helper.make_function(
        "my", "Norm", ["a"], ["b"], [constant, inner], opsets, ["training_mode"]
    )
    for training in (0, 1):
        call = node("Norm", ["x"], ["y"], domain="my", training_mode=training)
        seen = report(model([call], functions=[norms], domains=["my"]), tmp_path)
        assert len(found(seen, "training_mode")) == training
        assert found(seen, "domain") == []
        assert seen.operators == {"BatchNormalization": 1, "Constant": 1}


RANDOM = {
    "Bernoulli": node("Bernoulli", ["x"], ["r"]),
    "RandomNormalLike": node("RandomNormalLike", ["x"], ["r"]),
    "RandomUniformLike": node("RandomUniformLike", ["x"], ["r"]),
    "RandomNormal": node("RandomNormal", [], ["r"], shape=[1, 4]),
    "RandomUniform": node("RandomUniform", [], ["r"], shape=[1, 4]),
    "Multinomial": node("Multinomial", ["x"], ["r"], dtype=1, sample_size=4),
}


class Plain(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x).relu()


class Draws(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Drops(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, training=True)


class Lstm(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize(
    ("reference", "told"),
    [(Plain(), True), (nn.Dropout(), True), (Lstm(4, 4), True), (Draws(), False), (Drops(), False)],
)
def test_random_numbers_are_told_unless_the_model_draws_too(tmp_path, kind, reference, told):
    seen = report(model([RANDOM[kind], node("Add", ["x", "r"], ["y"])]), tmp_path, reference)
    assert bool(found(seen, "training_mode")) is told


def test_a_model_that_normalises_by_the_batch_itself(tmp_path):
    class Norm(nn.Module):
        def __init__(self, tracked):
            super().__init__()
            self.norm = nn.BatchNorm1d(4, track_running_stats=tracked)

        def forward(self, x):
            return self.norm(x)

    built = model([norm("y", "m", "v", training_mode=1)], ONES)
    assert found(report(built, tmp_path, Norm(True)), "training_mode") == TRAINING
    assert found(report(built, tmp_path, Norm(False)), "training_mode") == []
