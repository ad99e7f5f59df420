"""The graph report finds faults in handwritten models: interface, weights, precision, training
mode, data.
"""

from __future__ import annotations

import hashlib

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from gate import Digest, TestedFile
from gate.errors import OnnxFileError
from gate.onnx_file.reading import read_subject
from gate.weights.instrument import read_graph
from tests.measure.graph.build import (
    DOUBLE,
    FLOAT,
    HALF,
    finding_places,
    model,
    node,
    reference_run,
    report,
    value,
)
from tests.modules import Function

RELU = [node("Relu", ["x"], ["y"], name="relu")]
PRODUCT = [node("MatMul", ["x", "w"], ["y"])]
ONES = {name: np.ones(4, np.float32) for name in ("w", "v")}
INTEGER, BOOL, BFLOAT = TensorProto.INT64, TensorProto.BOOL, TensorProto.BFLOAT16


@pytest.fixture
def places(tmp_path):
    """Return a function that gives the places of the findings with a code in a model."""

    def find(code, nodes, weights=None, reference=None, *, batch=None, **settings):
        onnx_model = model(nodes, weights, **settings)
        return finding_places(report(onnx_model, tmp_path, reference, batch=batch), code)

    return find


def branch(name, *nodes):
    return helper.make_graph(nodes, name, [], [value("t", None)])


def if_nodes(then, otherwise):
    """Return nodes that select a branch by the sum of x."""
    branches = {"then_branch": branch("then", then), "else_branch": branch("else", otherwise)}
    return [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Cast", ["sum"], ["flag"], to=BOOL),
        node("If", ["flag"], ["y"], name="if", **branches),
    ]


@pytest.mark.parametrize(
    ("rows_in", "rows_out", "expected"),
    [
        (("b", 4), ("b", 4), []),
        (("b", 4), ("c", 4), []),
        ((3, 4), (3, 4), ["x", "y"]),
        ((3, 4), ("b", 4), ["x"]),
        (("b", 4), (2, 4), ["y"]),
        (("b", 4), (3, 4), []),  # the model returned three rows for three samples
    ],
)
def test_fixed_batch_axis_is_found(places, rows_in, rows_out, expected):
    sizes = {"inputs": [value("x", rows_in)], "outputs": [value("y", rows_out)]}
    assert places("fixed_batch", RELU, **sizes) == expected


def test_output_without_batch_axis_is_not_a_fixed_batch(places):
    with_table = Function(lambda x: (x.relu(), torch.arange(16.0).reshape(4, 4)))
    nodes, table = [*RELU, node("Identity", ["t"], ["table"])], value("table", (4, 4))
    for rows, expected in ((("b", 4), []), ((3, 4), ["x", "y"])):
        sizes = {"inputs": [value("x", rows)], "outputs": [value("y", rows), table]}
        weights = {"t": np.ones((4, 4), np.float32)}
        assert places("fixed_batch", nodes, weights, with_table, **sizes) == expected
    total = [node("ReduceSum", ["x"], ["y"], keepdims=0)]
    scalar = {"outputs": [value("y", [])]}
    assert places("fixed_batch", total, None, Function(torch.sum), **scalar) == []


def test_unused_inputs_weights_and_nodes_are_found(places):
    nodes = [*RELU, node("Neg", ["x"], ["n"], name="neg"), node("Add", ["n", "w"], ["m"])]
    unused = places("unused_output", nodes, ONES, inputs=[value("x"), value("more")])
    assert unused == ["more", "w", "v", "Neg:neg", "Add:m"]


def test_weights_used_only_in_a_branch_are_used(tmp_path):
    nodes = if_nodes(node("Add", ["x", "w"], ["t"]), node("Sub", ["x", "v"], ["t"]))
    assert report(model(nodes, ONES), tmp_path).findings == ()


def test_long_lists_of_findings_are_truncated(tmp_path):
    nodes = [*RELU, *(node("Neg", ["x"], [f"n{i}"]) for i in range(60))]
    observed = report(model(nodes), tmp_path)
    assert (len(observed.findings), observed.nodes) == (50, 61)
    assert observed.findings[-1].detail_params["more"] == 10


