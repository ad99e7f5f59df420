from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from gate.weights.findings import _QUANTIZED as QUANTIZED
from tests.measure.graph.build import DOUBLE, FLOAT, HALF, found, model, node, report, value

WEIGHT = np.asarray([[0.1, 0.2, 0.3, 0.4]], np.float32)
BFLOAT = TensorProto.BFLOAT16


def to(source, target, kind):
    return node("Cast", [source], [target], name=f"to_{target}", to=kind)


def island(kind):
    """x, rounded and doubled in another type."""
    return [to("x", "a", kind), node("Add", ["a", "a"], ["b"], name="add"), to("b", "y", FLOAT)]


class Casts(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return x.to(self.kind).float()


@pytest.mark.parametrize(
    ("kind", "code", "same"),
    [
        (HALF, "float16", torch.float16),
        (BFLOAT, "float16", torch.bfloat16),
        (DOUBLE, "float64", torch.float64),
    ],
)
def test_an_island_is_told_unless_the_model_has_it_too(tmp_path, kind, code, same):
    seen = report(model(island(kind)), tmp_path)
    assert {finding.code for finding in seen.findings} == {code}
    (finding,) = seen.findings
    assert finding.place == ("Add:add" if code == "float64" else "Cast:to_a")
    assert "1 Add" in finding.detail_params["operators"]
    assert found(report(model(island(kind)), tmp_path, Casts(same)), code) == []
    assert found(report(model(island(kind)), tmp_path, Casts(torch.float32)), code) != []


@pytest.mark.parametrize("kind", [TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2])
def test_eight_bits_are_an_island_too(tmp_path, kind):
    nodes = [to("x", "a", kind), to("a", "y", FLOAT)]
    assert found(report(model(nodes, opset=19), tmp_path), "float16") == ["Cast:to_a"]


def test_rounding_alone_is_an_island_of_half_but_none_of_double(tmp_path):
    for kind, places in ((HALF, ["Cast:to_a"]), (DOUBLE, [])):
        seen = report(model([to("x", "a", kind), to("a", "y", FLOAT)]), tmp_path)
        assert found(seen, "float16") + found(seen, "float64") == places


def test_inputs_that_are_half_and_widened_lose_nothing(tmp_path):
    made = model([to("x", "y", FLOAT)], inputs=[value("x", kind=HALF)])
    assert report(made, tmp_path).findings == ()


class Holds(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        (torch.from_numpy(WEIGHT), True),
        (torch.from_numpy(WEIGHT).half().float(), False),
        (torch.from_numpy(WEIGHT).half(), False),
        (torch.zeros(5), True),
    ],
)
def test_weights_stored_in_half_must_have_been_so(tmp_path, reference, told):
    nodes = [to("w", "v", FLOAT), node("Mul", ["x", "v"], ["y"])]
    seen = report(model(nodes, {"w": WEIGHT.astype(np.float16)}), tmp_path, Holds(reference))
    assert found(seen, "float16") == (["w"] if told else [])


def test_a_weight_that_is_only_moved_in_half_is_not_computed_in_it(tmp_path):
    nodes = [
        node("Transpose", ["w"], ["t"]), node("Reshape", ["t", "shape"], ["r"]), to("r", "v", FLOAT),
        node("Mul", ["x", "v"], ["y"]),
    ]  # fmt: skip
    weights = {"w": WEIGHT.astype(np.float16), "shape": np.asarray([1, 4])}
    exact = Holds(torch.from_numpy(WEIGHT).half())
    assert report(model(nodes, weights), tmp_path, exact).findings == ()


def test_a_single_number_in_half_is_told_too(tmp_path):
    scale = {"w": np.asarray([0.1], np.float16)}
    nodes = [to("w", "v", FLOAT), node("Mul", ["x", "v"], ["y"])]
    exact = Holds(torch.tensor([0.1]).half())
    assert found(report(model(nodes, scale), tmp_path, Holds(torch.tensor([0.1]))), "float16") == [
        "w"
    ]
    assert found(report(model(nodes, scale), tmp_path, exact), "float16") == []


def test_an_island_in_a_branch(tmp_path):
    half = [to("x", "h", HALF), node("Relu", ["h"], ["r"]), to("r", "t", FLOAT)]
    then = helper.make_graph(half, "then", [], [value("t", None)])
    other = helper.make_graph([node("Neg", ["x"], ["t"])], "else", [], [value("t", None)])
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        to("sum", "flag", TensorProto.BOOL),
        node("If", ["flag"], ["y"], name="if", then_branch=then, else_branch=other),
    ]
    assert found(report(model(nodes), tmp_path), "float16") == ["If:if / Cast:to_h"]


