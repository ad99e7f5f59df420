"""Each exporter switch changes the file, or is rejected before the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from gate.errors import ExportError
from gate.export.export import Exported, export_model, self_check
from gate.records.export import ExportSettings


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


EXAMPLE = {"x": np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)}


def export(folder: Path, model: nn.Module | None = None, **overrides: Any) -> Exported:
    chosen = {"lint": "off", "strategy": "direct", "opset": 15, "batch_size": 2, **overrides}
    settings = ExportSettings(output_names=("y",), **chosen)
    return export_model(model or Twice(), EXAMPLE, settings=settings, output=folder / "m.onnx")


def load_checked_graph(exported: Exported) -> onnx.ModelProto:
    model = onnx.load(exported.path)
    onnx.checker.check_model(model, full_check=True)
    return model


def difference(exported: Exported, model: nn.Module) -> float:
    return max(self_check(model, exported, EXAMPLE).values())


@pytest.mark.parametrize(
    "strategy", ["traced", "direct", "scripted", pytest.param("dynamo", marks=pytest.mark.proof)]
)
def test_keep_initializers_as_inputs(tmp_path, strategy):
    opset = 18 if strategy == "dynamo" else 15
    exported = export(tmp_path, strategy=strategy, opset=opset, keep_initializers_as_inputs=True)
    graph = load_checked_graph(exported).graph
    weights = {tensor.name for tensor in graph.initializer}
    assert len(weights) == 4
    assert {value.name for value in graph.input} == weights | {"x"}
    assert [spec.name for spec in exported.subject.inputs] == ["x"]
    assert difference(exported, Twice()) < 1e-6
    assert exported.record.settings["keep_initializers_as_inputs"] is True
    plain = export(tmp_path, strategy=strategy, opset=opset)
    assert [value.name for value in load_checked_graph(plain).graph.input] == ["x"]


def test_export_all_modules_as_functions(tmp_path):
    exported = export(tmp_path, export_modules_as_functions=True)
    model = load_checked_graph(exported)
    assert [node.op_type for node in model.graph.node] == ["Twice"]
    assert {function.name for function in model.functions} == {"Twice", "Block", "Linear"}
    assert [spec.name for spec in exported.subject.outputs] == ["y"]
    assert exported.subject.outputs[0].shape == ("batch", 3)
    assert difference(exported, Twice()) < 1e-6
    assert exported.record.settings["export_modules_as_functions"] is True


def test_unknown_module_class_is_refused(tmp_path):
    with pytest.raises(ExportError, match=rf"names Bloc, .* It has: {__name__}.Block, "):
        export(tmp_path, export_modules_as_functions=("Bloc",))
    assert list(tmp_path.iterdir()) == []