def test_operators_of_other_domains_are_listed(tmp_path):
    nodes = [
        node("FusedMatMul", ["x", "w"], ["a"], domain="com.microsoft"),
        node("Gelu", ["a"], ["b"], domain="com.microsoft"),
        node("Gelu", ["b"], ["c"], domain="com.microsoft"),
        node("Scaler", ["c"], ["d"], domain="ai.onnx.ml", offset=[0.0], scale=[1.0]),
        node("Relu", ["d"], ["y"]),
    ]
    domains = ["com.microsoft", "ai.onnx.ml"]
    observed = report(model(nodes, {"w": np.ones((4, 4), np.float32)}, domains=domains), tmp_path)
    assert finding_places(observed, "domain") == domains[::-1]
    params = [each.detail_params for each in observed.findings]
    assert {"count": 3, "operators": ["2 Gelu", "1 FusedMatMul"]} in params
    assert (observed.operators["com.microsoft::Gelu"], observed.operators["Relu"]) == (2, 1)


@pytest.mark.parametrize(("version", "codes"), [
    (12, ["old_opset"]),
    (13, []),
    (18, []),
    (onnx.defs.onnx_opset_version(), ["new_opset"]),
])  # fmt: skip
def test_old_or_too_new_opset_is_found(tmp_path, version, codes):
    observed = report(model(RELU, opset=version), tmp_path)
    assert [each.detail_code for each in observed.findings if each.code == "opset"] == codes
    assert all(each.detail_params["version"] == version for each in observed.findings)


def test_function_with_different_opset_is_found(tmp_path):
    opsets = [helper.make_opsetid("", 17)]
    inner = helper.make_function("my", "F", ["a"], ["b"], [node("Relu", ["a"], ["b"])], opsets)
    call = node("F", ["x"], ["y"], domain="my")
    observed = report(model([call], opset=18, functions=[inner], domains=["my"]), tmp_path)
    (finding,) = observed.findings
    assert (finding.code, finding.place) == ("opset", "opset_import")
    assert finding.detail_params == {"versions": [17, 18]}
    assert observed.operators == {"Relu": 1}


