"""Each injected fault is rejected and located at the faulty node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser, shape_inference

import gate
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, RuntimePolicy

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]


def w(*shape: int, seed: int = 0) -> Array:
    fan = int(np.prod(shape[1:])) or 1
    random = np.random.default_rng(seed + len(shape) + shape[0])
    return (random.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)


def i(*values: int) -> Array:
    return np.array(values, np.int64)


IMAGE, ROWS, TABLE = (4, 6, 6), (5, 8), (8,)


@dataclass(frozen=True)
class Fault:
    """Nodes from `a`, the scaled input, to `z`.

    In the faulty file `text` or tensors are replaced; `at` is the node that must be named.
    """

    shape: tuple[int, ...]
    nodes: Sequence[str]
    text: tuple[str, str] = ("", "")
    tensors: Tensors = field(default_factory=dict)
    change: Callable[[Tensors], Tensors] = dict
    at: str = "node"
    opset: int = 18
    new_opset: int | None = None
    also: tuple[str, ...] = ()
    """Other nodes that may be named: readers of the omitted tensor."""
    policy: Policy | None = None

    def file(self, path: Path, *, is_new: bool = False, is_faulty: bool = False) -> Path:
        nodes = ["[before] a = Mul (x, gain)", *self.nodes, "[after] y = Tanh (z)"]
        tensors = {"gain": 1 + w(self.shape[-1]) / 4, **self.tensors}
        opset = self.opset
        if is_faulty:
            replaced = [node.replace(*self.text) if self.text[0] else node for node in nodes]
            tensors = {**tensors, **self.change(self.tensors)}
            opset = self.new_opset or opset
            assert replaced != nodes or self.new_opset or self.change is not dict
            nodes = [node for node in replaced if node]
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *self.shape])
        graph = helper.make_graph(
            [parser.parse_node(node) for node in nodes],
            "g",
            [x],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(array, name) for name, array in tensors.items()],
        )
        imports = [helper.make_opsetid("", opset)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=9)
        model.producer_name = "new" if is_new else "old"
        onnx.save(shape_inference.infer_shapes(model), path)
        return path


def flip(name: str, axis: int = 0) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: np.ascontiguousarray(np.flip(tensors[name], axis))}


LOOP = (
    "[node] z = Loop (turns, , a) <body = g (int64 t, bool go, float[n,8] s) => "
    "(bool more, float[n,8] r) { more = Identity (go) h = MatMul (s, w) r = Tanh (h) }>"
)
SCAN = (
    "[node] last, z = Scan (zero, a) <num_scan_inputs = 1, scan_input_axes = [1], "
    "scan_output_axes = [1], body = g (float[n,8] s, float[n,8] t) => (float[n,8] r, float[n,8] u) "
    "{ h = Add (s, t) r = Tanh (h) u = Identity (r) }>"
)
IF = (
    "[node] z = If (large) <then_branch = g () => (float[n,8] p) { p = Relu (a) }, "
    "else_branch = h () => (float[n,8] q) { q = Elu (a) }>"
)
CONV = "[node] z = Conv <pads = [1,1,1,1]> (a, w, b)"
FILTERS = {"w": w(4, 4, 3, 3), "b": w(4)}

EIGHT_BITS = Policy(
    precision="quantized",
    task="tensors",
    min_samples=8,
    instruments=Policy.quantized().instruments,
    runtimes={
        "ort-cpu-optimized": RuntimePolicy(required="always", bounds=Bounds(scaled_diff=1e-3))
    },
)

FAULTS: dict[str, Fault] = {
    "axis of a softmax": Fault(ROWS, ["[node] z = Softmax <axis = 2> (a)"], ("= 2", "= 1")),
    "axis of a mean": Fault(
        (5, 5), ["[node] z = ReduceMean <keepdims = 0> (a, axes)"],
        tensors={"axes": i(1)}, change=lambda _: {"axes": i(2)},
    ),
    "transposed weight": Fault(
        TABLE, ["[node] z = MatMul (a, w)"],
        tensors={"w": w(8, 8)}, change=lambda t: {"w": np.ascontiguousarray(t["w"].T)},
    ),
    "weight in float16": Fault(
        TABLE, ["[node] z = MatMul (a, w)"], tensors={"w": w(8, 8)},
        change=lambda t: {"w": t["w"].astype(np.float16).astype(np.float32)},
    ),
    "row of a weight": Fault(
        TABLE, ["[node] z = Gemm <transB = 1> (a, w, b)"], tensors={"w": w(8, 8), "b": w(8)},
        change=lambda t: {"w": np.roll(t["w"], 1, 0)},
    ),
    "bias left out": Fault(
        IMAGE, [CONV], (", b)", ")"), tensors=FILTERS,
    ),
    "pads": Fault(IMAGE, [CONV], ("[1,1,1,1]", "[2,2,0,0]"), tensors=FILTERS),
    "dilation": Fault(
        IMAGE, [CONV], ("pads = [1,1,1,1]", "pads = [2,2,2,2], dilations = [2,2]"), tensors=FILTERS
    ),
    "groups": Fault(
        IMAGE, ["[node] z = Conv <group = 2> (a, w)"], tensors={"w": w(4, 2, 1, 1)},
        change=flip("w"),
    ),
    "epsilon of a layer norm": Fault(
        ROWS, ["[node] z = LayerNormalization <epsilon = 0.00001> (a, s, b)"],
        ("0.00001", "0.001"), tensors={"s": 1 + w(8), "b": w(8)},
    ),
    "epsilon of a batch norm": Fault(
        IMAGE, ["[node] z = BatchNormalization <epsilon = 0.00001> (a, s, b, m, v)"],
        ("0.00001", "0.001"),
        tensors={"s": 1 + w(4), "b": w(4), "m": w(4, seed=1), "v": np.square(w(4)) + 1},
    ),
    "clip left out": Fault(
        TABLE, ["[node] c = Clip (a, low, high)", "[reader] z = Mul (c, c)"],
        ("Clip (a, low, high)", "Identity (a)"),
        tensors={"low": np.float32(0), "high": np.float32(1)}, also=("reader",),
    ),
    "bound of a clip": Fault(
        TABLE, ["[node] z = Clip (a, low, high)"],
        tensors={"low": np.float32(-1), "high": np.float32(1)},
        change=lambda _: {"high": np.float32(1.1)},
    ),
    "perm": Fault((3, 3, 3), ["[node] z = Transpose <perm = [0,2,3,1]> (a)"],
                  ("[0,2,3,1]", "[0,3,1,2]")),
    "mode of a resize": Fault(
        IMAGE, ['[node] z = Resize <mode = "linear"> (a, , scales)'], ("linear", "cubic"),
        tensors={"scales": np.array([1, 1, 2, 2], np.float32)},
    ),
    "coordinates of a resize": Fault(
        IMAGE, ['[node] z = Resize <mode = "linear", coordinate_transformation_mode = '
                '"half_pixel"> (a, , scales)'], ("half_pixel", "align_corners"),
        tensors={"scales": np.array([1, 1, 2, 2], np.float32)},
    ),
    "swapped inputs": Fault(
        TABLE, ["[other] h = Sigmoid (a)", "[node] z = Sub (a, h)"], ("(a, h)", "(h, a)")
    ),
    "order of parts": Fault(
        TABLE, ["[other] h = Sigmoid (a)", "[node] z = Concat <axis = 1> (a, h)"],
        ("(a, h)", "(h, a)"),
    ),
    "opset of a softmax": Fault(
        ROWS, ["[node] z = Softmax <axis = 1> (a)"], opset=12, new_opset=13
    ),
    "index": Fault(
        ROWS, ["[node] z = Gather <axis = 1> (a, at)"],
        tensors={"at": i(0, 3)}, change=lambda _: {"at": i(0, 2)},
    ),
    "start of a slice": Fault(
        ROWS, ["[node] z = Slice (a, start, end, axis)"],
        tensors={"start": i(1), "end": i(4), "axis": i(1)},
        change=lambda _: {"start": i(2), "end": i(5)},
    ),
    "step of a slice": Fault(
        ROWS, ["[node] z = Slice (a, start, end, axis, step)"],
        tensors={"start": i(1), "end": i(5), "axis": i(2), "step": i(2)},
        change=lambda _: {"step": i(1)},
    ),
    "trip count": Fault(
        TABLE, [LOOP], tensors={"turns": np.array(3), "w": w(8, 8)},
        change=lambda _: {"turns": np.array(4)},
    ),
    "body of a loop": Fault(
        TABLE, [LOOP], ("Tanh (h)", "Elu (h)"), tensors={"turns": np.array(3), "w": w(8, 8)}
    ),
    "direction of a scan": Fault(
        (5, 8), ["[other] zero = ReduceMean <keepdims = 0> (a, one)", SCAN],
        ("num_scan_inputs = 1,", "num_scan_inputs = 1, scan_input_directions = [1],"),
        tensors={"one": i(1)},
    ),
    "branch": Fault(
        TABLE, ["[mean] m = ReduceMean <keepdims = 0> (a)", "[above] large = Greater (m, zero)", IF],
        ("then_branch = g () => (float[n,8] p) { p = Relu (a) }, else_branch = h () => "
         "(float[n,8] q) { q = Elu (a) }",
         "then_branch = g () => (float[n,8] p) { p = Elu (a) }, else_branch = h () => "
         "(float[n,8] q) { q = Relu (a) }"),
        tensors={"zero": np.float32(0)},
    ),
    "kind of a gelu": Fault(
        TABLE, ['[node] z = Gelu <approximate = "none"> (a)'], ("none", "tanh"), opset=20
    ),
    "slope": Fault(TABLE, ["[node] z = LeakyRelu <alpha = 0.01> (a)"], ("0.01", "0.02")),
    "counted pads of a mean": Fault(
        IMAGE, ["[node] z = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1], "
                "count_include_pad = 0> (a)"], ("pad = 0", "pad = 1"),
    ),
    "mode of a pad": Fault(
        IMAGE, ['[node] z = Pad <mode = "reflect"> (a, pads)'], ("reflect", "edge"),
        tensors={"pads": i(0, 0, 1, 1, 0, 0, 1, 1)},
    ),
    "order of pixels": Fault(
        (8, 3, 3), ['[node] z = DepthToSpace <blocksize = 2, mode = "DCR"> (a)'], ("DCR", "CRD")
    ),
    "exclusive sum": Fault(
        ROWS, ["[node] z = CumSum (a, one)"], ("CumSum (", "CumSum <exclusive = 1> ("),
        tensors={"one": np.array(1)},
    ),
    "order of gates": Fault(
        ROWS, ["[turn] t = Transpose <perm = [1,0,2]> (a)",
               "[node] s, last, cell = LSTM <hidden_size = 4> (t, w, r)",
               "[flat] z = Squeeze (s, one)"],
        tensors={"w": w(1, 16, 8), "r": w(1, 16, 4), "one": i(1)},
        change=lambda t: {"w": np.roll(t["w"], 4, 1)},
    ),
    "activation": Fault(TABLE, ["[node] z = Softplus (a)"], ("Softplus", "Softsign")),
    "truncated instead of rounded": Fault(
        TABLE, ["[node] r = Round (a)", "[cast] k = Cast <to = 7> (r)", "[back] z = Cast <to = 1> (k)"],
        ("Round", "Floor"),
    ),
    "largest instead of smallest": Fault(
        ROWS, ["[node] z, at = TopK <largest = 1> (a, k)"], ("= 1", "= 0"), tensors={"k": i(3)}
    ),
    "zero point": Fault(
        TABLE, ["[eight] q = QuantizeLinear (a, step, zero)",
                "[node] z = DequantizeLinear (q, step, zero_again)"],
        tensors={"step": np.float32(0.03), "zero": np.uint8(128), "zero_again": np.uint8(128)},
        change=lambda _: {"zero_again": np.uint8(129)}, policy=EIGHT_BITS,
    ),
    "equation": Fault(
        (5, 5), ['[node] z = Einsum <equation = "nij,nkj->nik"> (a, a)'], ("nkj->", "njk->")
    ),
}  # fmt: skip


CAUSES = dict.fromkeys((
    "axis of a mean", "transposed weight", "weight in float16", "row of a weight", "groups",
    "bound of a clip", "index", "start of a slice", "step of a slice", "trip count", "order of gates", "zero point",
), "weights") | dict.fromkeys(
    ("clip left out", "truncated instead of rounded", "activation"), "operators"
)  # fmt: skip
"""Expected causes of faults that are not in an attribute of the node."""


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_at_its_node(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    old = fault.file(tmp_path / "old.onnx")
    samples = np.random.default_rng(2).standard_normal((16, *fault.shape)).astype(np.float32)
    right = fault.file(tmp_path / "same.onnx", is_new=True)
    same = gate.check(right, old, samples, fault.policy)
    assert same.decision.verdict.value == "PASS", same.decision.problems
    new = fault.file(tmp_path / "new.onnx", is_new=True, is_faulty=True)
    result = gate.check(new, old, samples, fault.policy)
    assert result.decision.verdict.value == "FAIL"
    located = result.explanation.localisation
    assert located is not None
    assert located.first_divergence in (fault.at, *fault.also)
    assert located.fault_code == CAUSES.get(name, "settings"), located.fault_params


def write_masked(
    path: Path, number: int = TensorProto.FLOAT, *, low: float = -3.4e38, product: str = "Gemm"
) -> Path:
    """Write a softmax of masked scores that computes in another type of `number`."""
    nodes = [
        f"[start] h = Cast <to = {number}> (x)",
        "[empty] masked = Less (h, nothing)",
        "[mask] m = Where (masked, low, nothing)",
        f"[product] p = {product} (h, w, b)",
        "[scale] t = Mul (p, tiny)",
        "[masked] s = Add (p, m)",
        "[rest] r = Add (s, t)",
        "[softmax] q = Softmax (r)",
        "[end] y = Cast <to = 1> (q)",
    ]
    dtype = helper.tensor_dtype_to_np_dtype(number)
    tensors = {
        "w": w(8, 8),
        "b": w(8),
        "nothing": np.float32(0),
        "low": np.float32(low),
        "tiny": np.float32(1.2e-7),
    }
    model = helper.make_model(
        helper.make_graph(
            [parser.parse_node(node) for node in nodes],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
            [numpy_helper.from_array(np.asarray(a, dtype), n) for n, a in tensors.items()],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )
    onnx.save(model, path)
    return path


def test_numbers_converted_to_float16_hide_no_fault(tmp_path: Path) -> None:
    old = write_masked(tmp_path / "old.onnx")
    samples = np.random.default_rng(2).standard_normal((16, 8)).astype(np.float32)
    reduced = Policy.built_in("reduced")

    def check(product: str) -> gate.EvaluationResult:
        path = tmp_path / "half.onnx"
        half = write_masked(path, TensorProto.FLOAT16, low=-1e4, product=product)
        return gate.check(half, old, samples, reduced)

    assert check("Gemm").decision.passed
    located = check("Gemm <alpha = 1.2>").explanation.localisation
    assert located is not None
    assert [(fault.module, fault.code) for fault in located.faults] == [("product", "settings")]


def test_indices_of_rounded_values_have_no_relative_error(tmp_path: Path) -> None:
    def write(name: str, source: str, *eight: str) -> Path:
        nodes = [
            "[same] s = Identity (a)",
            *eight,
            f"[node] v, i = TopK ({source}, k)",
            "[back] j = Cast <to = 1> (i)",
            "[sum] z = Add (v, j)",
        ]
        tensors = {"k": i(3), "step": np.float32(0.4), "zero": np.uint8(128)}
        return Fault(TABLE, nodes, tensors=tensors).file(tmp_path / name)

    old = write("old.onnx", "s")
    new = write(
        "new.onnx",
        "d",
        "[eight] q = QuantizeLinear (s, step, zero)",
        "[float] d = DequantizeLinear (q, step, zero)",
    )
    samples = np.random.default_rng(2).standard_normal((16, 8)).astype(np.float32)
    located = gate.check(new, old, samples, EIGHT_BITS).explanation.localisation
    assert located is not None
    assert located.fault_code == "int8"
    assert located.fault_params["variant"] == "allowed"
    assert not any(np.isnan(fault.params.get("error", 0.0)) for fault in located.faults)
