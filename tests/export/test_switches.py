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
from gate.export.export import Exported, export_model, log_of, self_check
from gate.export.torchscript_settings import check_exporter_settings, exporter_keywords
from gate.onnx_file.reading import nodes_of
from gate.records.export import ExportSettings
from tests.exhaustive import exhaustive


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


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * x


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Square.apply(x) + 1


def written_by_hand(symbolics: Any) -> None:
    """Register the symbolic function that `custom_symbolics` names."""
    symbolics.legacy("prim::PythonOp", lambda g, x, **_: g.op("com.microsoft::Gelu", x))


EXAMPLE = {"x": np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)}
HERE = f"{__name__}:written_by_hand"


def export(folder: Path, model: nn.Module | None = None, **overrides: Any) -> Exported:
    chosen = {"lint": "off", "strategy": "direct", "opset": 15, "batch_size": 2, **overrides}
    settings = ExportSettings(output_names=("y",), **chosen)
    return export_model(model or Twice(), EXAMPLE, settings=settings, output=folder / "m.onnx")


def load_checked_graph(exported: Exported) -> onnx.ModelProto:
    model = onnx.load(exported.path)
    onnx.checker.check_model(model, full_check=True)
    return model


def operators(model: onnx.ModelProto) -> list[str]:
    return [f"{node.domain}::{node.op_type}" for node in nodes_of(model)]


def domains(model: onnx.ModelProto) -> dict[str, int]:
    return {entry.domain: entry.version for entry in model.opset_import}


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


def test_export_one_class_as_functions(tmp_path):
    exported = export(tmp_path, export_modules_as_functions=("Block",), opset="auto")
    model = load_checked_graph(exported)
    assert exported.subject.opset == 15
    assert [(node.domain, node.op_type) for node in model.graph.node] == [(__name__, "Block")] * 2
    assert exported.record.settings["export_modules_as_functions"] == "Block"
    complete = export(tmp_path, export_modules_as_functions=(f"{__name__}.Block",))
    assert load_checked_graph(complete).functions[0].name == "Block"


def test_custom_opsets(tmp_path):
    requested = {"export_modules_as_functions": ("Block",), "custom_opsets": {__name__: 3}}
    exported = export(tmp_path, **requested)
    assert domains(load_checked_graph(exported)) == {"": 15, __name__: 3}
    assert exported.record.settings["custom_opsets"] == f"{__name__}=3"
    with pytest.raises(ExportError, match=r"uses the domains \{ai.onnx: 15\}, expected mine: 2"):
        export(tmp_path, custom_opsets={"mine": 2})


def test_autograd_inlining(tmp_path):
    inlined = export(tmp_path, Squared())
    assert operators(load_checked_graph(inlined)) == ["::Mul", "::Constant", "::Add"]
    assert inlined.record.settings["autograd_inlining"] is True
    requested = {"autograd_inlining": False, "custom_symbolics": HERE}
    by_hand = export(tmp_path, Squared(), **requested, custom_opsets={"com.microsoft": 1})
    model = load_checked_graph(by_hand)
    assert operators(model) == ["com.microsoft::Gelu", "::Constant", "::Add"]
    assert domains(model) == {"": 15, "com.microsoft": 1}
    assert by_hand.record.settings["autograd_inlining"] is False
    with pytest.raises(ExportError, match="Square has no ONNX form(.|\n)*autograd_inlining: true"):
        export(tmp_path, Squared(), autograd_inlining=False)


def test_aten_operators_are_a_hazard(tmp_path):
    exported = export(tmp_path, operator_export_type="ONNX_ATEN")
    assert set(operators(load_checked_graph(exported))) == {"org.pytorch.aten::ATen"}
    (hazard,) = exported.record.hazards
    assert hazard.startswith(
        "the file has operators outside of ONNX, as operator_export_type ONNX_ATEN allows"
    )
    assert "org.pytorch.aten::ATen at /first/" in hazard
    assert exported.record.settings["operator_export_type"] == "ONNX_ATEN"
    assert self_check(Twice(), exported, EXAMPLE) == {}
    fallthrough = export(tmp_path, Squared(), operator_export_type="ONNX_FALLTHROUGH",
                  autograd_inlining=False)  # fmt: skip
    assert operators(load_checked_graph(fallthrough))[0] == "prim::PythonOp"
    assert "prim::PythonOp" in fallthrough.record.hazards[0]


def test_unused_operator_export_type_is_a_hazard(tmp_path):
    exported = export(tmp_path, operator_export_type="ONNX_ATEN_FALLBACK")
    assert set(operators(load_checked_graph(exported))) == {"::Gemm", "::Relu"}
    assert "changed nothing: all operators are plain ONNX" in exported.record.hazards[0]
    assert difference(exported, Twice()) < 1e-6


@pytest.mark.parametrize(
    ("strategy", "opset"),
    [("direct", 15), pytest.param("dynamo", 18, marks=[pytest.mark.proof, exhaustive])],
)
def test_verbose_log_is_written(tmp_path, strategy, opset):
    quiet = export(tmp_path, strategy=strategy, opset=opset)
    log = log_of(quiet.path)
    assert not log.exists()
    verbose = export(tmp_path, strategy=strategy, opset=opset, verbose=True)
    assert verbose.subject == quiet.subject
    assert ("graph(" if strategy == "direct" else "torch.export.export") in log.read_text()
    assert verbose.record.settings["verbose"] is True
    export(tmp_path, strategy=strategy, opset=opset)
    assert not log.exists()


def test_unknown_module_class_is_refused(tmp_path):
    with pytest.raises(ExportError, match=rf"names Bloc, .* It has: {__name__}.Block, "):
        export(tmp_path, export_modules_as_functions=("Bloc",))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asked", [
    {"custom_opsets": {"mine": 2}},
    {"autograd_inlining": False},
    {"export_modules_as_functions": True},
    {"operator_export_type": "ONNX_ATEN"},
], ids=lambda asked: next(iter(asked)))  # fmt: skip
def test_switch_missing_in_pytorch_is_refused(asked, monkeypatch):
    def export(model: Any, args: Any, f: Any, *, dynamo: bool = True) -> None:
        """Imitate the signature of a later PyTorch."""

    monkeypatch.setattr(torch.onnx, "export", export)
    settings = ExportSettings(strategy="direct", opset=15, **asked)
    with pytest.raises(ExportError, match=f"export.{next(iter(asked))} is set"):
        check_exporter_settings(settings, Twice())
    check_exporter_settings(ExportSettings(), Twice())
    assert exporter_keywords(ExportSettings(), Twice()) == {}