class Holder(nn.Module):
    """An identity module that holds the given tensors."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def forward(self, x):
        return x


def hold_weight(weight):
    return Holder(weight=nn.Parameter(weight))


def parameter(*shape, fill=0.0):
    return nn.Parameter(torch.full(shape, fill))


ZERO = np.zeros((4, 4), np.float32)


@pytest.mark.parametrize(("nodes", "is_reported"), [
    (PRODUCT, True),
    ([node("MatMul", ["w", "x"], ["y"])], True),
    ([node("Gemm", ["x", "w"], ["y"], transB=1)], True),
    ([node("Identity", ["w"], ["v"]), node("MatMul", ["x", "v"], ["y"])], True),
    ([node("Transpose", ["w"], ["v"]), node("Gemm", ["x", "v"], ["y"])], True),
    ([node("Add", ["x", "w"], ["y"])], False),
    ([node("Mul", ["x", "w"], ["y"])], False),
    ([node("Gather", ["w", "i"], ["g"]), node("Add", ["x", "g"], ["y"])], False),
    ([node("Relu", ["x"], ["y"]), node("MatMul", ["x", "w"], ["unused"])], False),
])  # fmt: skip
def test_all_zero_weight_of_a_product_is_found(places, nodes, is_reported):
    weights = {"w": ZERO, "i": np.asarray([0])}
    assert places("zero_initializer", nodes, weights) == (["w"] if is_reported else [])


STATE = np.zeros((1, 1, 2), np.float32)
LAYERS = {
    "convolution": (
        [node("Conv", ["x", "w", "w1"], ["y"])],
        {"w": np.zeros((3, 2, 3, 3), np.float32), "w1": np.zeros(3, np.float32)},
        ("b", 2, 5, 5), ("b", 3, 3, 3), "w"),
    "LSTM": (
        [node("LSTM", ["x", "w", "r", "", "", "h", "h"], ["", "y"], hidden_size=2)],
        {"w": np.ones((1, 8, 4), np.float32), "r": np.zeros((1, 8, 2), np.float32), "h": STATE},
        (5, "b", 4), (1, "b", 2), "r"),
    "constant": (
        [node("Constant", [], ["w"], value=numpy_helper.from_array(np.zeros((4, 64), np.float32))),
         node("MatMul", ["x", "w"], ["z"]), node("MatMul", ["z", "v"], ["y"])],
        {"v": np.ones((64, 4), np.float32)}, ("b", 4), ("b", 4), "w"),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "weights", "x", "y", "name"), LAYERS.values(), ids=LAYERS)
def test_zero_weights_of_convolutions_lstms_and_constants_are_found(
    places, nodes, weights, x, y, name
):
    sizes = {"inputs": [value("x", x)], "outputs": [value("y", y)]}
    assert places("zero_initializer", nodes, weights, **sizes) == [name]


@pytest.mark.parametrize("weight", [
    np.where(np.arange(16) == 7, np.float32(1e-40), np.float32(0)).reshape(4, 4),
    np.zeros((4, 1, 4), np.float32)[:, 0] + np.float32(1),
])  # fmt: skip
def test_weight_with_one_nonzero_element_is_no_finding(places, weight):
    assert places("zero_initializer", PRODUCT, {"w": weight}) == []


@pytest.mark.parametrize(("reference", "is_reported"), [
    (Holder(), True),
    (Holder(w=parameter(4, 4)), False),
    (Holder(w=parameter(16)), False),
    (Holder(w=parameter(17)), True),
    (Holder(w=parameter(4, 4, fill=1.0)), True),
    (Holder(w=nn.Parameter(torch.cat([torch.ones(8, 4), torch.zeros(4, 4)]))), False),
    (Holder(w=nn.Parameter(torch.cat([torch.ones(8, 4), torch.zeros(3, 4)]))), True),
    (Holder(plain=torch.zeros(4, 4)), False),
    (Holder(scale=parameter(4)), False),
    (Holder(scale=parameter(5)), True),
    (Holder(bias=parameter(4)), True),
    (Holder(class_token=parameter(1, 1, 4)), True),
    (nn.Sequential(nn.BatchNorm1d(4)), True),
    (Holder(lora=parameter(4, 2)), False),
], ids=str)  # fmt: skip
def test_zero_weight_of_the_reference_is_no_finding(places, reference, is_reported):
    expected = ["w"] if is_reported else []
    assert places("zero_initializer", PRODUCT, {"w": ZERO}, reference) == expected


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_folded_zero_batch_norm_scale_is_no_finding(places, scale):
    """Accept a zero weight: it results from folding a BatchNorm with zero scale."""
    block = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4))
    nn.init.constant_(block[1].weight, scale)
    observed = places(
        "zero_initializer", [node("Conv", ["x", "w"], ["y"])],
        {"w": np.zeros((4, 4, 3, 3), np.float32)}, block,
        batch={"x": np.ones((3, 4, 5, 5), np.float32)},
        inputs=[value("x", ("b", 4, 5, 5))], outputs=[value("y", ("b", 4, 3, 3))],
    )  # fmt: skip
    assert observed == (["w"] if scale else [])


def make_weight_with(number):
    weight = np.ones((4, 4), np.float32)
    weight.flat[5] = number
    return weight


NONFINITE = {
    "w": make_weight_with,
    "v": lambda _: np.ones((4, 4), np.float32),
    "flag": lambda _: np.asarray(True),
    "i": lambda _: np.asarray([0]),
}


@pytest.mark.parametrize("number", [np.nan, -np.inf])
@pytest.mark.parametrize(("nodes", "reported"), [
    (PRODUCT, (True, True)),
    ([node("Gemm", ["x", "v", "w"], ["y"])], (True, True)),
    ([node("Transpose", ["w"], ["t"]), node("MatMul", ["x", "t"], ["y"])], (True, True)),
    ([node("Add", ["x", "w"], ["y"])], (False, False)),
    ([node("Where", ["flag", "w", "x"], ["y"])], (False, False)),
    ([node("Max", ["x", "w"], ["y"])], (False, False)),
    ([node("Add", ["x", "w"], ["s"]), node("Softmax", ["s"], ["y"])], (False, False)),
    ([node("Relu", ["x"], ["y"])], (False, False)),
    ([node("Gather", ["w", "i"], ["g"]), node("Add", ["x", "g"], ["y"])], (True, False)),
])  # fmt: skip
def test_nonfinite_weights_are_found_but_not_masks(places, number, nodes, reported):
    """Find NaN in a row of an embedding too; infinity may be a mask there."""
    weights = {name: make(number) for name, make in NONFINITE.items()}
    expected = ["w"] if reported[0 if np.isnan(number) else 1] else []
    assert places("nonfinite_initializer", nodes, weights) == expected


@pytest.mark.parametrize("slot", ["scale", "var"])
def test_nonfinite_batch_norm_statistics_are_found(tmp_path, slot):
    weights = NORM_WEIGHTS | {slot: np.asarray([1, np.inf, 1, 1], np.float32)}
    observed = report(model([norm_node("y")], weights), tmp_path)
    assert finding_places(observed, "nonfinite_initializer") == [slot]
    params = [each.detail_params for each in observed.findings]
    assert {"size": 4, "nans": 0, "infinities": 1} in params


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_nonfinite_float16_and_float64_weights_are_found(places, kind):
    nodes = [node("Cast", ["w"], ["v"], to=1), node("MatMul", ["x", "v"], ["y"])]
    weights = {"w": make_weight_with(np.nan).astype(kind)}
    assert places("nonfinite_initializer", nodes, weights) == ["w"]


def test_nonfinite_weight_of_the_reference_is_no_finding(places):
    weights = {"w": np.full((4, 4), np.nan, np.float32)}
    same = Holder(w=parameter(4, 4, fill=float("nan")))
    mask = Holder(mask=parameter(3, 3, fill=-float("inf")))
    assert places("nonfinite_initializer", PRODUCT, weights, same) == []
    assert places("nonfinite_initializer", PRODUCT, weights, mask) == ["w"]


def test_large_weight_is_counted_in_chunks(tmp_path):
    big = np.ones((1100, 1000), np.float32)
    big[1099, 999] = np.nan
    sizes = {"inputs": [value("x", ("b", 1100))], "outputs": [value("y", ("b", 1000))]}
    (finding,) = report(model(PRODUCT, {"w": big}, **sizes), tmp_path).findings
    assert (finding.code, finding.place) == ("nonfinite_initializer", "w")
    assert finding.detail_params == {"size": 1_100_000, "nans": 1, "infinities": 0}


WEIGHT = np.asarray([[0.1, 0.2, 0.3, 0.4]], np.float32)


def cast_node(source, target, kind):
    return node("Cast", [source], [target], name=f"to_{target}", to=kind)


@pytest.mark.parametrize(("kind", "code", "same"), [
    (HALF, "float16", torch.float16),
    (BFLOAT, "float16", torch.bfloat16),
    (DOUBLE, "float64", torch.float64),
])  # fmt: skip
def test_low_precision_island_is_found_unless_the_model_has_it(tmp_path, places, kind, code, same):
    nodes = [
        cast_node("x", "a", kind),
        node("Add", ["a", "a"], ["b"], name="add"),
        cast_node("b", "y", FLOAT),
    ]
    (finding,) = report(model(nodes), tmp_path).findings
    place = "Add:add" if code == "float64" else "Cast:to_a"
    assert (finding.code, finding.place) == (code, place)
    assert "1 Add" in finding.detail_params["operators"]
    for dtype, expected in ((same, []), (torch.float32, [place])):
        reference = Function(lambda x, dtype=dtype: x.to(dtype).float())
        assert places(code, nodes, None, reference) == expected


@pytest.mark.parametrize(("kind", "expected"), [
    (TensorProto.FLOAT8E5M2, ["Cast:to_a"]),
    (HALF, ["Cast:to_a"]),
    (DOUBLE, []),
])  # fmt: skip
def test_cast_alone_is_an_island_for_float8_and_float16_only(tmp_path, kind, expected):
    nodes = [cast_node("x", "a", kind), cast_node("a", "y", FLOAT)]
    findings = report(model(nodes, opset=19), tmp_path).findings
    assert [(f.code, f.place) for f in findings] == [("float16", place) for place in expected]


def test_float16_input_cast_to_float32_is_no_finding(tmp_path):
    onnx_model = model([cast_node("x", "y", FLOAT)], inputs=[value("x", kind=HALF)])
    assert report(onnx_model, tmp_path).findings == ()


@pytest.mark.parametrize(("weight", "reference", "is_reported"), [
    (WEIGHT, torch.from_numpy(WEIGHT), True),
    (WEIGHT, torch.from_numpy(WEIGHT).half().float(), False),
    (WEIGHT, torch.from_numpy(WEIGHT).half(), False),
    (WEIGHT, torch.zeros(5), True),
    (WEIGHT[0, :1], torch.tensor([0.1]), True),
    (WEIGHT[0, :1], torch.tensor([0.1]).half(), False),
])  # fmt: skip
def test_float16_weights_are_found_unless_the_model_has_them(
    places, weight, reference, is_reported
):
    nodes = [cast_node("w", "v", FLOAT), node("Mul", ["x", "v"], ["y"])]
    observed = places("float16", nodes, {"w": weight.astype(np.float16)}, hold_weight(reference))
    assert observed == (["w"] if is_reported else [])


def test_float16_weight_that_is_only_moved_is_no_finding(tmp_path):
    nodes = [
        node("Transpose", ["w"], ["t"]), node("Reshape", ["t", "shape"], ["r"]), cast_node("r", "v", FLOAT),
        node("Mul", ["x", "v"], ["y"]),
    ]  # fmt: skip
    weights = {"w": WEIGHT.astype(np.float16), "shape": np.asarray([1, 4])}
    exact = hold_weight(torch.from_numpy(WEIGHT).half())
    assert report(model(nodes, weights), tmp_path, exact).findings == ()


def test_float64_shape_arithmetic_is_no_finding(tmp_path):
    """Accept float64 sizes, as `interpolate(scale_factor=1.5)` exports them."""
    nodes = [
        node("Shape", ["x"], ["shape"]), cast_node("shape", "wide", DOUBLE),
        node("Mul", ["wide", "scale"], ["larger"]), node("Floor", ["larger"], ["floor"]),
        cast_node("floor", "size", INTEGER), node("Expand", ["x", "size"], ["y"]),
    ]  # fmt: skip
    onnx_model = model(nodes, {"scale": np.asarray([1.0, 1.0])})
    assert report(onnx_model, tmp_path).findings == ()


def test_float64_weight_is_found(places):
    nodes = [
        node("Mul", ["w", "two"], ["v"], name="mul"), cast_node("v", "f", FLOAT),
        node("MatMul", ["x", "f"], ["y"]),
    ]  # fmt: skip
    weights = {"w": np.ones((4, 4)), "two": np.asarray(2.0)}
    assert places("float64", nodes, weights) == ["Mul:mul"]


def test_float64_island_in_a_loop_is_found(places):
    body = helper.make_graph(
        [cast_node("in", "d", DOUBLE), node("Sqrt", ["d"], ["e"], name="sqrt"), cast_node("e", "out", FLOAT),
         node("Identity", ["go"], ["on"])],
        "body",
        [value("i", [], INTEGER), value("go", [], BOOL), value("in")],
        [value("on", [], BOOL), value("out")],
    )  # fmt: skip
    nodes = [node("Loop", ["n", "yes", "x"], ["y"], name="loop", body=body)]
    weights = {"n": np.asarray(2), "yes": np.asarray(True)}
    assert places("float64", nodes, weights) == ["Loop:loop / Sqrt:sqrt"]


def test_quantized_operators_are_found(tmp_path):
    nodes = [
        node("QuantizeLinear", ["x", "scale"], ["q"], name="quantize"),
        node("DequantizeLinear", ["q", "scale"], ["y"], name="unpack"),
    ]
    quantized_model = model(nodes, {"scale": np.asarray(0.1, np.float32)})
    (finding,) = report(quantized_model, tmp_path).findings
    assert (finding.code, finding.place) == ("quantized", "QuantizeLinear:quantize")
    assert finding.detail_code == "quantized_nodes"
    assert finding.detail_params["count"] == 2
    assert "1 DequantizeLinear" in finding.detail_params["operators"]


@pytest.mark.parametrize(("name", "is_reported"), [
    *((name, True) for name in (
        "DynamicQuantizeLinear", "DequantizeLinear", "QLinearConv", "ConvInteger", "MatMulInteger",
        "QGemm", "QAttention", "MatMulNBits", "DynamicQuantizeMatMul", "QLinearAdd",
    )),
    *((name, False) for name in ("Conv", "Quantile", "Equal", "FusedConv", "QuickGelu")),
])  # fmt: skip
def test_names_of_quantized_operators(places, name, is_reported):
    nodes = [node(name, ["x"], ["y"], domain="com.microsoft", name="n")]
    expected = [f"{name}:n"] if is_reported else []
    assert places("quantized", nodes, domains=["com.microsoft"]) == expected


MASKED = Holder(mask=nn.Buffer(torch.ones(64, dtype=torch.uint8)))


@pytest.mark.parametrize(("dtype", "count", "reference", "is_reported"), [
    (np.int8, 64, None, True),
    (np.int8, 4, None, False),
    (np.uint8, 64, None, True),
    (np.uint8, 64, MASKED, False),
])  # fmt: skip
def test_int8_weights_are_found_unless_the_model_has_them(
    places, dtype, count, reference, is_reported
):
    """Find weights stored in int8, then cast and scaled, as some quantizers write them."""
    nodes = [
        cast_node("w", "f", FLOAT),
        node("Mul", ["f", "scale"], ["g"], name="scaled"),
        node("ReduceSum", ["g"], ["s"], name="sum", keepdims=0),
        node("Add", ["x", "s"], ["y"], name="add"),
    ]
    weights = {"w": np.ones(count, dtype), "scale": np.asarray(0.1, np.float32)}
    assert bool(places("quantized", nodes, weights, reference)) is is_reported


NORM_WEIGHTS = {name: np.ones(4, np.float32) for name in ("scale", "bias", "mean", "var")}
WEIGHTS = NORM_WEIGHTS | {
    "half": np.asarray(0.5, np.float32), "none": np.asarray(0.0, np.float32),
    "yes": np.asarray(True), "no": np.asarray(False),
}  # fmt: skip


def norm_node(*outputs, **attributes):
    return node(
        "BatchNormalization", ["x", *NORM_WEIGHTS], list(outputs), name="norm", **attributes
    )


def dropout_node(*inputs, outputs=("y",), **attributes):
    return node("Dropout", ["x", *inputs], list(outputs), name="drop", **attributes)


TRAINING = ["BatchNormalization:norm"]
DROPPING = ["Dropout:drop"]


@pytest.mark.parametrize(("built", "opset", "expected"), [
    (norm_node("y"), 17, []),
    (norm_node("y", training_mode=0), 17, []),
    (norm_node("y", "m", "v", training_mode=1), 17, TRAINING),
    (norm_node("y", training_mode=1), 14, TRAINING),
    (norm_node("y"), 13, []),
    (norm_node("y", "m", "v", "sm", "sv"), 13, TRAINING),
    (norm_node("y", "m", "v", "sm", "sv"), 9, TRAINING),
    (dropout_node(), 17, []),
    (dropout_node("half"), 17, []),
    (dropout_node("half", "no"), 17, []),
    (dropout_node("half", "yes"), 17, DROPPING),
    (dropout_node("", "yes"), 13, DROPPING),
    (dropout_node("none", "yes"), 17, []),
    (dropout_node(), 10, []),
    (dropout_node(outputs=("y", "mask")), 10, []),
    (dropout_node(), 6, DROPPING),
    (dropout_node(is_test=1), 6, []),
])  # fmt: skip
def test_training_mode_of_batch_norm_and_dropout_is_found(places, built, opset, expected):
    assert places("training_mode", [built], WEIGHTS, opset=opset) == expected


def test_used_mask_of_old_dropout_is_training_mode(places):
    outputs = [value("y"), value("mask", kind=BOOL)]
    nodes = [dropout_node(outputs=("y", "mask"))]
    assert places("training_mode", nodes, opset=10, outputs=outputs) == DROPPING


@pytest.mark.parametrize(("nodes", "expected"), [
    ([node("Constant", [], ["flag"], value_int=0), node("Cast", ["flag"], ["b"], to=9)], []),
    ([node("Identity", ["yes"], ["b"])], DROPPING),
    ([node("Identity", ["no"], ["c"]), node("Identity", ["c"], ["b"])], []),
    ([node("Not", ["no"], ["b"])], DROPPING),
])  # fmt: skip
def test_training_flag_is_traced_to_its_constant(places, nodes, expected):
    assert places("training_mode", [*nodes, dropout_node("half", "b")], WEIGHTS) == expected


def test_unused_dropout_is_not_training_mode(tmp_path):
    unused = dropout_node("half", "yes", outputs=("nowhere",))
    observed = report(model([unused, *RELU], WEIGHTS), tmp_path)
    assert finding_places(observed, "training_mode") == []
    assert DROPPING[0] in finding_places(observed, "unused_output")


def test_dropout_in_a_branch_is_training_mode(tmp_path):
    nodes = if_nodes(dropout_node("half", "yes", outputs=("t",)), node("Neg", ["x"], ["t"]))
    observed = report(model(nodes, WEIGHTS), tmp_path)
    assert finding_places(observed, "training_mode") == ["If:if / Dropout:drop"]
    assert observed.operators == {"Cast": 1, "Dropout": 1, "If": 1, "Neg": 1, "ReduceSum": 1}


def test_training_mode_passed_to_a_function_is_found(tmp_path):
    inner = node("BatchNormalization", ["a", "s", "s", "s", "s"], ["b"], name="norm")
    inner.attribute.add(name="training_mode", ref_attr_name="training_mode", type=2)
    constant = node("Constant", [], ["s"], value=numpy_helper.from_array(NORM_WEIGHTS["scale"]))
    opsets = [helper.make_opsetid("", 17)]
    norms = helper.make_function(
        "my", "Norm", ["a"], ["b"], [constant, inner], opsets, ["training_mode"]
    )
    for training in (0, 1):
        call = node("Norm", ["x"], ["y"], domain="my", training_mode=training)
        observed = report(model([call], functions=[norms], domains=["my"]), tmp_path)
        assert len(finding_places(observed, "training_mode")) == training
        assert finding_places(observed, "domain") == []
        assert observed.operators == {"BatchNormalization": 1, "Constant": 1}


RANDOM = {
    "Bernoulli": node("Bernoulli", ["x"], ["r"]),
    "RandomNormalLike": node("RandomNormalLike", ["x"], ["r"]),
    "RandomUniformLike": node("RandomUniformLike", ["x"], ["r"]),
    "RandomNormal": node("RandomNormal", [], ["r"], shape=[1, 4]),
    "RandomUniform": node("RandomUniform", [], ["r"], shape=[1, 4]),
    "Multinomial": node("Multinomial", ["x"], ["r"], dtype=1, sample_size=4),
}


class Lstm(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


ATTENTION = Function(lambda x: nn.functional.scaled_dot_product_attention(x, x, x).relu())


@pytest.mark.parametrize(("kind", "reference", "is_reported"), [
    *((kind, ATTENTION, True) for kind in RANDOM),
    ("RandomUniformLike", nn.Dropout(), True),
    ("RandomUniformLike", Lstm(4, 4), True),
    ("RandomUniformLike", Function(lambda x: x + torch.rand_like(x)), False),
    ("Bernoulli", Function(lambda x: nn.functional.dropout(x, training=True)), False),
])  # fmt: skip
def test_random_operators_are_found_unless_the_model_has_them(places, kind, reference, is_reported):
    nodes = [RANDOM[kind], node("Add", ["x", "r"], ["y"])]
    assert bool(places("training_mode", nodes, None, reference)) is is_reported


@pytest.mark.parametrize("tracked", [True, False])
def test_batch_statistics_of_the_model_are_no_finding(places, tracked):
    reference = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=tracked))
    nodes = [norm_node("y", "m", "v", training_mode=1)]
    expected = TRAINING if tracked else []
    assert places("training_mode", nodes, NORM_WEIGHTS, reference) == expected


def write_external(folder, *tensors: dict[str, str], shapes=()):
    """Write a model that adds external tensors to x; each reads four floats from w.bin, or has one
    of `shapes`.
    """
    nodes, last = [], "x"
    graph_tensors = []
    for number, entries in enumerate(tensors):
        shape = dict(shapes).get(number, [4])
        tensor = TensorProto(name=f"t{number}", data_type=TensorProto.FLOAT, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in {"location": "w.bin", **entries}.items():
            tensor.external_data.add(key=key, value=text)
        graph_tensors.append(tensor)
        nodes.append(node("Add", [last, tensor.name], [f"s{number}"]))
        last = f"s{number}"
    nodes.append(node("Identity", [last], ["y"]))
    edited = model(nodes)
    edited.graph.initializer.extend(graph_tensors)
    (folder / "w.bin").write_bytes(bytes(64))
    path = folder / "model.onnx"
    path.write_bytes(edited.SerializeToString())
    return path


def tensor_at(offset: int, **entries: str) -> dict[str, str]:
    return {"offset": str(offset), **entries}


SUM = hashlib.sha1(bytes(64)).hexdigest()


@pytest.mark.parametrize(
    ("tensors", "shapes", "expected"),
    [
        ([tensor_at(0), tensor_at(16), tensor_at(32)], {}, []),
        ([{}], {}, []),
        ([tensor_at(0), tensor_at(0)], {}, []),  # tied weights
        ([tensor_at(48), tensor_at(0)], {}, []),  # a gap between two regions
        ([tensor_at(0), tensor_at(8)], {}, ["t1"]),
        ([tensor_at(0), tensor_at(12), tensor_at(16)], {}, ["t1", "t2"]),
        ([tensor_at(0, length="16")], {}, []),
        ([tensor_at(0, length="12")], {}, ["t0"]),
        ([tensor_at(0, length="32")], {}, ["t0"]),
        ([tensor_at(0, checksum=SUM)], {}, []),
        ([tensor_at(0, checksum=SUM.upper())], {}, []),
        ([tensor_at(0, checksum="0" * 40)], {}, ["w.bin"]),
        ([tensor_at(0, checksum=SUM), tensor_at(16, checksum="0" * 40)], {}, ["w.bin"]),
        ([tensor_at(0), tensor_at(4), tensor_at(20)], {0: [9, 1]}, []),  # two in the first
        ([tensor_at(0), tensor_at(4), tensor_at(24)], {0: [9, 1], 2: [10, 1]}, ["t2"]),
    ],
)
def test_overlapping_regions_lengths_and_checksums_are_found(tmp_path, tensors, shapes, expected):
    observed = report(write_external(tmp_path, *tensors, shapes=shapes), tmp_path)
    assert finding_places(observed, "external_data") == expected
    assert observed.external_data == {"w.bin": str(Digest.from_bytes(bytes(64)))}


def test_external_weights_are_read(tmp_path):
    big, small = np.ones((100, 40), np.float32), np.ones((4, 4), np.float32)
    big[99, 39] = small[3, 3] = np.nan
    nodes = [
        node("MatMul", ["x", "small"], ["a"]), node("MatMul", ["a", "wide"], ["b"]),
        node("MatMul", ["b", "big"], ["c"]), node("Dropout", ["c", "", "yes"], ["y"]),
    ]  # fmt: skip
    wide = np.ones((4, 100), np.float32)
    weights = {"big": big, "small": small, "wide": wide, "yes": np.asarray(True)}
    edited, path = model(nodes, weights, outputs=[value("y", ("b", 40))]), tmp_path / "model.onnx"
    onnx.save(edited, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    observed = report(path, tmp_path)
    assert finding_places(observed, "nonfinite_initializer") == ["big", "small"]
    assert finding_places(observed, "training_mode") == ["Dropout:y"]
    assert list(observed.external_data) == ["w.bin"]


def test_unhashed_external_data_is_not_read(tmp_path):
    path = write_external(tmp_path, tensor_at(0))
    digest = Digest.from_manifest(tmp_path, ["model.onnx"] * 2)
    unhashed = read_subject(path).model_copy(
        update={"external_data": ("model.onnx",), "sha256": digest}
    )
    with pytest.raises(OnnxFileError, match="reads its data from 'w.bin', expected one of"):
        read_graph(TestedFile(path, unhashed), reference_run())
