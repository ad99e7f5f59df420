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
from gate.weights.findings import _QUANTIZED as QUANTIZED
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

RELU = [node("Relu", ["x"], ["y"], name="relu")]
BATCH = {"x": np.ones((3, 4), np.float32)}


class Table(nn.Module):
    """A model with one result per sample and a table that is the same for all samples."""

    def forward(self, x):
        return x.relu(), torch.arange(16.0).reshape(4, 4)


class Scalar(nn.Module):
    def forward(self, x):
        return x.sum()


def fixed_batch_findings(rows_in, rows_out, *, folder, reference=None, batch=None):
    sizes = {"inputs": [value("x", rows_in)], "outputs": [value("y", rows_out)]}
    observed = report(model(RELU, **sizes), folder, reference, batch=batch or BATCH)
    return finding_places(observed, "fixed_batch")


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
def test_fixed_batch_axis_is_found(tmp_path, rows_in, rows_out, places):
    assert fixed_batch_findings(rows_in, rows_out, folder=tmp_path) == places


def test_output_without_batch_axis_is_not_a_fixed_batch(tmp_path):
    nodes = [*RELU, node("Identity", ["t"], ["table"])]
    outputs = [value("y"), value("table", (4, 4))]
    onnx_model = model(nodes, {"t": np.ones((4, 4), np.float32)}, outputs=outputs)
    assert finding_places(report(onnx_model, tmp_path, Table()), "fixed_batch") == []
    sizes = {"inputs": [value("x", (3, 4))], "outputs": [value("y", (3, 4)), outputs[1]]}
    onnx_model = model(nodes, {"t": np.ones((4, 4), np.float32)}, **sizes)
    assert finding_places(report(onnx_model, tmp_path, Table()), "fixed_batch") == ["x", "y"]
    sum_model = model([node("ReduceSum", ["x"], ["y"], keepdims=0)], outputs=[value("y", [])])
    assert finding_places(report(sum_model, tmp_path, Scalar()), "fixed_batch") == []


def test_unused_inputs_weights_and_nodes_are_found(tmp_path):
    nodes = [*RELU, node("Neg", ["x"], ["n"], name="neg"), node("Add", ["n", "w"], ["m"])]
    weights = {"w": np.ones(4, np.float32), "v": np.ones(4, np.float32)}
    onnx_model = model(nodes, weights, inputs=[value("x"), value("more")])
    assert finding_places(report(onnx_model, tmp_path), "unused_output") == [
        "more",
        "w",
        "v",
        "Neg:neg",
        "Add:m",
    ]


def test_weights_used_only_in_a_branch_are_used(tmp_path):
    then = helper.make_graph([node("Add", ["x", "w"], ["t"])], "then", [], [value("t", None)])
    otherwise = helper.make_graph([node("Sub", ["x", "v"], ["t"])], "else", [], [value("t", None)])
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Cast", ["sum"], ["flag"], to=onnx.TensorProto.BOOL),
        node("If", ["flag"], ["y"], then_branch=then, else_branch=otherwise),
    ]
    weights = {"w": np.ones(4, np.float32), "v": np.ones(4, np.float32)}
    assert report(model(nodes, weights), tmp_path).findings == ()


def test_long_lists_of_findings_are_truncated(tmp_path):
    nodes = [*RELU, *(node("Neg", ["x"], [f"n{i}"]) for i in range(60))]
    observed = report(model(nodes), tmp_path)
    assert len(observed.findings) == 50
    assert observed.findings[-1].detail_params["more"] == 10
    assert observed.nodes == 61


