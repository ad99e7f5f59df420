from __future__ import annotations

import hashlib

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gate.errors import OnnxFileError
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import TestedFile
from gate.storage.digest import Digest
from gate.weights.instrument import read_graph
from tests.measure.graph.build import found, node, report, value, witness

ROW = np.arange(4, dtype=np.float32)


def written(folder, *tensors: dict[str, str], data=bytes(64), name="w.bin"):
    """x plus each of the tensors, which read four floats from `name` as their entries say."""
    nodes, last = [], "x"
    graph_tensors = []
    for number, entries in enumerate(tensors):
        tensor = TensorProto(name=f"t{number}", data_type=TensorProto.FLOAT, dims=[4])
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in {"location": name, **entries}.items():
            tensor.external_data.add(key=key, value=text)
        graph_tensors.append(tensor)
        nodes.append(node("Add", [last, tensor.name], [f"s{number}"]))
        last = f"s{number}"
    nodes.append(node("Identity", [last], ["y"]))
    graph = helper.make_graph(nodes, "g", [value("x")], [value("y")], graph_tensors)
    made = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])
    (folder / name).write_bytes(data)
    path = folder / "model.onnx"
    path.write_bytes(made.SerializeToString())
    return path


def at(offset: int, **more: str) -> dict[str, str]:
    return {"offset": str(offset), **more}


SUM = hashlib.sha1(bytes(64)).hexdigest()


@pytest.mark.parametrize(
    ("tensors", "places"),
    [
        ([at(0), at(16), at(32)], []),
        ([{}], []),
        ([at(0), at(0)], []),  # tied
        ([at(48), at(0)], []),  # a gap
        ([at(0), at(8)], ["t1"]),
        ([at(0), at(12), at(16)], ["t1", "t2"]),
        ([at(0, length="16")], []),
        ([at(0, length="12")], ["t0"]),
        ([at(0, length="32")], ["t0"]),
        ([at(0, checksum=SUM)], []),
        ([at(0, checksum=SUM.upper())], []),
        ([at(0, checksum="0" * 40)], ["w.bin"]),
        ([at(0, checksum=SUM), at(16, checksum="0" * 40)], ["w.bin"]),
    ],
)
def test_regions_lengths_and_checksums(tmp_path, tensors, places):
    seen = report(written(tmp_path, *tensors), tmp_path)
    assert found(seen, "external_data") == places
    assert seen.external_data == {"w.bin": str(Digest.of_bytes(bytes(64)))}


def test_a_region_inside_another_is_a_slice(tmp_path):
    path = written(tmp_path, at(0), at(4), at(20))
    made = onnx.load(path, load_external_data=False)
    made.graph.initializer[0].dims[:] = [9, 1]  # bytes 0 to 36
    path.write_bytes(made.SerializeToString())
    assert found(report(path, tmp_path), "external_data") == []


def test_a_long_region_is_seen_behind_a_short_one(tmp_path):
    path = written(tmp_path, at(0), at(4), at(24))
    made = onnx.load(path, load_external_data=False)
    made.graph.initializer[0].dims[:] = [9, 1]
    made.graph.initializer[2].dims[:] = [10, 1]  # bytes 24 to 64
    path.write_bytes(made.SerializeToString())
    assert found(report(path, tmp_path), "external_data") == ["t2"]


def test_weights_are_read_from_their_data_file(tmp_path):
    big, small = np.ones((100, 40), np.float32), np.ones((4, 4), np.float32)
    big[99, 39] = small[3, 3] = np.nan
    nodes = [
        node("MatMul", ["x", "small"], ["a"]), node("MatMul", ["a", "wide"], ["b"]),
        node("MatMul", ["b", "big"], ["c"]), node("Dropout", ["c", "", "yes"], ["y"]),
    ]  # fmt: skip
    weights = {"big": big, "small": small, "wide": np.ones((4, 100), np.float32)}
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x")],
        [value("y", ("b", 40))],
        [
            onnx.numpy_helper.from_array(a, n)
            for n, a in {**weights, "yes": np.asarray(True)}.items()
        ],
    )
    made = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])
    path = tmp_path / "model.onnx"
    onnx.save(made, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    seen = report(path, tmp_path)
    assert found(seen, "nonfinite_initializer") == ["big", "small"]
    assert found(seen, "training_mode") == ["Dropout:y"]
    assert list(seen.external_data) == ["w.bin"]


def test_data_that_was_not_hashed_is_never_read(tmp_path):
    path = written(tmp_path, at(0))
    subject = read_subject(path)
    unhashed = subject.model_copy(
        update={
            "external_data": ("model.onnx",),
            "sha256": Digest.of_manifest(tmp_path, ["model.onnx"] * 2),
        }
    )
    with pytest.raises(OnnxFileError, match="reads its data from 'w.bin', expected one of"):
        read_graph(TestedFile(path, unhashed), witness())
