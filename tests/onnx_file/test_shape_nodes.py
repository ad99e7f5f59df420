"""Data flow determines which nodes compute shapes, indices and other parameters."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gate.onnx_file.shape_nodes import is_shape_node, shape_nodes

PLACEMENTS = Path(__file__).with_name("placements")


def load_recorded(name):
    return onnx.load_from_string(gzip.decompress((PLACEMENTS / f"{name}.onnx.gz").read_bytes()))


def nodes_on_cpu(model):
    return model.metadata_props[0].value.split("\n")


@pytest.mark.parametrize(
    ("name", "most", "rest"),
    [
        ("torchvision-swin", 339, []),
        ("torchvision-swin-optimized", 261, []),
        ("torchvision-swin-v2-optimized", 261, []),
        ("timm-swin-optimized", 252, []),
        ("transformers-swin-optimized", 242, []),
        ("clip-text-optimized", 44, []),
        ("atan-optimized", 1, ["Atan:/Atan"]),
        ("stft-optimized", 1, ["STFT:node_STFT_27"]),
    ],
)
def test_cpu_nodes_of_cuda_sessions_are_shape_nodes(name, most, rest):
    model = load_recorded(name)
    result, placed = shape_nodes(model), nodes_on_cpu(model)
    assert len(placed) == most
    assert [node for node in placed if not is_shape_node(node, result)] == rest


@pytest.mark.parametrize("name", ["torchvision-swin-optimized", "clip-text-optimized"])
def test_compute_nodes_are_not_shape_nodes(name):
    model = load_recorded(name)
    result = shape_nodes(model)
    work = ("Conv", "MatMul", "Gemm", "LayerNormalization", "Softmax", "SkipLayerNormalization")
    kinds = {name.partition(":")[0] for name in result}
    assert kinds.isdisjoint(work)
    assert kinds & {"Gather", "Concat"}


def node(op, inputs, output, name="", **attributes):
    return helper.make_node(op, inputs, [output], name, **attributes)


def model(*nodes, outputs=("y",)):
    """Return a model with floats `x` (n, 4), int64 `ids` (n, 8), and `shape`, the shape of `x`."""
    weights = [
        numpy_helper.from_array(np.array(0), "zero"),
        numpy_helper.from_array(np.array(True), "true"),
        numpy_helper.from_array(np.ones((4, 4), np.float32), "w"),
        numpy_helper.from_array(np.ones((100, 4), np.float32), "table"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", 8])
    created = [helper.make_empty_tensor_value_info(name) for name in outputs]
    shape = node("Shape", ["x"], "shape", "shape")
    graph = helper.make_graph([shape, *nodes], "g", [x, ids], created, weights)
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("acme", 1)]
    return helper.make_model(graph, opset_imports=sets)


CASES = {
    "a shape": (True, [node("Add", ["shape", "shape"], "s", "at"), node("Expand", ["x", "s"], "y")]),
    "a long index": (True, [node("Mul", ["ids", "ids"], "i", "at"), node("Gather", ["table", "i"], "y")]),
    "integers that are data": (False, [node("Mul", ["ids", "ids"], "y", "at")]),
    "integers that become floats": (False, [node("Mul", ["ids", "ids"], "i", "at"), node("Cast", ["i"], "f", to=1), node("Relu", ["f"], "y")]),
    "a shape that is an output": (True, [node("Mul", ["shape", "shape"], "y", "at")]),
    "an index of activations": (False, [node("ArgMax", ["x"], "i", "at"), node("Gather", ["table", "i"], "y")]),
    "what only lends its shape": (False, [node("Relu", ["x"], "r", "at"), node("Shape", ["r"], "y")]),
    "a scale by shapes": (True, [node("Gather", ["shape", "zero"], "n"), node("Cast", ["n"], "f", to=1), node("Sqrt", ["f"], "q", "at"), node("Div", ["x", "q"], "y")]),
    "a scale by data": (False, [node("ReduceMax", ["x"], "m", keepdims=0), node("Sqrt", ["m"], "q", "at"), node("Div", ["x", "q"], "y")]),
    "activations": (False, [node("Add", ["x", "x"], "y", "at")]),
    "a matrix product of a shape": (False, [node("MatMul", ["shape", "shape"], "m", "at"), node("Expand", ["x", "m"], "y")]),
    "of another domain": (False, [node("Add", ["shape", "shape"], "s", "at", domain="acme"), node("Add", ["x", "s"], "y")]),
    "read by another domain": (False, [node("Mul", ["ids", "ids"], "i", "at"), node("Gather", ["x", "i"], "y", domain="acme")]),
    "an index and data": (False, [node("Mul", ["ids", "ids"], "i", "at"), node("Gather", ["table", "i"], "g"), node("Cast", ["i"], "f", to=1), node("Concat", ["g", "f"], "y", axis=0)]),
    "one name twice": (False, [node("Mul", ["shape", "shape"], "s", "at"), node("Mul", ["x", "x"], "m", "at"), node("Expand", ["m", "s"], "y")]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_only_shape_computations_are_shape_nodes(case):
    excused, nodes = CASES[case]
    kind = next(each.op_type for each in nodes if each.name == "at")
    assert (f"{kind}:at" in shape_nodes(model(*nodes))) is excused


@pytest.mark.parametrize(("read", "excused"), [("shape", True), ("x", False)])
def test_subgraphs_are_followed(read, excused):
    branches = {
        f"{side}_branch": helper.make_graph(
            [node("Add", [read, read], f"{side}_out", f"{side}/Add")],
            side, [], [helper.make_empty_tensor_value_info(f"{side}_out")],
        )
        for side in ("then", "else")
    }  # fmt: skip
    result = shape_nodes(
        model(node("If", ["true"], "s", "if", **branches), node("Expand", ["x", "s"], "y"))
    )
    assert ("Add:then/Add" in result) is excused


def test_computing_loop_is_not_a_shape_node():
    body = helper.make_graph(
        [node("Identity", ["cond"], "go"), node("Add", ["sum", "x"], "next", "body/Add")],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("cond", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["n", 4]),
        ],
        [helper.make_empty_tensor_value_info(name) for name in ("go", "next")],
    )
    steps = node("Gather", ["shape", "zero"], "steps", "steps/Gather")
    result = shape_nodes(model(steps, node("Loop", ["steps", "", "x"], "y", "loop", body=body)))
    assert "Gather:steps/Gather" in result
    assert not {"Add:body/Add", "Loop:loop"} & result