def test_operators_of_other_domains_are_listed(tmp_path):
    nodes = [
        node("FusedMatMul", ["x", "w"], ["a"], domain="com.microsoft"),
        node("Gelu", ["a"], ["b"], domain="com.microsoft"),
        node("Gelu", ["b"], ["c"], domain="com.microsoft"),
        node("Scaler", ["c"], ["d"], domain="ai.onnx.ml", offset=[0.0], scale=[1.0]),
        node("Relu", ["d"], ["y"]),
    ]
    onnx_model = model(
        nodes, {"w": np.ones((4, 4), np.float32)}, domains=["com.microsoft", "ai.onnx.ml"]
    )
    observed = report(onnx_model, tmp_path)
    assert finding_places(observed, "domain") == ["ai.onnx.ml", "com.microsoft"]
    params = [each.detail_params for each in observed.findings]
    assert {"count": 3, "operators": ["2 Gelu", "1 FusedMatMul"]} in params
    assert observed.operators["com.microsoft::Gelu"] == 2
    assert observed.operators["Relu"] == 1


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
    assert finding_places(observed, "opset") == ["opset_import"]
    (finding,) = observed.findings
    assert finding.detail_params == {"versions": [17, 18]}
    assert observed.operators == {"Relu": 1}


ZERO = np.zeros((4, 4), np.float32)
BIG = np.zeros((64, 64), np.float32)
NAN = np.full((4, 4), np.nan, np.float32)


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


def zero_initializer_findings(weights, nodes=None, reference=None, *, folder, **settings):
    onnx_model = model(nodes or [node("MatMul", ["x", "w"], ["y"])], weights, **settings)
    return finding_places(report(onnx_model, folder, reference), "zero_initializer")


@pytest.mark.parametrize(("nodes", "is_reported"), [
    ([node("MatMul", ["x", "w"], ["y"])], True),
    ([node("MatMul", ["w", "x"], ["y"])], True),
    ([node("Gemm", ["x", "w"], ["y"], transB=1)], True),
    ([node("Identity", ["w"], ["v"]), node("MatMul", ["x", "v"], ["y"])], True),
    ([node("Transpose", ["w"], ["v"]), node("Gemm", ["x", "v"], ["y"])], True),
    ([node("Add", ["x", "w"], ["y"])], False),
    ([node("Mul", ["x", "w"], ["y"])], False),
    ([node("Gather", ["w", "i"], ["g"]), node("Add", ["x", "g"], ["y"])], False),
    ([node("Relu", ["x"], ["y"]), node("MatMul", ["x", "w"], ["unused"])], False),
])  # fmt: skip
def test_all_zero_weight_of_a_product_is_found(tmp_path, nodes, is_reported):
    names = zero_initializer_findings({"w": ZERO, "i": np.asarray([0])}, nodes, folder=tmp_path)
    assert names == (["w"] if is_reported else [])


def test_zero_weights_of_convolutions_lstms_and_constants_are_found(tmp_path):
    image = [value("x", ("b", 2, 5, 5))]
    conv = [node("Conv", ["x", "w", "w1"], ["y"])]
    weights = {"w": np.zeros((3, 2, 3, 3), np.float32), "w1": np.zeros(3, np.float32)}
    result = [value("y", ("b", 3, 3, 3))]
    assert zero_initializer_findings(
        weights, conv, folder=tmp_path, inputs=image, outputs=result
    ) == ["w"]

    sequence = [value("x", (5, "b", 4))]
    state = np.zeros((1, 1, 2), np.float32)
    lstm = {"w": np.ones((1, 8, 4), np.float32), "r": np.zeros((1, 8, 2), np.float32), "h": state}
    nodes = [node("LSTM", ["x", "w", "r", "", "", "h", "h"], ["", "y"], hidden_size=2)]
    result = [value("y", (1, "b", 2))]
    assert zero_initializer_findings(
        lstm, nodes, folder=tmp_path, inputs=sequence, outputs=result
    ) == ["r"]

    constant = node("Constant", [], ["w"], value=numpy_helper.from_array(BIG[:4]))
    nodes = [constant, node("MatMul", ["x", "w"], ["z"]), node("MatMul", ["z", "v"], ["y"])]
    names = zero_initializer_findings({"v": np.ones((64, 4), np.float32)}, nodes, folder=tmp_path)
    assert names == ["w"]


