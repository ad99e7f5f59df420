from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from gate.export.strategies import accepted, rename


def test_only_numbers_get_a_stand_in() -> None:
    assert accepted(["0", "pool", "a.0", "12"]) == [
        "parity_gate_value_0", "pool", "a.0", "parity_gate_value_12"
    ]  # fmt: skip


def test_inner_values_of_the_same_name_make_way_in_subgraphs_too(tmp_path: Path) -> None:
    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])

    def branch(operator: str) -> onnx.GraphProto:
        node = helper.make_node(operator, ["0"], [f"{operator}_out"])
        return helper.make_graph([node], operator, [], [value(f"{operator}_out")])

    positive = helper.make_tensor_value_info("positive", TensorProto.BOOL, [])
    nodes = [
        helper.make_node("Add", ["x", "x"], ["0"]),
        helper.make_node(
            "If", ["positive"], ["parity_gate_value_0"],
            then_branch=branch("Identity"), else_branch=branch("Neg"),
        ),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "g", [value("x"), positive], [value("parity_gate_value_0")])
    path = tmp_path / "m.onnx"
    opsets = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    rename(path, ("x", "positive", "0"))
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["0"]
    x = np.array([1.0, 2.0], np.float32)
    for flag, sign in ((True, 2), (False, -2)):
        (seen,) = session.run(["0"], {"x": x, "positive": np.array(flag)})
        assert (seen == sign * x).all()


def test_a_file_without_numbers_keeps_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"untouched")
    rename(tmp_path / "m.onnx", ("x", "logits"))
    assert (tmp_path / "m.onnx").read_bytes() == b"untouched"
