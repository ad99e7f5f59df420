from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from gate.onnx_file.tested_file import describe_export, stamp, without_paths
from gate.records.evidence import Source
from gate.storage.digest import Digest

SHA = Digest.from_bytes(b"x")


def test_metadata_contains_only_known_fields() -> None:
    source = Source(factory="pkg:build", preprocess_sha256=SHA)
    metadata = describe_export(
        strategy="direct", opset="auto", attempts=("traced: no", "x: y"), source=source
    )
    assert metadata == {
        "parity_gate.strategy": "direct",
        "parity_gate.opset_asked": "auto",
        "parity_gate.rungs": "traced: no\nx: y",
        "parity_gate.factory": "pkg:build",
        "parity_gate.preprocess_sha256": str(SHA),
    }
    assert set(describe_export(strategy="traced", opset=13, attempts=(), source=None)) == {
        "parity_gate.strategy",
        "parity_gate.opset_asked",
    }


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("failed in /home/me/pkg/net.py:12", "failed in net.py:12"),
        ("Tensor at 0x7f3a2b1c9d", "Tensor at 0x"),
        ("C:\\Users\\me\\net.py", "net.py"),
        ("two\n  lines", "two lines"),
        ("4 / 2 = 2, a/b", "4 / 2 = 2, a/b"),
        ("[2, 3] and (aten::add)", "[2, 3] and (aten::add)"),
    ],
)
def test_machine_paths_are_removed(text: str, clean: str) -> None:
    assert without_paths(text) == clean


def test_stamp_replaces_metadata_and_removes_paths() -> None:
    node = helper.make_node("Identity", ["x"], ["y"], doc_string="/home/me/net.py")
    node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value="/home/me/net.py")
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'fc']")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    model = helper.make_model(helper.make_graph([node], "g", values[:1], values[1:]))
    model.metadata_props.add(key="parity_gate.strategy", value="old")
    model.metadata_props.add(key="author", value="me")
    stamp(model, {"parity_gate.strategy": "new"})
    onnx.checker.check_model(model)
    assert {p.key: p.value for p in model.metadata_props} == {
        "author": "me", "parity_gate.strategy": "new"
    }  # fmt: skip
    assert [p.key for p in model.graph.node[0].metadata_props] == ["pkg.torch.onnx.name_scopes"]
    assert b"/home" not in model.SerializeToString()
