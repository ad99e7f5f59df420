"""Arrays are converted to bytes for the page; the log states the provider of each node."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from onnx import TensorProto, ValueInfoProto, helper

from gate.errors import EvidenceError, OutputMismatch
from gate.runtimes.browser import fallback_nodes, parse_placements
from gate.runtimes.browser_page import DTYPES, pack, unpack


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (2, 3, 5)])
def test_arrays_survive_packing(dtype, shape):
    rng = np.random.default_rng(0)
    array = rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)
    result = unpack(pack({"a": array, "ä 2": array.T, "c": array}))
    assert list(result) == ["a", "ä 2", "c"]
    assert all(each.dtype == array.dtype for each in result.values())
    np.testing.assert_array_equal(result["a"], array)
    np.testing.assert_array_equal(result["ä 2"], array.T)


def test_arrays_are_aligned():
    frame = pack({"odd": np.zeros(3, np.uint8), "next": np.zeros(1, np.float64)})
    (length,) = struct.unpack_from("<I", frame)
    assert (4 + length) % 8 == 0
    assert len(frame) == 4 + length + 8 + 8


def test_unsupported_dtype_is_refused():
    with pytest.raises(EvidenceError, match="'a' is complex64: a page has no array for that"):
        pack({"a": np.zeros(1, np.complex64)})


def framed(header):
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + b"\0" * 16


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff\xff\xff\xff",
        struct.pack("<I", 2) + b"\xff\xff",
        framed({"a": 1}),
        framed([["a", "object", [1], 8]]),
        framed([["a", "float32", [2], 4]]),
        framed([["a", "float32", [-1], -4]]),
        framed([["a", "float32", [400], 1600]]),
        framed([["a", "float32", None, 4]]),
        framed([["a", "float32"]]),
    ],
)
def test_invalid_frame_is_refused(frame):
    with pytest.raises(OutputMismatch, match="the page returned an invalid frame"):
        unpack(frame)


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