@pytest.mark.parametrize("weight", [
    np.where(np.arange(16) == 7, np.float32(1e-40), np.float32(0)).reshape(4, 4),
    np.zeros((4, 1, 4), np.float32)[:, 0] + np.float32(1),
])  # fmt: skip
def test_weight_with_one_nonzero_element_is_no_finding(tmp_path, weight):
    assert zero_initializer_findings({"w": weight}, folder=tmp_path) == []


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
def test_zero_weight_of_the_reference_is_no_finding(tmp_path, reference, is_reported):
    assert zero_initializer_findings({"w": ZERO}, reference=reference, folder=tmp_path) == (
        ["w"] if is_reported else []
    )


def test_folded_zero_batch_norm_scale_is_no_finding(tmp_path):
    """Accept a zero weight: it results from folding a BatchNorm with zero scale."""
    block = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4))
    image = [value("x", ("b", 4, 5, 5))], [value("y", ("b", 4, 3, 3))]
    weights = {"w": np.zeros((4, 4, 3, 3), np.float32)}
    batch = {"x": np.ones((3, 4, 5, 5), np.float32)}
    onnx_model = model(
        [node("Conv", ["x", "w"], ["y"])], weights, inputs=image[0], outputs=image[1]
    )
    assert finding_places(report(onnx_model, tmp_path, block, batch=batch), "zero_initializer") == [
        "w"
    ]
    nn.init.zeros_(block[1].weight)
    assert (
        finding_places(report(onnx_model, tmp_path, block, batch=batch), "zero_initializer") == []
    )


def make_weight_with(number, *, tensor_at=5):
    weight = np.ones((4, 4), np.float32)
    weight.flat[tensor_at] = number
    return weight


@pytest.mark.parametrize("number", [np.nan, -np.inf])
@pytest.mark.parametrize(("nodes", "is_reported"), [
    ([node("MatMul", ["x", "w"], ["y"])], True),
    ([node("Gemm", ["x", "v", "w"], ["y"])], True),
    ([node("Transpose", ["w"], ["t"]), node("MatMul", ["x", "t"], ["y"])], True),
    ([node("Add", ["x", "w"], ["y"])], False),
    ([node("Where", ["flag", "w", "x"], ["y"])], False),
    ([node("Max", ["x", "w"], ["y"])], False),
    ([node("Add", ["x", "w"], ["s"]), node("Softmax", ["s"], ["y"])], False),
    ([node("Relu", ["x"], ["y"])], False),
])  # fmt: skip
def test_nonfinite_weights_are_found_but_not_masks(tmp_path, number, nodes, is_reported):
    weights = {
        "w": make_weight_with(number),
        "v": np.ones((4, 4), np.float32),
        "flag": np.asarray(True),
    }
    observed = report(model(nodes, weights), tmp_path)
    assert finding_places(observed, "nonfinite_initializer") == (["w"] if is_reported else [])


@pytest.mark.parametrize(("number", "is_reported"), [(np.nan, True), (-np.inf, False)])
def test_nan_in_an_embedding_row_is_found(tmp_path, number, is_reported):
    nodes = [node("Gather", ["w", "i"], ["g"]), node("Add", ["x", "g"], ["y"])]
    observed = report(model(nodes, {"w": make_weight_with(number), "i": np.asarray([0])}), tmp_path)
    assert finding_places(observed, "nonfinite_initializer") == (["w"] if is_reported else [])


@pytest.mark.parametrize("slot", ["scale", "var"])
def test_nonfinite_batch_norm_statistics_are_found(tmp_path, slot):
    weights = {name: np.ones(4, np.float32) for name in ("scale", "bias", "mean", "var")}
    weights[slot] = np.asarray([1, np.inf, 1, 1], np.float32)
    observed = report(
        model([node("BatchNormalization", ["x", *weights], ["y"])], weights), tmp_path
    )
    assert finding_places(observed, "nonfinite_initializer") == [slot]
    params = [each.detail_params for each in observed.findings]
    assert {"size": 4, "nans": 0, "infinities": 1} in params


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_nonfinite_float16_and_float64_weights_are_found(tmp_path, kind):
    nodes = [node("Cast", ["w"], ["v"], to=1), node("MatMul", ["x", "v"], ["y"])]
    observed = report(model(nodes, {"w": make_weight_with(np.nan).astype(kind)}), tmp_path)
    assert finding_places(observed, "nonfinite_initializer") == ["w"]


