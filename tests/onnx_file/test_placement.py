from __future__ import annotations

import gzip
import json
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from gate.errors import EvidenceError
from gate.onnx_file.sessions import read_placement

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
PLACEMENTS = Path(__file__).with_name("placements")


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


def read_events(tmp_path, events, graph=None):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(events))
    return read_placement(profile, graph)


def test_nodes_are_counted_per_provider(tmp_path):
    conv = node("/conv/Conv", "Conv", CUDA, (1, 8, 6, 6), dtype="float", index=1)
    placement = read_events(
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
        small_graph,
    )
    assert placement.nodes_per_provider == {CPU: 1, CUDA: 3}
    assert placement.cpu_compute_nodes == ()


def small_graph():
    """Return a graph in which `s` is a shape and `ids` are data."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], "/Shape"),
        helper.make_node("Concat", ["s", "s"], ["t"], "/Concat", axis=0),
        helper.make_node("ArgMax", ["ids"], ["y"], "/ArgMax"),
        helper.make_node("Expand", ["x", "t"], ["z"], "/Expand"),
    ]
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"]),
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", 8]),
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in ("y", "z")]
    graph = helper.make_graph(nodes, "g", values, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_cpu_nodes_are_described_by_graph_and_profile(tmp_path):
    argmax = node("/ArgMax", "ArgMax", CPU, (2, 1), index=2)
    argmax["args"]["input_type_shape"] = [{"int64": [2, 8]}]
    argmax["dur"] = 1
    expand = {**node("/Expand", "Expand", CUDA, (4,), index=3), "dur": 3}
    events = [node("/Shape", "Shape", CPU, (1,)), node("/Concat", "Concat", CPU, (2,), index=1)]
    events += [argmax, expand]
    placement = read_events(tmp_path, events, small_graph)
    (result,) = placement.cpu_nodes
    assert result.name == "ArgMax:/ArgMax"
    assert (result.operator, result.since_version, result.inputs) == ("ArgMax", 13, ("int64",))
    assert placement.cpu_time_share == 0.25


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '[{"cat": "Node", "args": 3}]'])
def test_unreadable_profile_is_an_error(tmp_path, text):
    profile = tmp_path / "profile.json"
    profile.write_text(text)
    with pytest.raises(EvidenceError, match="providers of the nodes are unknown"):
        read_placement(profile)


def test_profile_of_the_cuda_provider(tmp_path):
    """Nodes without names are identified by their number, and all are found in the graph."""
    graph = onnx.load_from_string(gzip.decompress((PLACEMENTS / "profiled.onnx.gz").read_bytes()))
    placement = read_placement(PLACEMENTS / "profile.json", lambda: graph)
    assert placement.nodes_per_provider == {CPU: 5, CUDA: 4}
    assert [(n.name, n.operator, n.inputs) for n in placement.cpu_nodes] == [
        ("ArgMax:arg", "ArgMax", ("int64",)),
        ("Atan:Atan_0", "Atan", ("float",)),
    ]
    assert [n.since_version for n in placement.cpu_nodes] == [13, 7]
