"""Build small ONNX graphs by hand and report on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from gate import TestedFile
from gate.onnx_file.reading import read_subject
from gate.records.instruments import GraphReport
from gate.reference.torch_session import copy_model
from gate.weights.instrument import read_graph
from gate.weights.model_tensors import ReferenceObserver

DOUBLE, HALF, FLOAT = TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.FLOAT
node = helper.make_node


def value(name: str, shape: Sequence[Any] = ("batch", 4), kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes, weights=None, *, opset=17, domains=(), inputs=(), outputs=(), functions=()):
    """Return a model with `nodes` between x and y, by default both of shape (batch, 4)."""
    graph = helper.make_graph(
        nodes,
        "g",
        list(inputs) or [value("x")],
        list(outputs) or [value("y")],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(
        graph,
        functions=list(functions),
        ir_version=10,
        opset_imports=[
            helper.make_opsetid("", opset),
            *(helper.make_opsetid(domain, 1) for domain in domains),
        ],
    )


def report(model_or_path, folder, reference=None, *, batch=None):
    """Return the graph report of a model or path; the reference runs on three samples."""
    path = model_or_path if isinstance(model_or_path, Path) else folder / "model.onnx"
    if not isinstance(model_or_path, Path):
        onnx.save(model_or_path, path)
    return read_graph(TestedFile(path, read_subject(path)), reference_run(reference, batch))


def reference_run(reference: nn.Module | None = None, batch: dict[str, np.ndarray] | None = None):
    """Return an observer that runs the reference as the measurement does."""
    working_copy = copy_model(reference or nn.Identity(), device="cpu")

    def run(arrays):
        with torch.inference_mode():
            returned = working_copy(*(torch.from_numpy(array.copy()) for array in arrays.values()))
        outputs = returned if isinstance(returned, tuple) else (returned,)
        return [output.numpy() for output in outputs]

    return ReferenceObserver(working_copy, run, batch or {"x": np.ones((3, 4), np.float32)})


def finding_places(report: GraphReport, code: str) -> list[str]:
    """Return the `place` of each finding with this code."""
    return [finding.place for finding in report.findings if finding.code == code]
