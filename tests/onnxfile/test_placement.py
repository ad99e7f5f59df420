from __future__ import annotations

import json

import pytest

from gate.errors import EvidenceError
from gate.onnx_file.sessions import read_placement

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def node(name, op, provider, *shapes, index=0, dtype="int64"):
    return {
        "cat": "Node",
        "name": f"{name}_kernel_time",
        "args": {
            "op_name": op,
            "provider": provider,
            "node_index": str(index),
            "output_type_shape": [{dtype: list(shape)} for shape in shapes],
        },
    }


def read(tmp_path, events):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(events))
    return read_placement(profile)


def test_nodes_are_counted_once_per_provider(tmp_path):
    conv = node("/conv/Conv", "Conv", CUDA, (1, 8, 6, 6), dtype="float", index=1)
    placement = read(
        tmp_path,
        [
            {"cat": "Session", "name": "model_run", "args": {}},
            {"cat": "Node", "name": "/conv/Conv_fence_before", "args": {"op_name": "Conv"}},
            conv,
            conv,
            node("", "Relu", CUDA, (1, 8), dtype="float", index=2),
            node("", "Relu", CUDA, (1, 8), dtype="float", index=3),
            node("/Shape", "Shape", CPU, (4,), index=4),
        ],
    )
    assert placement.nodes_per_provider == {CPU: 1, CUDA: 3}
    assert placement.cpu_compute_nodes == ()


@pytest.mark.parametrize(
    ("op", "shapes", "compute"),
    [
        ("Shape", [(4,)], False),
        ("Gather", [()], False),
        ("Concat", [(4,)], False),
        ("Mul", [(1,)], False),
        ("Cast", [()], False),
        ("Concat", [(1, 8)], True),
        ("Gather", [(65,)], True),
        ("Add", [(1, 8, 6, 6)], True),
        ("Split", [(2,), (2, 8)], True),
        ("Conv", [(4,)], True),
        ("ReduceMean", [()], True),
        ("NonMaxSuppression", [(3, 3)], True),
    ],
)
def test_only_shape_arithmetic_may_run_on_the_cpu(tmp_path, op, shapes, compute):
    placement = read(tmp_path, [node("/layer/n", op, CPU, *shapes)])
    assert placement.cpu_compute_nodes == ((f"{op}:/layer/n",) if compute else ())


def test_a_node_without_known_shape_counts_as_compute(tmp_path):
    event = node("n", "Add", CPU)
    del event["args"]["output_type_shape"]
    assert read(tmp_path, [event]).cpu_compute_nodes == ("Add:n",)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '[{"cat": "Node", "args": 3}]'])
def test_a_profile_that_can_not_be_read_is_an_error(tmp_path, text):
    profile = tmp_path / "profile.json"
    profile.write_text(text)
    with pytest.raises(EvidenceError, match="not known which provider"):
        read_placement(profile)


def test_a_missing_profile_is_an_error(tmp_path):
    with pytest.raises(EvidenceError, match="not known which provider"):
        read_placement(tmp_path / "none.json")
