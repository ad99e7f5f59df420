"""The provider of each node is read from the log."""

from __future__ import annotations

import pytest
from onnx import TensorProto, ValueInfoProto, helper

from gate.errors import EvidenceError
from gate.runtimes.browser import fallback_nodes, parse_placements


def test_all_nodes_on_one_provider():
    lines = ["Node placements", "All nodes placed on [CPUExecutionProvider]. Number of nodes: 3"]
    assert parse_placements(lines) == ({"CPUExecutionProvider": 3}, {})


def test_nodes_on_several_providers():
    lines = [
        "Node placements",
        "Node(s) placed on [WebGpuExecutionProvider]. Number of nodes: 2",
        "Conv (/conv/Conv)",
        "Gemm (/head/Gemm (fused))",
        "Node(s) placed on [CPUExecutionProvider]. Number of nodes: 1",
        "NonZero (/NonZero)",
    ]
    counts, names = parse_placements(lines)
    assert counts == {"CPUExecutionProvider": 1, "WebGpuExecutionProvider": 2}
    assert names["WebGpuExecutionProvider"] == ("Conv:/conv/Conv", "Gemm:/head/Gemm (fused)")
    assert names["CPUExecutionProvider"] == ("NonZero:/NonZero",)


@pytest.mark.parametrize("lines", [[], ["Node placements"], ["Conv (/conv/Conv)"]])
def test_log_without_placement_is_refused(lines):
    with pytest.raises(EvidenceError, match="it is unknown what computed"):
        parse_placements(lines)


def test_only_shape_nodes_may_run_elsewhere():
    rows = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], "/Shape"),
        helper.make_node("Add", ["s", "s"], ["t"], "/s/Add"),
        helper.make_node("Add", ["x", "x"], ["y"], "/x/Add"),
    ]
    edited = helper.make_model(helper.make_graph(nodes, "g", [rows], [ValueInfoProto(name="y")]))
    names = {"WebGpu": ("Add:/x/Add",), "CPU": ("Add:/s/Add", "Add:/x/Add", "Add:/fused")}
    assert fallback_nodes(names, "WebGpu", lambda: edited) == ("Add:/x/Add", "Add:/fused")


def test_file_is_not_read_without_stray_nodes():
    assert fallback_nodes({"X": ("Add:/x/Add",)}, "X", lambda: pytest.fail("read")) == ()


def test_convolution_elsewhere_is_a_stray_node():
    edited = helper.make_model(helper.make_graph([], "g", [], []))
    assert fallback_nodes({"Y": ("Conv:/x",)}, "X", lambda: edited) == ("Conv:/x",)