def test_double_arithmetic_of_shapes_is_no_island(tmp_path):
    """What `interpolate(scale_factor=1.5)` leaves: sizes in double precision."""
    nodes = [
        node("Shape", ["x"], ["shape"]),
        to("shape", "wide", DOUBLE),
        node("Mul", ["wide", "scale"], ["larger"]),
        node("Floor", ["larger"], ["floor"]),
        to("floor", "size", TensorProto.INT64),
        node("Expand", ["x", "size"], ["y"]),
    ]
    made = model(nodes, {"scale": np.asarray([1.0, 1.0])})
    assert report(made, tmp_path).findings == ()


def test_a_weight_in_double_is_an_island(tmp_path):
    nodes = [
        node("Mul", ["w", "two"], ["v"], name="mul"), to("v", "f", FLOAT),
        node("MatMul", ["x", "f"], ["y"]),
    ]  # fmt: skip
    made = model(nodes, {"w": np.ones((4, 4)), "two": np.asarray(2.0)})
    assert found(report(made, tmp_path), "float64") == ["Mul:mul"]


def test_an_island_in_a_loop(tmp_path):
    body = helper.make_graph(
        [to("in", "d", DOUBLE), node("Sqrt", ["d"], ["e"], name="sqrt"), to("e", "out", FLOAT),
         node("Identity", ["go"], ["on"])],
        "body",
        [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("in")],
        [value("on", [], TensorProto.BOOL), value("out")],
    )  # fmt: skip
    nodes = [node("Loop", ["n", "yes", "x"], ["y"], name="loop", body=body)]
    made = model(nodes, {"n": np.asarray(2), "yes": np.asarray(True)})
    assert found(report(made, tmp_path), "float64") == ["Loop:loop / Sqrt:sqrt"]


def quantized_model():
    nodes = [
        node("QuantizeLinear", ["x", "scale"], ["q"], name="quantize"),
        node("DequantizeLinear", ["q", "scale"], ["y"], name="unpack"),
    ]
    return model(nodes, {"scale": np.asarray(0.1, np.float32)})


def test_operators_on_integers_of_few_bits_are_told(tmp_path):
    (finding,) = report(quantized_model(), tmp_path).findings
    assert (finding.code, finding.place) == ("quantized", "QuantizeLinear:quantize")
    assert finding.detail_code == "quantized_nodes"
    assert finding.detail_params["count"] == 2
    assert "1 DequantizeLinear" in finding.detail_params["operators"]


@pytest.mark.parametrize(
    ("operator", "told"),
    [
        ("DynamicQuantizeLinear", True), ("DequantizeLinear", True), ("QLinearConv", True), ("ConvInteger", True),
        ("MatMulInteger", True), ("com.microsoft::QGemm", True), ("com.microsoft::QAttention", True),
        ("com.microsoft::MatMulNBits", True), ("com.microsoft::DynamicQuantizeMatMul", True),
        ("com.microsoft::QLinearAdd", True), ("Conv", False), ("Quantile", False), ("Equal", False),
        ("com.microsoft::FusedConv", False), ("com.microsoft::QuickGelu", False),
    ],
)  # fmt: skip
def test_which_operators_compute_in_integers(operator, told):
    assert bool(QUANTIZED.fullmatch(operator)) is told


@pytest.mark.parametrize(("count", "told"), [(64, True), (4, False)])
def test_weights_of_eight_bits_are_told(tmp_path, count, told):
    """Stored in int8, cast and scaled: as some quantizers write weights."""
    nodes = [
        to("w", "f", FLOAT),
        node("Mul", ["f", "scale"], ["g"], name="scaled"),
        node("ReduceSum", ["g"], ["s"], name="sum", keepdims=0),
        node("Add", ["x", "s"], ["y"], name="add"),
    ]
    weights = {"w": np.ones(count, np.int8), "scale": np.asarray(0.1, np.float32)}
    seen = report(model(nodes, weights), tmp_path)
    assert bool([f for f in seen.findings if f.code == "quantized"]) is told


class Masked(nn.Module):
    """Holds a mask of bytes itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(64, dtype=torch.uint8))

    def forward(self, x):
        return x + 0.1 * self.mask.float().sum()


def test_bytes_that_the_model_holds_itself_are_its_own(tmp_path):
    nodes = [
        to("w", "f", FLOAT),
        node("ReduceSum", ["f"], ["s"], name="sum", keepdims=0),
        node("Add", ["x", "s"], ["y"], name="add"),
    ]
    weights = {"w": np.ones(64, np.uint8)}
    assert found(report(model(nodes, weights), tmp_path, Masked()), "quantized") == []
    assert found(report(model(nodes, weights), tmp_path), "quantized") != []
