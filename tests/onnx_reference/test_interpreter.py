"""Reference files compute the same as ONNX Runtime at every opset, and more exactly in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, parser

from gate.errors import ModelError
from gate.reference import onnx_operators
from gate.reference.float64 import double_copy, in_double
from gate.reference.onnx_operators import from_numpy, to_numpy
from gate.reference.onnx_reference import OnnxReference, open_plain

RANDOM = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return RANDOM.standard_normal(shape).astype(np.float32)


def model(body: str, *, opset: int, domain: str = "") -> onnx.ModelProto:
    imports = f'"" : {opset}' + (f', "{domain}" : 1' if domain else "")
    return parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]>\ng {body}")


def run_both(proto: onnx.ModelProto, *inputs: np.ndarray[Any, Any]) -> tuple[list[Any], list[Any]]:
    """Return the outputs of the interpreter and of ONNX Runtime."""
    names = [each.name for each in proto.graph.input]
    expected = open_plain(proto.SerializeToString()).run(
        None, dict(zip(names, inputs, strict=True))
    )
    reference = OnnxReference(proto)
    with torch.no_grad():
        created = reference.compute([from_numpy(each) for each in inputs])
    return [to_numpy(each) for each in created], expected


X = "(float[2,3,4] x) => (float[?,?,?] y)"
IMAGE = "(float[1,2,5,6] x) => (float[?,?,?,?] y)"

TABLE: dict[str, tuple[int, str, tuple[int, ...]]] = {
    "softmax flattens before 13": (11, X + "{ y = Softmax <axis = 1> (x) }", (2, 3, 4)),
    "softmax takes an axis from 13 on": (13, X + "{ y = Softmax <axis = 1> (x) }", (2, 3, 4)),
    "softmax has axis 1 before 13": (9, X + "{ y = Softmax (x) }", (2, 3, 4)),
    "softmax has the last axis from 13 on": (17, X + "{ y = Softmax (x) }", (2, 3, 4)),
    "log_softmax flattens before 13": (12, X + "{ y = LogSoftmax <axis = 1> (x) }", (2, 3, 4)),
    "hardmax flattens before 13": (11, X + "{ y = Hardmax <axis = 1> (x) }", (2, 3, 4)),
    "hardmax from 13 on": (13, X + "{ y = Hardmax <axis = 1> (x) }", (2, 3, 4)),
    "axes of a sum as an attribute": (11, X + "{ y = ReduceSum <axes = [1]> (x) }", (2, 3, 4)),
    "axes of a sum as an input": (
        13, X + "{ a = Constant <value_ints = [-1]> () y = ReduceSum (x, a) }", (2, 3, 4)),
    "axes of a mean as an input": (
        18, X + "{ a = Constant <value_ints = [0, 2]> () y = ReduceMean (x, a) }", (2, 3, 4)),
    "clip by attributes": (7, X + "{ y = Clip <min = -0.5, max = 0.5> (x) }", (2, 3, 4)),
    "clip by inputs": (
        13, X + "{ a = Constant <value_float = -0.5> () y = Clip (x, a) }", (2, 3, 4)),
    "slice by attributes": (
        9, X + "{ y = Slice <axes = [1, 2], starts = [1, 0], ends = [9, -1]> (x) }", (2, 3, 4)),
    "slice backward": (
        13, X + """{ s = Constant <value_ints = [-1]> () e = Constant <value_ints = [-9]> ()
                 a = Constant <value_ints = [2]> () t = Constant <value_ints = [-2]> ()
                 y = Slice (x, s, e, a, t) }""", (2, 3, 4)),
    "upsample": (
        9, IMAGE + "{ s = Constant <value = float[4] {1, 1, 2, 2}> () y = Upsample (x, s) }",
        (1, 2, 5, 6)),
    "resize at opset 10": (
        10, IMAGE + "{ s = Constant <value = float[4] {1, 1, 0.6, 0.5}> () y = Resize (x, s) }",
        (1, 2, 5, 6)),
    "average pool counts no padding": (
        11, IMAGE + """{ y = AveragePool <kernel_shape = [3, 3], strides = [2, 2],
                       pads = [1, 1, 1, 1], ceil_mode = 1> (x) }""", (1, 2, 5, 6)),
    "average pool counts its padding": (
        19, IMAGE + """{ y = AveragePool <kernel_shape = [3, 3], strides = [2, 2],
                       pads = [1, 1, 1, 1], count_include_pad = 1, ceil_mode = 1> (x) }""",
        (1, 2, 5, 6)),
    "max pool pads below": (
        11, IMAGE + '{ y = MaxPool <kernel_shape = [2, 3], auto_pad = "SAME_LOWER"> (x) }',
        (1, 2, 5, 6)),
    "lrn": (13, IMAGE + "{ y = LRN <size = 3, alpha = 0.5> (x) }", (1, 2, 5, 6)),
    "depth to space": (
        11, "(float[1,8,2,3] x) => (float[?,?,?,?] y) { y = DepthToSpace <blocksize = 2> (x) }",
        (1, 8, 2, 3)),
    "cumulated from the end": (
        14, X + """{ a = Constant <value_int = 1> ()
                 y = CumSum <reverse = 1, exclusive = 1> (x, a) }""", (2, 3, 4)),
    "squeeze without axes": (
        13, X.replace("2,3,4", "1,3,1,4") + """{ a = Constant <value = int64[0] {}> ()
                                             y = Squeeze (x, a) }""", (1, 3, 1, 4)),
    "wrap what is cut": (
        19, X + """{ p = Constant <value = int64[6] {0, -1, 2, 0, 2, -1}> ()
                 y = Pad <mode = "wrap"> (x, p) }""", (2, 3, 4)),
    "softplus where exp overflows": (
        13, X + "{ c = Constant <value_float = 200.0> () z = Mul (x, c) y = Softplus (z) }",
        (2, 3, 4)),
    "instance norm of single elements": (
        6, "(float[2,3,1] x, float[3] s, float[3] h) => (float[?,?,?] y) "
        "{ y = InstanceNormalization <epsilon = 1.0> (x, s, h) }", (2, 3, 1)),
    "a region without extent": (
        16, IMAGE + """{ r = Constant <value = float[1,4] {3, 3, 3, 4}> ()
                       b = Constant <value_ints = [0]> ()
                       y = RoiAlign <mode = "max", output_width = 2> (x, r, b) }""", (1, 2, 5, 6)),
    "slices of a scan along the axis before the last": (
        16, X + """{ y = Scan <num_scan_inputs = 1, scan_output_axes = [-2],
                     body = b (float[3,4] s) => (float[3,4] t) { t = Neg (s) }> (x) }""",
        (2, 3, 4)),
    "swish of opset 24": (24, X + "{ y = Swish <alpha = 0.5> (x) }", (2, 3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_operators_mean_what_they_mean_at_their_opset(name: str) -> None:
    opset, body, shape = TABLE[name]
    try:
        proto = model(body, opset=opset)
        created, expected = run_both(
            proto, floats(*shape), *(floats(3) for _ in proto.graph.input[1:])
        )
    except RuntimeError as error:
        pytest.skip(f"this ONNX Runtime has no such opset: {error}")
    assert [each.shape for each in created] == [each.shape for each in expected]
    np.testing.assert_allclose(created[0], expected[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(
    "how",
    ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric"],
)
@pytest.mark.parametrize("scale", [0.6, 1.7])
def test_resize_has_the_coordinates_of_its_attributes(mode: str, how: str, scale: float) -> None:
    body = f"""{IMAGE} {{ s = Constant <value = float[4] {{1, 1, {scale}, {scale}}}> ()
        y = Resize <mode = "{mode}", coordinate_transformation_mode = "{how}"> (x, , s) }}"""
    created, expected = run_both(model(body, opset=19), floats(1, 2, 5, 6))
    assert created[0].shape == expected[0].shape
    np.testing.assert_allclose(created[0], expected[0], rtol=0, atol=5e-6)


@pytest.mark.parametrize("antialias", [0, 1])
def test_resize_to_a_smaller_size_may_be_antialiased(antialias: int) -> None:
    body = f"""{IMAGE} {{ s = Constant <value = int64[4] {{1, 2, 3, 4}}> ()
        y = Resize <mode = "linear", antialias = {antialias}> (x, , , s) }}"""
    created, expected = run_both(model(body, opset=18), floats(1, 2, 5, 6))
    np.testing.assert_allclose(created[0], expected[0], rtol=0, atol=5e-6)


def test_subgraphs_take_values_of_the_graph_around() -> None:
    body = """(float[3] x) => (float[?] y) {
        n = Constant <value_int = 3> () zero = Constant <value_float = 0.0> ()
        total = ReduceSum <keepdims = 0> (x) yes = Greater (total, zero)
        start = Identity (x)
        y = If (yes) <
            then_branch = t () => (float[?] a) {
                one = Constant <value_float = 1.0> () a = Add (x, one) },
            else_branch = e () => (float[?] b) { b = Neg (start) }> }"""
    for sign in (1.0, -1.0):
        created, expected = run_both(model(body, opset=13), np.full(3, sign, np.float32))
        np.testing.assert_array_equal(created[0], expected[0])


def test_integers_are_divided_toward_zero() -> None:
    body = "(int64[4] x, int64[4] z) => (int64[4] y) { y = Div (x, z) }"
    created, expected = run_both(
        model(body, opset=13), np.array([-7, 7, -8, 8]), np.array([2, -2, 3, 3])
    )
    np.testing.assert_array_equal(created[0], expected[0])


def test_equal_elements_keep_their_order_in_top_k() -> None:
    body = """(float[5] x) => (float[3] v, int64[3] y) {
        k = Constant <value_ints = [3]> () v, y = TopK (x, k) }"""
    created, expected = run_both(model(body, opset=11), np.array([1, 2, 2, 2, 0], np.float32))
    np.testing.assert_array_equal(created[1], expected[1])


def test_unsorted_top_k_has_the_order_of_onnx_runtime() -> None:
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 13]>
        g (float[4,20] x) => (float[4,12] most, int64[4,12] at) {
            k = Constant <value_ints = [12]> () most, at = TopK <sorted = 0> (x, k) }""")
    x = floats(4, 20)
    created, expected = run_both(proto, x)
    with torch.no_grad():
        wide = OnnxReference(proto).double().compute([torch.from_numpy(x).double()])
    for item, double, second in zip(created, wide, expected, strict=True):
        np.testing.assert_array_equal(item, second)
        np.testing.assert_array_equal(double.numpy(), second)


