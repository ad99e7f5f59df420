"""Small ONNX models built from nodes: y = x + w, with x of shape (batch, 4)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WEIGHTS = np.arange(4, dtype=np.float32)


def create_adder(shape=("batch", 4), *, opset=13, ir_version=8, elem_type=TensorProto.FLOAT):
    """Return a model that is valid unless the arguments make it invalid."""
    weight = numpy_helper.from_array(
        WEIGHTS.astype(helper.tensor_dtype_to_np_dtype(elem_type)), "w"
    )
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"], name="add")],
        "adder",
        [helper.make_tensor_value_info("x", elem_type, shape)],
        [helper.make_tensor_value_info("y", elem_type, shape)],
        [weight],
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=ir_version,
        producer_name="by hand",
        producer_version="1",
    )


def write_model(model: onnx.ModelProto, path: Path) -> Path:
    """Write `model` unchanged, valid or not."""
    path.write_bytes(model.SerializeToString())
    return path


def write_external_adder(path: Path, location: str = "w.bin", **entries: str) -> Path:
    """Write the model with its weights in the file `location`; add `entries` to the external
    data."""
    model = create_adder()
    weight = model.graph.initializer[0]
    data = weight.raw_data
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        weight.external_data.add(key=key, value=value)
    target = path.parent / location
    if target.parent.is_dir():
        target.write_bytes(data)
    return write_model(model, path)