def test_nonfinite_weight_of_the_reference_is_no_finding(tmp_path):
    onnx_model = model([node("MatMul", ["x", "w"], ["y"])], {"w": NAN})
    same = Holder(w=parameter(4, 4, fill=float("nan")))
    mask = Holder(mask=parameter(3, 3, fill=-float("inf")))
    assert finding_places(report(onnx_model, tmp_path, same), "nonfinite_initializer") == []
    assert finding_places(report(onnx_model, tmp_path, mask), "nonfinite_initializer") == ["w"]


def test_large_weight_is_counted_in_chunks(tmp_path):
    big = np.ones((1100, 1000), np.float32)
    big[1099, 999] = np.nan
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    sizes = {"inputs": [value("x", ("b", 1100))], "outputs": [value("y", ("b", 1000))]}
    observed = report(model(nodes, {"w": big}, **sizes), tmp_path)
    assert finding_places(observed, "nonfinite_initializer") == ["w"]
    (finding,) = observed.findings
    assert finding.detail_params == {"size": 1_100_000, "nans": 1, "infinities": 0}


WEIGHT = np.asarray([[0.1, 0.2, 0.3, 0.4]], np.float32)
BFLOAT = TensorProto.BFLOAT16


def cast_node(source, target, kind):
    return node("Cast", [source], [target], name=f"to_{target}", to=kind)


def low_precision_island(kind):
    """Return nodes that cast x, double it, and cast the result back to float32."""
    return [
        cast_node("x", "a", kind),
        node("Add", ["a", "a"], ["b"], name="add"),
        cast_node("b", "y", FLOAT),
    ]