@pytest.mark.parametrize("operator", ["Div", "Mod", "Max", "BitShift", "Less"])
def test_integers_beyond_int64_are_computed(operator: str) -> None:
    how = ' <direction = "RIGHT">' if operator == "BitShift" else ""
    kind = "bool" if operator == "Less" else "uint64"
    body = f"(uint64[3] x, uint64[3] z) => ({kind}[3] y) {{ y = {operator}{how} (x, z) }}"
    x, z = np.array([[2**64 - 1, 2**63 + 5, 7], [3, 2**63, 2]], np.uint64)
    created, expected = run_both(model(body, opset=13), x, z)
    np.testing.assert_array_equal(created[0], expected[0])


@pytest.mark.parametrize("mask", ["bool", "float"])
@pytest.mark.parametrize("how", ["is_causal = 0", "is_causal = 1", "softcap = 2.0"])
def test_masked_scores_of_attention_are_those_of_onnx_runtime(mask: str, how: str) -> None:
    size = "[1,2,3,4]"
    proto = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 23]>
        g (float{size} q, float{size} k, float{size} v, {mask}[3,3] m)
        => (float{size} y, float[1,2,3,3] scores) {{
            y, past_k, past_v, scores =
                Attention <{how}, qk_matmul_output_mode = 2> (q, k, v, m) }}""")
    allowed = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0]], bool)
    arguments = allowed if mask == "bool" else np.where(allowed, 0, -np.inf).astype(np.float32)
    created, expected = run_both(proto, *(floats(1, 2, 3, 4) for _ in "qkv"), arguments)
    for item, second in zip(created, expected, strict=True):
        np.testing.assert_allclose(item, second, rtol=1e-5, atol=1e-6)


def test_a_function_of_the_file_is_computed() -> None:
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
        g (float[3] x) => (float[3] y) { y = own.twice (x) }
        <domain: "own", opset_import: ["" : 17]> twice (a) => (b) { b = Add (a, a) }""")
    created, expected = run_both(proto, floats(3))
    np.testing.assert_array_equal(created[0], expected[0])


