"""All weights are written to one data file, which is named after its content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from gate.onnx_file.reading import data_files, externalize_weights, is_large
from gate.onnx_file.sessions import open_on_cpu
from tests.measure.graph.build import model, node

WEIGHTS = {
    "large": np.arange(4000, dtype=np.float32).reshape(4, 1000),
    "larger": np.ones((1000, 4), np.float32),
    "small": np.ones(4, np.float32),
}


def write_model(folder: Path) -> Path:
    folder.mkdir()
    nodes = [
        node("MatMul", ["x", "large"], ["a"]),
        node("MatMul", ["a", "larger"], ["b"]),
        node("Add", ["b", "small"], ["y"]),
    ]
    path = folder / "model.onnx"
    onnx.save(model(nodes, WEIGHTS), path)
    return path


def test_externalized_model_computes_the_same(tmp_path: Path) -> None:
    path = write_model(tmp_path / "one")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    (before,) = open_on_cpu(path).run(None, {"x": x})
    assert not is_large(path)
    data = externalize_weights(path, name="model.onnx")
    assert is_large(path)
    (after,) = open_on_cpu(path).run(None, {"x": x})
    assert np.array_equal(before, after)
    assert list(data_files(path)) == [data]


def test_large_weights_are_externalized_at_page_boundaries(tmp_path: Path) -> None:
    path = write_model(tmp_path / "one")
    data = externalize_weights(path, name="model.onnx")
    bare = onnx.load(path, load_external_data=False)
    outside = {t.name: t for t in bare.graph.initializer if t.external_data}
    assert outside.keys() == {"large", "larger"}
    starts = {e.value for t in outside.values() for e in t.external_data if e.key == "offset"}
    assert starts == {"0", "16384"}
    assert data.stat().st_size == 16384 + 16000
    complete = onnx.load(path)
    for tensor in complete.graph.initializer:
        assert np.array_equal(numpy_helper.to_array(tensor), WEIGHTS[tensor.name])


def test_truncated_external_data_is_an_error(tmp_path: Path) -> None:
    path = write_model(tmp_path / "one")
    onnx.save(
        onnx.load(path), path, save_as_external_data=True, size_threshold=0, location="e.data"
    )
    short = path.with_name("e.data")
    short.write_bytes(short.read_bytes()[:-8])
    with pytest.raises(OSError, match=r"e\.data is shorter than the model says"):
        externalize_weights(path, name="model.onnx")