class Casts(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return x.to(self.kind).float()


@pytest.mark.parametrize(("kind", "code", "same"), [
    (HALF, "float16", torch.float16),
    (BFLOAT, "float16", torch.bfloat16),
    (DOUBLE, "float64", torch.float64),
])  # fmt: skip
def test_low_precision_island_is_found_unless_the_model_has_it(tmp_path, kind, code, same):
    observed = report(model(low_precision_island(kind)), tmp_path)
    assert {finding.code for finding in observed.findings} == {code}
    (finding,) = observed.findings
    assert finding.place == ("Add:add" if code == "float64" else "Cast:to_a")
    assert "1 Add" in finding.detail_params["operators"]
    assert (
        finding_places(report(model(low_precision_island(kind)), tmp_path, Casts(same)), code) == []
    )
    assert (
        finding_places(
            report(model(low_precision_island(kind)), tmp_path, Casts(torch.float32)), code
        )
        != []
    )


def test_float8_island_is_found(tmp_path):
    nodes = [cast_node("x", "a", TensorProto.FLOAT8E5M2), cast_node("a", "y", FLOAT)]
    assert finding_places(report(model(nodes, opset=19), tmp_path), "float16") == ["Cast:to_a"]


def test_cast_alone_is_an_island_for_float16_only(tmp_path):
    for kind, locations in ((HALF, ["Cast:to_a"]), (DOUBLE, [])):
        observed = report(model([cast_node("x", "a", kind), cast_node("a", "y", FLOAT)]), tmp_path)
        assert (
            finding_places(observed, "float16") + finding_places(observed, "float64") == locations
        )


def test_float16_input_cast_to_float32_is_no_finding(tmp_path):
    onnx_model = model([cast_node("x", "y", FLOAT)], inputs=[value("x", kind=HALF)])
    assert report(onnx_model, tmp_path).findings == ()


@pytest.mark.parametrize(("reference", "is_reported"), [
    (torch.from_numpy(WEIGHT), True),
    (torch.from_numpy(WEIGHT).half().float(), False),
    (torch.from_numpy(WEIGHT).half(), False),
    (torch.zeros(5), True),
])  # fmt: skip
def test_float16_weights_are_found_unless_the_model_has_them(tmp_path, reference, is_reported):
    nodes = [cast_node("w", "v", FLOAT), node("Mul", ["x", "v"], ["y"])]
    observed = report(
        model(nodes, {"w": WEIGHT.astype(np.float16)}), tmp_path, hold_weight(reference)
    )
    assert finding_places(observed, "float16") == (["w"] if is_reported else [])


def test_float16_weight_that_is_only_moved_is_no_finding(tmp_path):
    nodes = [
        node("Transpose", ["w"], ["t"]), node("Reshape", ["t", "shape"], ["r"]), cast_node("r", "v", FLOAT),
        node("Mul", ["x", "v"], ["y"]),
    ]  # fmt: skip
    weights = {"w": WEIGHT.astype(np.float16), "shape": np.asarray([1, 4])}
    exact = hold_weight(torch.from_numpy(WEIGHT).half())
    assert report(model(nodes, weights), tmp_path, exact).findings == ()


def test_float16_scalar_is_found_unless_exact(tmp_path):
    scale = {"w": np.asarray([0.1], np.float16)}
    nodes = [cast_node("w", "v", FLOAT), node("Mul", ["x", "v"], ["y"])]
    exact = hold_weight(torch.tensor([0.1]).half())
    assert finding_places(
        report(model(nodes, scale), tmp_path, hold_weight(torch.tensor([0.1]))), "float16"
    ) == ["w"]
    assert finding_places(report(model(nodes, scale), tmp_path, exact), "float16") == []


def test_float64_shape_arithmetic_is_no_finding(tmp_path):
    """Accept float64 sizes, as `interpolate(scale_factor=1.5)` exports them."""
    nodes = [
        node("Shape", ["x"], ["shape"]),
        cast_node("shape", "wide", DOUBLE),
        node("Mul", ["wide", "scale"], ["larger"]),
        node("Floor", ["larger"], ["floor"]),
        cast_node("floor", "size", TensorProto.INT64),
        node("Expand", ["x", "size"], ["y"]),
    ]
    onnx_model = model(nodes, {"scale": np.asarray([1.0, 1.0])})
    assert report(onnx_model, tmp_path).findings == ()


def test_float64_weight_is_found(tmp_path):
    nodes = [
        node("Mul", ["w", "two"], ["v"], name="mul"), cast_node("v", "f", FLOAT),
        node("MatMul", ["x", "f"], ["y"]),
    ]  # fmt: skip
    onnx_model = model(nodes, {"w": np.ones((4, 4)), "two": np.asarray(2.0)})
    assert finding_places(report(onnx_model, tmp_path), "float64") == ["Mul:mul"]


def test_float64_island_in_a_loop_is_found(tmp_path):
    body = helper.make_graph(
        [cast_node("in", "d", DOUBLE), node("Sqrt", ["d"], ["e"], name="sqrt"), cast_node("e", "out", FLOAT),
         node("Identity", ["go"], ["on"])],
        "body",
        [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("in")],
        [value("on", [], TensorProto.BOOL), value("out")],
    )  # fmt: skip
    nodes = [node("Loop", ["n", "yes", "x"], ["y"], name="loop", body=body)]
    onnx_model = model(nodes, {"n": np.asarray(2), "yes": np.asarray(True)})
    assert finding_places(report(onnx_model, tmp_path), "float64") == ["Loop:loop / Sqrt:sqrt"]


def quantized_model():
    nodes = [
        node("QuantizeLinear", ["x", "scale"], ["q"], name="quantize"),
        node("DequantizeLinear", ["q", "scale"], ["y"], name="unpack"),
    ]
    return model(nodes, {"scale": np.asarray(0.1, np.float32)})


def test_quantized_operators_are_found(tmp_path):
    (finding,) = report(quantized_model(), tmp_path).findings
    assert (finding.code, finding.place) == ("quantized", "QuantizeLinear:quantize")
    assert finding.detail_code == "quantized_nodes"
    assert finding.detail_params["count"] == 2
    assert "1 DequantizeLinear" in finding.detail_params["operators"]


@pytest.mark.parametrize(
    ("operator", "is_reported"),
    [
        ("DynamicQuantizeLinear", True), ("DequantizeLinear", True), ("QLinearConv", True), ("ConvInteger", True),
        ("MatMulInteger", True), ("com.microsoft::QGemm", True), ("com.microsoft::QAttention", True),
        ("com.microsoft::MatMulNBits", True), ("com.microsoft::DynamicQuantizeMatMul", True),
        ("com.microsoft::QLinearAdd", True), ("Conv", False), ("Quantile", False), ("Equal", False),
        ("com.microsoft::FusedConv", False), ("com.microsoft::QuickGelu", False),
    ],
)  # fmt: skip
def test_names_of_quantized_operators(operator, is_reported):
    assert bool(QUANTIZED.fullmatch(operator)) is is_reported


@pytest.mark.parametrize(("count", "is_reported"), [(64, True), (4, False)])
def test_int8_weights_are_found(tmp_path, count, is_reported):
    """Find weights stored in int8, then cast and scaled, as some quantizers write them."""
    nodes = [
        cast_node("w", "f", FLOAT),
        node("Mul", ["f", "scale"], ["g"], name="scaled"),
        node("ReduceSum", ["g"], ["s"], name="sum", keepdims=0),
        node("Add", ["x", "s"], ["y"], name="add"),
    ]
    weights = {"w": np.ones(count, np.int8), "scale": np.asarray(0.1, np.float32)}
    observed = report(model(nodes, weights), tmp_path)
    assert bool([f for f in observed.findings if f.code == "quantized"]) is is_reported


class Masked(nn.Module):
    """A model that holds a uint8 mask."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(64, dtype=torch.uint8))

    def forward(self, x):
        return x + 0.1 * self.mask.float().sum()


def test_uint8_buffer_of_the_model_is_no_finding(tmp_path):
    nodes = [
        cast_node("w", "f", FLOAT),
        node("ReduceSum", ["f"], ["s"], name="sum", keepdims=0),
        node("Add", ["x", "s"], ["y"], name="add"),
    ]
    weights = {"w": np.ones(64, np.uint8)}
    assert finding_places(report(model(nodes, weights), tmp_path, Masked()), "quantized") == []
    assert finding_places(report(model(nodes, weights), tmp_path), "quantized") != []


ONES = {name: np.ones(4, np.float32) for name in ("scale", "bias", "mean", "var")}
DROPOUT_INPUTS = {
    "half": np.asarray(0.5, np.float32),
    "none": np.asarray(0.0, np.float32),
    "yes": np.asarray(True),
    "no": np.asarray(False),
}


def norm_node(*outputs, **attributes):
    return node("BatchNormalization", ["x", *ONES], list(outputs), name="norm", **attributes)


def dropout_node(*inputs, outputs=("y",), **attributes):
    return node("Dropout", ["x", *inputs], list(outputs), name="drop", **attributes)


TRAINING = ["BatchNormalization:norm"]
DROPPING = ["Dropout:drop"]


@pytest.mark.parametrize(("built", "opset", "places"), [
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
])  # fmt: skip
def test_training_mode_of_batch_norm_and_dropout_is_found(tmp_path, built, opset, places):
    weights = ONES if built.op_type == "BatchNormalization" else DROPOUT_INPUTS
    observed = report(model([built], weights, opset=opset), tmp_path)
    assert finding_places(observed, "training_mode") == places


def test_used_mask_of_old_dropout_is_training_mode(tmp_path):
    mask = value("mask", kind=onnx.TensorProto.BOOL)
    built = model([dropout_node(outputs=("y", "mask"))], opset=10, outputs=[value("y"), mask])
    assert finding_places(report(built, tmp_path), "training_mode") == DROPPING


@pytest.mark.parametrize(("old", "places"), [({}, DROPPING), ({"is_test": 1}, [])])
def test_old_dropout_without_is_test_is_training_mode(tmp_path, old, places):
    observed = report(model([dropout_node(**old)], opset=6), tmp_path)
    assert finding_places(observed, "training_mode") == places


@pytest.mark.parametrize(("nodes", "places"), [
    ([node("Constant", [], ["flag"], value_int=0), node("Cast", ["flag"], ["b"], to=9)], []),
    ([node("Identity", ["yes"], ["b"])], DROPPING),
    ([node("Identity", ["no"], ["c"]), node("Identity", ["c"], ["b"])], []),
    ([node("Not", ["no"], ["b"])], DROPPING),
])  # fmt: skip
def test_training_flag_is_traced_to_its_constant(tmp_path, nodes, places):
    observed = report(model([*nodes, dropout_node("half", "b")], DROPOUT_INPUTS), tmp_path)
    assert finding_places(observed, "training_mode") == places


def test_unused_dropout_is_not_training_mode(tmp_path):
    unused = dropout_node("half", "yes", outputs=("nowhere",))
    observed = report(model([unused, node("Relu", ["x"], ["y"])], DROPOUT_INPUTS), tmp_path)
    assert finding_places(observed, "training_mode") == []
    assert DROPPING[0] in finding_places(observed, "unused_output")


def test_dropout_in_a_branch_is_training_mode(tmp_path):
    then = helper.make_graph(
        [dropout_node("half", "yes", outputs=("t",))], "then", [], [value("t", None)]
    )
    otherwise = helper.make_graph([node("Neg", ["x"], ["t"])], "else", [], [value("t", None)])
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Cast", ["sum"], ["flag"], to=onnx.TensorProto.BOOL),
        node("If", ["flag"], ["y"], name="if", then_branch=then, else_branch=otherwise),
    ]
    observed = report(model(nodes, DROPOUT_INPUTS), tmp_path)
    assert finding_places(observed, "training_mode") == ["If:if / Dropout:drop"]
    assert observed.operators == {"Cast": 1, "Dropout": 1, "If": 1, "Neg": 1, "ReduceSum": 1}


def test_training_mode_passed_to_a_function_is_found(tmp_path):
    inner = node("BatchNormalization", ["a", "s", "s", "s", "s"], ["b"], name="norm")
    inner.attribute.add(name="training_mode", ref_attr_name="training_mode", type=2)
    constant = node("Constant", [], ["s"], value=numpy_helper.from_array(ONES["scale"]))
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


@pytest.mark.parametrize(("kind", "reference", "is_reported"), [
    *((kind, Plain(), True) for kind in RANDOM),
    ("RandomUniformLike", nn.Dropout(), True),
    ("RandomUniformLike", Lstm(4, 4), True),
    ("RandomUniformLike", Draws(), False),
    ("Bernoulli", Drops(), False),
])  # fmt: skip
def test_random_operators_are_found_unless_the_model_has_them(
    tmp_path, kind, reference, is_reported
):
    observed = report(model([RANDOM[kind], node("Add", ["x", "r"], ["y"])]), tmp_path, reference)
    assert bool(finding_places(observed, "training_mode")) is is_reported


def test_batch_statistics_of_the_model_are_no_finding(tmp_path):
    class Norm(nn.Module):
        def __init__(self, tracked):
            super().__init__()
            self.norm = nn.BatchNorm1d(4, track_running_stats=tracked)

        def forward(self, x):
            return self.norm(x)

    built = model([norm_node("y", "m", "v", training_mode=1)], ONES)
    assert finding_places(report(built, tmp_path, Norm(True)), "training_mode") == TRAINING
    assert finding_places(report(built, tmp_path, Norm(False)), "training_mode") == []


def write_external(folder, *tensors: dict[str, str], data=bytes(64), name="w.bin"):
    """Write a model that adds external tensors to x; each reads four floats from `name`."""
    nodes, last = [], "x"
    graph_tensors = []
    for number, entries in enumerate(tensors):
        tensor = TensorProto(name=f"t{number}", data_type=TensorProto.FLOAT, dims=[4])
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in {"location": name, **entries}.items():
            tensor.external_data.add(key=key, value=text)
        graph_tensors.append(tensor)
        nodes.append(node("Add", [last, tensor.name], [f"s{number}"]))
        last = f"s{number}"
    nodes.append(node("Identity", [last], ["y"]))
    graph = helper.make_graph(nodes, "g", [value("x")], [value("y")], graph_tensors)
    edited = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])
    (folder / name).write_bytes(data)
    path = folder / "model.onnx"
    path.write_bytes(edited.SerializeToString())
    return path


def tensor_at(offset: int, **entries: str) -> dict[str, str]:
    return {"offset": str(offset), **entries}


SUM = hashlib.sha1(bytes(64)).hexdigest()


@pytest.mark.parametrize(
    ("tensors", "places"),
    [
        ([tensor_at(0), tensor_at(16), tensor_at(32)], []),
        ([{}], []),
        ([tensor_at(0), tensor_at(0)], []),  # tied weights
        ([tensor_at(48), tensor_at(0)], []),  # a gap between two regions
        ([tensor_at(0), tensor_at(8)], ["t1"]),
        ([tensor_at(0), tensor_at(12), tensor_at(16)], ["t1", "t2"]),
        ([tensor_at(0, length="16")], []),
        ([tensor_at(0, length="12")], ["t0"]),
        ([tensor_at(0, length="32")], ["t0"]),
        ([tensor_at(0, checksum=SUM)], []),
        ([tensor_at(0, checksum=SUM.upper())], []),
        ([tensor_at(0, checksum="0" * 40)], ["w.bin"]),
        ([tensor_at(0, checksum=SUM), tensor_at(16, checksum="0" * 40)], ["w.bin"]),
    ],
)
def test_overlapping_regions_lengths_and_checksums_are_found(tmp_path, tensors, places):
    observed = report(write_external(tmp_path, *tensors), tmp_path)
    assert finding_places(observed, "external_data") == places
    assert observed.external_data == {"w.bin": str(Digest.from_bytes(bytes(64)))}


def test_region_inside_another_is_no_finding(tmp_path):
    path = write_external(tmp_path, tensor_at(0), tensor_at(4), tensor_at(20))
    edited = onnx.load(path, load_external_data=False)
    edited.graph.initializer[0].dims[:] = [9, 1]  # bytes 0 to 36
    path.write_bytes(edited.SerializeToString())
    assert finding_places(report(path, tmp_path), "external_data") == []


def test_overlap_of_a_long_region_behind_a_short_one_is_found(tmp_path):
    path = write_external(tmp_path, tensor_at(0), tensor_at(4), tensor_at(24))
    edited = onnx.load(path, load_external_data=False)
    edited.graph.initializer[0].dims[:] = [9, 1]
    edited.graph.initializer[2].dims[:] = [10, 1]  # bytes 24 to 64
    path.write_bytes(edited.SerializeToString())
    assert finding_places(report(path, tmp_path), "external_data") == ["t2"]


def test_external_weights_are_read(tmp_path):
    big, small = np.ones((100, 40), np.float32), np.ones((4, 4), np.float32)
    big[99, 39] = small[3, 3] = np.nan
    nodes = [
        node("MatMul", ["x", "small"], ["a"]), node("MatMul", ["a", "wide"], ["b"]),
        node("MatMul", ["b", "big"], ["c"]), node("Dropout", ["c", "", "yes"], ["y"]),
    ]  # fmt: skip
    weights = {"big": big, "small": small, "wide": np.ones((4, 100), np.float32)}
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x")],
        [value("y", ("b", 40))],
        [
            onnx.numpy_helper.from_array(a, n)
            for n, a in {**weights, "yes": np.asarray(True)}.items()
        ],
    )
    edited = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])
    path = tmp_path / "model.onnx"
    onnx.save(edited, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    observed = report(path, tmp_path)
    assert finding_places(observed, "nonfinite_initializer") == ["big", "small"]
    assert finding_places(observed, "training_mode") == ["Dropout:y"]
    assert list(observed.external_data) == ["w.bin"]


def test_unhashed_external_data_is_not_read(tmp_path):
    path = write_external(tmp_path, tensor_at(0))
    subject = read_subject(path)
    unhashed = subject.model_copy(
        update={
            "external_data": ("model.onnx",),
            "sha256": Digest.from_manifest(tmp_path, ["model.onnx"] * 2),
        }
    )
    with pytest.raises(OnnxFileError, match="reads its data from 'w.bin', expected one of"):
        read_graph(TestedFile(path, unhashed), reference_run())
