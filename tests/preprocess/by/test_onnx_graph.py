"""One file from uint8 images to logits gives the same as preprocessing and then the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from gate import PreprocessSpec
from gate.errors import InputMismatch, OnnxFileError
from gate.preprocess.implementations import implementation
from gate.preprocess.onnx_graph import PICTURES, prepend_graph
from gate.preprocess.spec import Resize
from tests.preprocess.pictures import SMALL, picture

SQUARE = PreprocessSpec(resize=Resize(size=(32, 36), antialias=False), channels="bgr")


def classifier(
    path: Path, *, opset: int = 13, shape: tuple[Any, ...] = ("n", 3, 32, 36), hidden: str = "pooled",
    dtype: int = TensorProto.FLOAT,
) -> Path:  # fmt: skip
    """Write a model that averages each channel over a window and multiplies by a matrix: (n, 5)
    logits."""
    matrix = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["values"], to=TensorProto.FLOAT),
        helper.make_node("AveragePool", ["values"], [hidden], kernel_shape=[32, 36]),
        helper.make_node("Flatten", [hidden], ["flat"]),
        helper.make_node("Gemm", ["flat", "matrix"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(matrix, "matrix")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8
    model.metadata_props.add(key="made.by", value="a test")
    path.write_bytes(model.SerializeToString())
    return path


def run(path: Path, **feeds: Any) -> Any:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(["logits"], feeds)[0]


@pytest.mark.parametrize("hidden", ["pooled", PICTURES])
@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("spec", [SMALL, SQUARE])
def test_prepended_graph_equals_preprocessing_then_model(
    tmp_path: Path, spec: PreprocessSpec, opset: int, hidden: str
) -> None:
    model = classifier(tmp_path / "model.onnx", opset=opset, hidden=hidden)
    prepend_graph(spec, model, tmp_path / "whole.onnx")
    pixels = np.stack([picture(90, 70, seed=seed) for seed in range(3)])
    with implementation("onnx").opened(spec) as preprocess:
        tensors = np.stack([preprocess(item) for item in pixels])
    complete = onnx.load(tmp_path / "whole.onnx")
    (arguments,) = complete.graph.input
    observed = run(tmp_path / "whole.onnx", **{arguments.name: pixels})
    np.testing.assert_allclose(observed, run(model, x=tensors), rtol=1e-6, atol=1e-6)
    assert arguments.name == (PICTURES if hidden != PICTURES else f"preprocess/{PICTURES}")
    assert arguments.type.tensor_type.elem_type == TensorProto.UINT8
    assert {entry.key for entry in complete.metadata_props} == {"made.by"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"shape": ("n", 3, 32, 32)},
            r"spec makes float32 \[batch, 3, 32, 36\], the file takes float32 .*32, 32\]",
        ),
        ({"shape": ("n", 32, 36, 3)}, "the spec makes"),
        ({"shape": ("n", 3, 32)}, "the spec makes"),
        ({"dtype": TensorProto.UINT8}, "takes uint8"),
    ],
)
def test_mismatching_model_input_is_refused(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    model = classifier(tmp_path / "model.onnx", **change)
    with pytest.raises(InputMismatch, match=says):
        prepend_graph(SMALL, model, tmp_path / "whole.onnx")
    assert not (tmp_path / "whole.onnx").exists()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def add_input(path: Path) -> None:
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [1]))
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (truncate, OnnxFileError, "cannot read"),
        (Path.unlink, OnnxFileError, "cannot read"),
        (add_input, InputMismatch, "has 2 inputs"),
    ],
)
def test_invalid_model_is_refused(
    tmp_path: Path, spoil: Callable[[Path], Any], error: type[Exception], says: str
) -> None:
    model = classifier(tmp_path / "model.onnx")
    spoil(model)
    with pytest.raises(error, match=says):
        prepend_graph(SMALL, model, tmp_path / "whole.onnx")
