from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from gate import Digest
from gate.errors import OnnxFileError
from gate.onnx_file.reading import external_files, read_subject, verify_file
from tests.export.graphs import create_adder, write_external_adder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model" / "model.onnx"


def test_digest_is_the_digest_of_the_manifest(path: Path) -> None:
    write_external_adder(path)
    data = path.parent / "w.bin"
    subject = read_subject(path)
    assert subject.external_data == ("w.bin",)
    assert subject.sha256 == Digest.from_json(
        {"model.onnx": Digest.from_file(path).hex, "w.bin": Digest.from_file(data).hex}
    )
    assert subject.size_bytes == path.stat().st_size + 16
    verify_file(path, opset=13)


def test_changed_data_changes_the_digest(path: Path) -> None:
    before = read_subject(write_external_adder(path))
    (path.parent / "w.bin").write_bytes(b"\1" * 16)
    after = read_subject(path)
    assert before.sha256 != after.sha256
    assert before.size_bytes == after.size_bytes


def test_data_in_a_subfolder_is_accepted(path: Path) -> None:
    (path.parent / "data").mkdir()
    assert read_subject(write_external_adder(path, "data/w.bin")).external_data == ("data/w.bin",)


@pytest.mark.parametrize(
    "location",
    [
        "../w.bin",
        "data/../../w.bin",
        "/etc/passwd",
        "..\\w.bin",
        ".",
        "",
        "..",
        "w" * 300,
        "w\0.bin",
    ],
)
def test_data_outside_the_folder_is_refused(path: Path, location: str) -> None:
    (path.parent.parent / "w.bin").write_bytes(b"\0" * 16)
    (path.parent / "data").mkdir()
    model = create_adder()
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(OnnxFileError, match="expected a file inside the model's folder"):
        read_subject(path)


@pytest.mark.parametrize("link", ["symbolic", "hard", "both are symbolic"])
def test_linked_data_is_read(path: Path, link: str) -> None:
    """In the caches of model hubs the link's name counts, not the target's."""
    plain = read_subject(write_external_adder(path))
    blobs = path.parent.parent / "blobs"
    blobs.mkdir()
    for name in ("w.bin", "model.onnx") if link == "both are symbolic" else ("w.bin",):
        blob = (path.parent / name).rename(blobs / f"{name}-0123")
        if link == "hard":
            os.link(blob, path.parent / name)
        else:
            (path.parent / name).symlink_to(f"../blobs/{blob.name}")
    assert read_subject(path) == plain
    (blobs / "w.bin-0123").write_bytes(b"\1" * 16)
    assert read_subject(path).sha256 != plain.sha256
    (blobs / "w.bin-0123").write_bytes(b"\1" * 15)
    with pytest.raises(OnnxFileError, match="has 15 bytes, but the tensor w needs 16"):
        read_subject(path)


def test_invalid_graph_with_linked_data_is_refused(path: Path) -> None:
    write_external_adder(path)
    model = onnx.load(path, load_external_data=False)
    model.graph.node[0].input[0] = "nowhere"
    path.write_bytes(model.SerializeToString())
    data = (path.parent / "w.bin").rename(path.parent.parent / "blob")
    (path.parent / "w.bin").symlink_to(data)
    with pytest.raises(OnnxFileError, match=r"model\.onnx is not a valid ONNX model"):
        read_subject(path)


def test_folder_linked_outside_is_refused(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "w.bin").write_bytes(b"\0" * 16)
    (path.parent / "data").symlink_to(elsewhere)
    write_external_adder(path, "data/w.bin")
    with pytest.raises(OnnxFileError, match="inside the model's folder"):
        read_subject(path)


@pytest.mark.parametrize("kind", ["loop", "pipe", "device", "long link", "UTF-8"])
def test_data_that_is_not_a_regular_file_is_refused(path: Path, kind: str) -> None:
    write_external_adder(path)
    data = path.parent / "w.bin"
    data.unlink()
    if kind == "loop":
        data.symlink_to("w.bin")
    elif kind == "pipe":
        os.mkfifo(data)
    elif kind == "device":
        data.symlink_to("/dev/zero")
    elif kind == "UTF-8":
        path.write_bytes(path.read_bytes().replace(b"w.bin", b"w\xffbin"))
    else:
        data.symlink_to("w" * 4000)
    with pytest.raises(OnnxFileError):
        read_subject(path)


def test_missing_data_is_refused(path: Path) -> None:
    write_external_adder(path)
    (path.parent / "w.bin").unlink()
    with pytest.raises(OnnxFileError, match=r"data file w\.bin of the tensor w is missing"):
        read_subject(path)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({}, "has 15 bytes, but the tensor w needs 16"),
        ({"offset": "8", "length": "16"}, "needs 24"),
        ({"offset": "-8"}, "negative"),
        ({"length": "many"}, "invalid description of its external data"),
    ],
)
def test_short_data_is_refused(path: Path, entries: dict[str, str], says: str) -> None:
    write_external_adder(path, **entries)
    data = path.parent / "w.bin"
    data.write_bytes(data.read_bytes()[:15])
    with pytest.raises(OnnxFileError, match=says):
        read_subject(path)


def create_tensor(location: str) -> onnx.TensorProto:
    tensor = TensorProto(name=location, data_type=TensorProto.FLOAT, dims=[1])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def constant(location: str) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [location], value=create_tensor(location))


def branch(*nodes: Any) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), "branch", [], [])


def test_data_of_each_kind_of_tensor_is_found(path: Path) -> None:
    model = create_adder()
    model.graph.initializer.append(create_tensor("initializer"))
    model.graph.node.append(constant("attribute"))
    model.graph.node.append(
        helper.make_node("If", ["c"], ["d"], then_branch=branch(constant("then")),
                         else_branch=branch(helper.make_node("If", ["c"], ["e"],
                                            then_branch=branch(constant("deep")))))
    )  # fmt: skip
    sparse = model.graph.sparse_initializer.add()
    sparse.values.CopyFrom(create_tensor("values"))
    sparse.indices.CopyFrom(create_tensor("indices"))
    model.functions.add(name="f", domain="d").node.append(constant("function"))
    names = ("attribute", "deep", "function", "indices", "initializer", "then", "values")
    for name in names:
        (path.parent / name).write_bytes(b"\0" * 4)
    assert external_files(model, path) == names
