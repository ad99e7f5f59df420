"""Metadata of a file, the note on its export, and the exact file that it was quantized from."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from gate import Digest
from gate.errors import DigestMismatch, OnnxFileError
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import (
    QUANTIZED_FROM,
    ExportNote,
    describe_export,
    quantized_from,
    stamp,
    without_paths,
)
from gate.records.evidence import Source
from tests import builders
from tests.export.graphs import create_adder, write_model

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


def test_note_is_valid_only_for_its_file(tmp_path: Path) -> None:
    path = write_model(create_adder(), tmp_path / "model.onnx")
    subject = read_subject(path)
    record = builders.evidence().export
    assert record is not None
    note = ExportNote.from_record(subject, record)
    note.verify(subject, path=path)
    second = subject.model_copy(update={"sha256": builders.digest("another")})
    with pytest.raises(DigestMismatch, match=r"Use the record .*model\.onnx\.export\.json"):
        note.verify(second, path=path)


@pytest.mark.parametrize(
    ("named", "found"),
    [([], None), (["sha256:ab"], "sha256:ab"), (["sha256:ab", "sha256:cd"], None)],
    ids=["none", "one", "two contradict each other"],
)
def test_origin_is_read_from_the_metadata(tmp_path: Path, named, found) -> None:
    path = write_model(create_adder(), tmp_path / "model.onnx")
    model = onnx.load(path)
    for value in named:
        model.metadata_props.add(key=QUANTIZED_FROM, value=value)
    onnx.save(model, path)
    assert quantized_from(path) == found


@pytest.mark.parametrize("content", [None, b"no model"])
def test_invalid_model_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OnnxFileError, match="can't be read as an ONNX model"):
        quantized_from(path)