def test_attributes_of_functions_have_their_defaults() -> None:
    proto = parser.parse_model("""<ir_version: 9, opset_import: ["" : 17, "own" : 1]>
        g (float[3] x) => (float[3] y) { h = own.inner (x) y = own.outer <slope = 0.5> (h) }
        <domain: "own", opset_import: ["" : 17]>
        inner <slope : float = 0.25> (a) => (b) { b = LeakyRelu <alpha : float = @slope> (a) }
        <domain: "own", opset_import: ["" : 17, "own" : 1]>
        outer <slope> (a) => (b) { c = own.inner <slope : float = @slope> (a) b = own.inner (c) }
        """)
    created, expected = run_both(proto, np.array([-16.0, 0.0, 4.0], np.float32))
    assert created[0].tolist() == expected[0].tolist() == [-0.5, 0.0, 4.0]


def test_functions_of_another_opset_are_computed_by_that_of_the_model() -> None:
    """ONNX Runtime does the same. Softmax of opset 12 would flatten the axes after the first."""
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
        g (float[2,3,4] x) => (float[2,3,4] y) { y = own.soft (x) }
        <domain: "own", opset_import: ["" : 12]> soft (a) => (b) { b = Softmax <axis = 1> (a) }""")
    created, expected = run_both(proto, floats(2, 3, 4))
    np.testing.assert_allclose(created[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(created[0].sum(axis=1), 1.0, rtol=1e-6)


def test_bits_of_float64_are_those_of_the_stated_type() -> None:
    proto = parser.parse_model("""<ir_version: 14, opset_import: ["" : 26]>
        g (float[3] x) => (int32[3] y) { y = BitCast <to = 6> (x) }""")
    x = floats(3)
    with torch.no_grad():
        created = OnnxReference(proto).double()(torch.from_numpy(x).double())
    assert created.tolist() == x.view(np.int32).tolist()


def test_float64_is_nearer_to_the_truth_than_float32() -> None:
    body = "(float[1,64] x) => (float[?,?] y) { y = Softmax (x) z = Log (y) }"
    proto = model(body.replace("z = Log (y)", ""), opset=13)
    x = 10 * floats(1, 64)
    wide = double_copy(OnnxReference(proto))
    with torch.no_grad(), in_double():
        created = to_numpy(wide(torch.from_numpy(x).double()))
    shifted = np.exp(x.astype(np.float64) - x.max())
    assert created.dtype == np.float64
    np.testing.assert_allclose(created, shifted / shifted.sum(), rtol=1e-14)


def test_constants_keep_their_float32_values_in_float64() -> None:
    scale = np.float32(0.1)
    node = helper.make_node("Mul", ["x", "s"], ["y"], name="scaled")
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        [helper.make_tensor("s", TensorProto.FLOAT, [], [float(scale)])],
    )  # fmt: skip
    wide = double_copy(OnnxReference(helper.make_model(graph)))
    with torch.no_grad(), in_double():
        created = wide(torch.ones(1, dtype=torch.float64))
    assert created.item() == float(scale)


def test_nodes_are_modules_with_their_weights() -> None:
    body = """(float[1,2] x) => (float[?,?] y) <float[2,3] w = {1, 2, 3, 4, 5, 6}> {
        y = MatMul (x, w) }"""
    proto = model(body, opset=13)
    proto.graph.node[0].name = "layer.0/MatMul"
    names = dict(OnnxReference(proto).named_parameters())
    assert list(names) == ["layer_0/MatMul.B"]


@pytest.mark.parametrize("name", ["last", "order", "forward", "inputs", "a.b", ""])
def test_nodes_may_have_any_name(name: str) -> None:
    proto = model(X + "{ z = Neg (x) y = Exp (z) }", opset=13)
    proto.graph.node[0].name = name
    created, expected = run_both(proto, floats(2, 3, 4))
    np.testing.assert_allclose(created[0], expected[0], rtol=1e-6)


def test_an_operator_that_the_table_lacks_must_agree_with_onnx_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(onnx_operators.TABLE, ("", "Softmax"))
    proto = model(X + "{ y = Softmax <axis = 1> (x) }", opset=13)
    created, expected = run_both(proto, floats(2, 3, 4))
    np.testing.assert_allclose(created[0], expected[0], atol=1e-6)
    with pytest.raises(ModelError, match="Softmax at opset 12"):
        run_both(model(X + "{ y = Softmax <axis = 1> (x) }", opset=12), floats(2, 3, 4))
