"""In-place operations are named as the fault if the file reads the original value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from tests.localize import nets
from tests.measure import tiny

ROWS = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)


class Shared(nn.Module):
    """A model whose sum reads the value that the in-place ReLU has overwritten."""

    def __init__(self, *, code: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.relu, self.last = nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)
        self.code = code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = self.relu(y.mul_(3) if self.code else y)
        return self.last(y + z)


def read_overwritten_value(path: Path) -> None:
    """Let the Add read the input of the Relu."""
    model = onnx.load(path)
    relu = next(node for node in model.graph.node if node.op_type == "Relu")
    add = next(node for node in model.graph.node if node.op_type == "Add")
    add.input[0] = relu.input[0]
    onnx.save(model, path)


@pytest.mark.parametrize("code", [False, True])
def test_in_place_operation_is_named(tmp_path, code):
    model, path = Shared(code=code).eval(), tmp_path / "m.onnx"
    candidate = nets.export(model, path, ROWS)
    assert not nets.localize_file(model, candidate, ROWS).diverges
    read_overwritten_value(path)
    record = nets.localize_file(model, tiny.candidate(path), ROWS)
    assert record.diverges
    assert "as it was before relu (ReLU) overwrote it in place" in record.cause
    assert record.remedy is not None
    assert "inplace=False" in record.remedy


@pytest.mark.parametrize(("operator", "instead"), [("Add", "Sub"), ("Relu", "Sigmoid")])
def test_other_fault_is_not_called_in_place(tmp_path, operator, instead):
    model, path = Shared().eval(), tmp_path / "m.onnx"
    nets.export(model, path, ROWS)
    file = onnx.load(path)
    next(node for node in file.graph.node if node.op_type == operator).op_type = instead
    onnx.save(file, path)
    record = nets.localize_file(model, tiny.candidate(path), ROWS)
    assert record.diverges
    assert "in place" not in record.cause
