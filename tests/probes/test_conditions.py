"""Files that contain conditions on the sizes of their inputs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from gate import Verdict, decide
from tests.measure import tiny
from tests.modules import Layers
from tests.probes import benches

VECTORS = {"x": benches.vectors(12, 6)}
SEQUENCES = {"x": np.random.default_rng(0).normal(size=(12, 5, 6)).astype(np.float32)}
LENGTHS = {"x": {0: "batch", 1: "length"}, "output": {0: "batch", 1: "length"}}


def create_constant(name, value, dtype=np.int64):
    return numpy_helper.from_array(np.asarray(value, dtype), name)


def create_node(operator, inputs, output, **attributes):
    return helper.make_node(operator, inputs.split(), [output], **attributes)


def create_branch(*nodes, output="y", initializers=()):
    """Return a branch of an If."""
    value = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, "branch", [], [value], initializer=initializers)


SIZE = (create_node("Shape", "x", "shape"), create_node("Gather", "shape axis", "size"))

SELECT_BY_SIZE = (
    *SIZE,
    create_node("Equal", "size limit", "same"),
    create_node("Where", "same wrong right", "factor"),
)

HIDDEN_SIZE = (create_node("Shape", "hidden", "shape"), *SELECT_BY_SIZE[1:])

ABOVE_LIMIT = (*SIZE, create_node("Greater", "size limit", "same"), SELECT_BY_SIZE[-1])

ARITHMETIC = (
    *SIZE,
    create_node("Mul", "size six", "elements"),
    create_node("Cast", "elements", "counted", to=TensorProto.FLOAT),
    create_node("Cast", "limit", "limit_float", to=TensorProto.FLOAT),
    create_node("Cast", "six", "six_float", to=TensorProto.FLOAT),
    create_node("Mul", "limit_float six_float", "most"),
    create_node("Equal", "counted most", "same"),
    SELECT_BY_SIZE[-1],
)

PIECEWISE = (
    *SIZE,
    create_node("Min", "size limit", "kept"),
    create_node("Sub", "size kept", "more"),
    create_node("Cast", "more", "more_float", to=TensorProto.FLOAT),
    create_node("Add", "more_float right", "factor"),
)

IF = (
    *SIZE,
    create_node("Equal", "size limit", "same"),
    helper.make_node(
        "If",
        ["same"],
        ["factor"],
        then_branch=create_branch(create_node("Identity", "wrong", "y")),
        else_branch=create_branch(create_node("Identity", "right", "y")),
    ),
)

_INNER = (
    create_node("Shape", "hidden", "s"),
    create_node("Gather", "s axis", "n"),
    create_node("Equal", "n limit", "e"),
)

NESTED = (
    create_node("ReduceSum", "x", "total", keepdims=0),
    create_node("Greater", "total minus", "positive"),
    helper.make_node(
        "If",
        ["positive"],
        ["factor"],
        then_branch=create_branch(*_INNER, create_node("Where", "e wrong right", "y")),
        else_branch=create_branch(
            create_node("Shape", "x", "s"), create_node("Identity", "right", "y")
        ),
    ),
)


def loop_node(*nodes):
    """Return a loop with one step per sample, in which each step may change the factor."""
    body = helper.make_graph(
        [*nodes, create_node("Identity", "go", "again"), create_node("Identity", "state", "next")],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("kept", TensorProto.FLOAT, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("changed", TensorProto.FLOAT, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
    )
    ends = helper.make_node(
        "Loop", ["size", "", "right", "hidden"], ["factor", "last_state"], body=body
    )
    return (*SIZE, ends)


LOOP_OVER_STATE = loop_node(
    create_node("Shape", "state", "s"),
    create_node("Gather", "s axis", "n"),
    create_node("Equal", "n limit", "e"),
    create_node("Where", "e wrong kept", "changed"),
)


LOOP_OVER_STEPS = loop_node(
    create_node("Equal", "step limit", "e"), create_node("Where", "e wrong kept", "changed")
)

CONDITIONS = {
    "loop over a state": LOOP_OVER_STATE,
    "where": SELECT_BY_SIZE,
    "of an intermediate": HIDDEN_SIZE,
    "if": IF,
    "nested": NESTED,
    "arithmetic": ARITHMETIC,
}


def make_rows() -> nn.Module:
    return Layers(
        lambda m, x: m.last(torch.tanh(m.first(x))),
        first=lambda: nn.Linear(6, 8),
        last=lambda: nn.Linear(8, 3),
    )


def check_model(tmp_path, nodes, arrays, *, limit, wrong, axis=0, axes=None):
    torch.manual_seed(0)
    model = make_rows().eval()
    path = tmp_path / "m.onnx"
    benches.export(model, path, arrays, axes=axes)
    proto = onnx.load(path)
    graph = proto.graph
    hidden = next(n.output[0] for n in graph.node if n.op_type == "Tanh")
    last = next(n for n in graph.node if "output" in n.output)
    last.output[0] = "before"
    graph.node.extend([create_node("Identity", hidden, "hidden"), *nodes])
    graph.node.append(create_node("Mul", "before factor", "output"))
    graph.initializer.extend([
        create_constant("axis", axis), create_constant("limit", limit), create_constant("six", 6),
        create_constant("wrong", wrong, np.float32), create_constant("right", 1.0, np.float32),
        create_constant("minus", -1e9, np.float32),
    ])  # fmt: skip
    onnx.save(proto, path)
    onnx.checker.check_model(proto)
    candidate = tiny.candidate(path)
    quiet = {"noise_samples": 8, "stability_samples": 0, "search_inputs": 0}
    observed = benches.measured(model, candidate, arrays, **quiet)
    return decide(benches.policy(**quiet), tiny.stored(observed), decided_at="now")


def failed_checks(decision):
    return {check.name for check in decision.checks if check.verdict is Verdict.FAIL}


@pytest.mark.rows(2)
@pytest.mark.parametrize("way", CONDITIONS)
def test_fault_at_one_batch_size_fails(tmp_path, way):
    limit = 33 if "loop" in way else 5
    decision = check_model(tmp_path, CONDITIONS[way], VECTORS, limit=limit, wrong=1.5)
    assert f"probe_batch_{limit}" in failed_checks(decision)


@pytest.mark.rows(3)
@pytest.mark.parametrize("way", CONDITIONS)
def test_correct_file_with_a_size_condition_passes(tmp_path, way):
    decision = check_model(tmp_path, CONDITIONS[way], VECTORS, limit=33, wrong=1.0)
    assert decision.verdict is Verdict.PASS
    probes = {check.name for check in decision.checks}
    assert {"probe_batch_32", "probe_batch_33", "probe_batch_34"} <= probes


@pytest.mark.parametrize(("way", "limit"), [("where", 9), ("of an intermediate", 7), ("if", 128)])
def test_fault_at_one_length_fails(tmp_path, way, limit):
    about = {"limit": limit, "axis": 1, "axes": LENGTHS}
    decision = check_model(tmp_path, CONDITIONS[way], SEQUENCES, wrong=1.5, **about)
    assert failed_checks(decision) == {f"probe_size_{limit}"}
    decision = check_model(tmp_path, CONDITIONS[way], SEQUENCES, wrong=1.0, **about)
    assert decision.verdict is Verdict.PASS


def test_fault_above_a_batch_size_fails(tmp_path):
    decision = check_model(tmp_path, ABOVE_LIMIT, VECTORS, limit=100, wrong=1.5)
    assert failed_checks(decision) == {"probe_batch_101"}


def test_fault_at_one_loop_step_fails(tmp_path):
    """The fault shows in batches for which the loop makes more steps."""
    limit = 70
    decision = check_model(tmp_path, LOOP_OVER_STEPS, VECTORS, limit=limit, wrong=1.5)
    assert f"probe_batch_{limit + 1}" in failed_checks(decision)
    assert (
        check_model(tmp_path, LOOP_OVER_STEPS, VECTORS, limit=limit, wrong=1.0).verdict
        is Verdict.PASS
    )


def test_limit_by_minimum_fails(tmp_path):
    decision = check_model(tmp_path, PIECEWISE, VECTORS, limit=60, wrong=1.5)
    assert failed_checks(decision) == {"probe_batch_61"}
