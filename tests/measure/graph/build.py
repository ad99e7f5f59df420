"""Small ONNX graphs by hand, and their reports."""

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
    """`nodes` between x and y, both (batch, 4) unless told otherwise."""
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


def report(made, folder, reference=None, *, batch=None):
    """The report on the model, against `reference` run on three samples."""
    path = made if isinstance(made, Path) else folder / "model.onnx"
    if not isinstance(made, Path):
        onnx.save(made, path)
    return read_graph(TestedFile(path, read_subject(path)), reference_run(reference, batch))


def reference_run(reference: nn.Module | None = None, batch: dict[str, np.ndarray] | None = None):
    """The reference is computed as `measure` does."""
    custom = copy_model(reference or nn.Identity(), device="cpu")

    def run(arrays):
        with torch.inference_mode():
            returned = custom(*(torch.from_numpy(array.copy()) for array in arrays.values()))
        outputs = returned if isinstance(returned, tuple) else (returned,)
        return [output.numpy() for output in outputs]

    return ReferenceObserver(custom, run, batch or {"x": np.ones((3, 4), np.float32)})


def finding_places(report: GraphReport, code: str) -> list[str]:
    """Return the places of the findings of one kind."""
    return [finding.place for finding in report.findings if finding.code == code]
