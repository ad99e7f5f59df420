from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from tests.measure.graph.build import found, model, node, report, value

ZERO = np.zeros((4, 4), np.float32)
BIG = np.zeros((64, 64), np.float32)
NAN = np.full((4, 4), np.nan, np.float32)


class Holds(nn.Module):
    """The identity, with tensors that tests give it."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def forward(self, x):
        return x


def parameter(*shape, fill=0.0):
    return nn.Parameter(torch.full(shape, fill))


def zeroed(weights, nodes=None, reference=None, *, folder, **settings):
    made = model(nodes or [node("MatMul", ["x", "w"], ["y"])], weights, **settings)
    return found(report(made, folder, reference), "zero_initializer")


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ([node("MatMul", ["x", "w"], ["y"])], True),
        ([node("MatMul", ["w", "x"], ["y"])], True),
        ([node("Gemm", ["x", "w"], ["y"], transB=1)], True),
        ([node("Identity", ["w"], ["v"]), node("MatMul", ["x", "v"], ["y"])], True),
        ([node("Transpose", ["w"], ["v"]), node("Gemm", ["x", "v"], ["y"])], True),
        ([node("Add", ["x", "w"], ["y"])], False),
        ([node("Mul", ["x", "w"], ["y"])], False),
        ([node("Gather", ["w", "i"], ["g"]), node("Add", ["x", "g"], ["y"])], False),
        ([node("Relu", ["x"], ["y"]), node("MatMul", ["x", "w"], ["unused"])], False),
    ],
)
def test_a_weight_that_is_all_zero(tmp_path, nodes, told):
    places = zeroed({"w": ZERO, "i": np.asarray([0])}, nodes, folder=tmp_path)
    assert places == (["w"] if told else [])


def test_zero_weights_of_convolutions_lstms_and_constants(tmp_path):
    image = [value("x", ("b", 2, 5, 5))]
    conv = [node("Conv", ["x", "w", "w1"], ["y"])]
    weights = {"w": np.zeros((3, 2, 3, 3), np.float32), "w1": np.zeros(3, np.float32)}
    result = [value("y", ("b", 3, 3, 3))]
    assert zeroed(weights, conv, folder=tmp_path, inputs=image, outputs=result) == ["w"]

    sequence = [value("x", (5, "b", 4))]
    state = np.zeros((1, 1, 2), np.float32)
    lstm = {"w": np.ones((1, 8, 4), np.float32), "r": np.zeros((1, 8, 2), np.float32), "h": state}
    nodes = [node("LSTM", ["x", "w", "r", "", "", "h", "h"], ["", "y"], hidden_size=2)]
    result = [value("y", (1, "b", 2))]
    assert zeroed(lstm, nodes, folder=tmp_path, inputs=sequence, outputs=result) == ["r"]

    constant = node("Constant", [], ["w"], value=numpy_helper.from_array(BIG[:4]))
    nodes = [constant, node("MatMul", ["x", "w"], ["z"]), node("MatMul", ["z", "v"], ["y"])]
    places = zeroed({"v": np.ones((64, 4), np.float32)}, nodes, folder=tmp_path)
    assert places == ["w"]


@pytest.mark.parametrize(
    "weight",
    [
        np.where(np.arange(16) == 7, np.float32(1e-40), np.float32(0)).reshape(4, 4),
        np.zeros((4, 1, 4), np.float32)[:, 0] + np.float32(1),
    ],
)
def test_one_element_that_is_not_zero_is_enough(tmp_path, weight):
    assert zeroed({"w": weight}, folder=tmp_path) == []


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        (Holds(), True),
        (Holds(w=parameter(4, 4)), False),
        (Holds(w=parameter(16)), False),
        (Holds(w=parameter(17)), True),
        (Holds(w=parameter(4, 4, fill=1.0)), True),
        (Holds(w=nn.Parameter(torch.cat([torch.ones(8, 4), torch.zeros(4, 4)]))), False),
        (Holds(w=nn.Parameter(torch.cat([torch.ones(8, 4), torch.zeros(3, 4)]))), True),
        (Holds(plain=torch.zeros(4, 4)), False),
        (Holds(scale=parameter(4)), False),
        (Holds(scale=parameter(5)), True),
        (Holds(bias=parameter(4)), True),
        (Holds(class_token=parameter(1, 1, 4)), True),
        (nn.Sequential(nn.BatchNorm1d(4)), True),
        (Holds(lora=parameter(4, 2)), False),
    ],
    ids=str,
)
def test_what_the_reference_has_explains_zeros(tmp_path, reference, told):
    assert zeroed({"w": ZERO}, reference=reference, folder=tmp_path) == (["w"] if told else [])


def test_a_residual_branch_that_starts_at_zero(tmp_path):
    """Folding the zero scale of a BatchNorm makes a weight of zeros that no parameter is."""
    block = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4))
    image = [value("x", ("b", 4, 5, 5))], [value("y", ("b", 4, 3, 3))]
    weights = {"w": np.zeros((4, 4, 3, 3), np.float32)}
    batch = {"x": np.ones((3, 4, 5, 5), np.float32)}
    made = model([node("Conv", ["x", "w"], ["y"])], weights, inputs=image[0], outputs=image[1])
    assert found(report(made, tmp_path, block, batch=batch), "zero_initializer") == ["w"]
    nn.init.zeros_(block[1].weight)
    assert found(report(made, tmp_path, block, batch=batch), "zero_initializer") == []


def spoiled(number, *, at=5):
    weight = np.ones((4, 4), np.float32)
    weight.flat[at] = number
    return weight


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ([node("MatMul", ["x", "w"], ["y"])], True),
        ([node("Gemm", ["x", "v", "w"], ["y"])], True),
        ([node("Transpose", ["w"], ["t"]), node("MatMul", ["x", "t"], ["y"])], True),
        ([node("Add", ["x", "w"], ["y"])], False),
        ([node("Where", ["flag", "w", "x"], ["y"])], False),
        ([node("Max", ["x", "w"], ["y"])], False),
        ([node("Add", ["x", "w"], ["s"]), node("Softmax", ["s"], ["y"])], False),
        ([node("Relu", ["x"], ["y"])], False),
    ],
)
def test_weights_that_are_not_finite_and_masks_that_may_be(tmp_path, number, nodes, told):
    weights = {"w": spoiled(number), "v": np.ones((4, 4), np.float32), "flag": np.asarray(True)}
    seen = report(model(nodes, weights), tmp_path)
    assert found(seen, "nonfinite_initializer") == (["w"] if told else [])


@pytest.mark.parametrize(("number", "told"), [(np.nan, True), (-np.inf, False)])
def test_a_row_of_an_embedding_that_no_sample_may_reach(tmp_path, number, told):
    nodes = [node("Gather", ["w", "i"], ["g"]), node("Add", ["x", "g"], ["y"])]
    seen = report(model(nodes, {"w": spoiled(number), "i": np.asarray([0])}), tmp_path)
    assert found(seen, "nonfinite_initializer") == (["w"] if told else [])


@pytest.mark.parametrize("slot", ["scale", "bias", "mean", "var"])
def test_statistics_of_normalisation(tmp_path, slot):
    weights = {name: np.ones(4, np.float32) for name in ("scale", "bias", "mean", "var")}
    weights[slot] = np.asarray([1, np.inf, 1, 1], np.float32)
    seen = report(model([node("BatchNormalization", ["x", *weights], ["y"])], weights), tmp_path)
    assert found(seen, "nonfinite_initializer") == [slot]
    params = [each.detail_params for each in seen.findings]
    assert {"size": 4, "nans": 0, "infinities": 1} in params


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_other_floats_are_read_too(tmp_path, kind):
    nodes = [node("Cast", ["w"], ["v"], to=1), node("MatMul", ["x", "v"], ["y"])]
    seen = report(model(nodes, {"w": spoiled(np.nan).astype(kind)}), tmp_path)
    assert found(seen, "nonfinite_initializer") == ["w"]


def test_a_reference_that_is_not_finite_either(tmp_path):
    made = model([node("MatMul", ["x", "w"], ["y"])], {"w": NAN})
    same = Holds(w=parameter(4, 4, fill=float("nan")))
    mask = Holds(mask=parameter(3, 3, fill=-float("inf")))
    assert found(report(made, tmp_path, same), "nonfinite_initializer") == []
    assert found(report(made, tmp_path, mask), "nonfinite_initializer") == ["w"]


def test_a_big_weight_is_counted_in_pieces(tmp_path):
    big = np.ones((1100, 1000), np.float32)
    big[1099, 999] = np.nan
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    sizes = {"inputs": [value("x", ("b", 1100))], "outputs": [value("y", ("b", 1000))]}
    seen = report(model(nodes, {"w": big}, **sizes), tmp_path)
    assert found(seen, "nonfinite_initializer") == ["w"]
    (finding,) = seen.findings
    assert finding.detail_params == {"size": 1_100_000, "nans": 1, "infinities": 0}
