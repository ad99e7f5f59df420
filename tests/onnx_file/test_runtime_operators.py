"""Operators that ONNX Runtime's optimizer adds to the standard domain."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from gate.errors import OnnxFileError
from gate.onnx_file.reading import DOMAIN, read_subject, with_ort_domain


def create_model(op_type: str, *, opset: int) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in "xy")
    ones = helper.make_tensor("ones", TensorProto.FLOAT, [4], [1.0] * 4)
    node = helper.make_node(op_type, ["x", "ones"], ["y"])
    graph = helper.make_graph([node], "g", [x], [y], [ones])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize(
    ("op_type", "opset", "moved"),
    [
        ("LayerNormalization", 14, True),
        ("LayerNormalization", 17, False),
        ("SimplifiedLayerNormalization", 17, True),
    ],
)
def test_file_with_fused_operators_is_valid(
    tmp_path: Path, op_type: str, opset: int, moved: bool
) -> None:
    model = create_model(op_type, opset=opset)
    checked = with_ort_domain(model)
    assert (checked is not model) is moved
    assert model.graph.node[0].domain == ""
    assert checked.graph.node[0].domain == (DOMAIN if moved else "")
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert read_subject(path).opset == opset


def test_file_with_fused_operators_and_external_data_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = create_model("LayerNormalization", opset=14)
    model.graph.initializer[0].raw_data = b"\0" * 16
    model.graph.initializer[0].ClearField("float_data")
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert read_subject(path).external_data == ("w.bin",)


def test_unknown_operator_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(create_model("LayerNormalisation", opset=14), path)
    with pytest.raises(OnnxFileError, match="LayerNormalisation"):
        read_subject(path)
