"""A quantized file names the exact file that it was created from."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from gate.errors import OnnxFileError
from gate.onnx_file.tested_file import QUANTIZED_FROM, quantized_from
from tests.export.graphs import create_adder, write_model


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
