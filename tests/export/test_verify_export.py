"""The self-check of an export: failures, doubtful results and rounding errors."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from gate.errors import ExportError
from gate.export.export import Exported, export_model, self_check
from gate.export.request import Example, ExportRequest
from gate.export.strategies import neutral
from gate.export.verify_export import CheckFailure, NumericalCheck
from gate.records.export import ExportSettings
from tests.export import nets
from tests.export.nets import images, seeded, settings


def export(model: nn.Module, folder: Path, **overrides: Any) -> Exported:
    return export_model(
        model, images(), settings=settings(**overrides), output=folder / "model.onnx"
    )


class Frozen(nets.TwoOutputs):
    """A model whose `train` returns None."""

    def train(self, mode: bool = True) -> None:
        super().train(mode)


def test_each_output_is_checked(tmp_path):
    model = seeded(Frozen)
    exported = export(model, tmp_path, output_names=("logits", "features"))
    assert max(self_check(model, exported, images()).values()) < 1e-5
    second = copy.deepcopy(model)
    second.fc.bias.data[1] += 1e-4
    result = self_check(second, exported, images())
    assert result["max_abs_diff_export_batch"] == pytest.approx(1e-4, abs=1e-5)
    assert result["max_abs_diff_other_batch"] == pytest.approx(1e-4, abs=1e-5)


@pytest.mark.parametrize("batch_size", [2, 3])
def test_correct_export_agrees_at_both_batch_sizes(tmp_path, batch_size):
    model = seeded().train()
    modes = [module.training for module in model.modules()]
    result = self_check(model, export(model, tmp_path, batch_size=batch_size), images())
    assert list(result) == ["max_abs_diff_export_batch", "max_abs_diff_other_batch"]
    assert all(0 <= value < 1e-5 for value in result.values())
    assert [module.training for module in model.modules()] == modes


def test_fixed_batch_is_checked_at_one_size(tmp_path):
    exported = export(seeded(), tmp_path, dynamic_batch=False)
    assert list(self_check(seeded(), exported, images())) == ["max_abs_diff_export_batch"]


def test_wrong_values_are_found(tmp_path):
    exported = export(seeded(), tmp_path)
    second = seeded()
    second.fc.bias.data[1] += 0.25
    with pytest.raises(ExportError, match="differs by 0.25 from the model in logits"):
        self_check(second, exported, images())


def test_fixed_batch_in_a_dynamic_file_is_found(tmp_path):
    model = seeded(nets.BakedBatch)
    exported = export(model, tmp_path)
    assert exported.subject.outputs[0].shape == ("batch", 3)  # the declared shape looks correct
    with pytest.raises(ExportError, match=r"fails with 3 samples.*use x\.shape\[0\]"):
        self_check(model, exported, images())


def test_wrong_shape_is_found(tmp_path):
    exported = export(seeded(), tmp_path)
    second = nn.Sequential(seeded(), nn.Linear(3, 7))
    with pytest.raises(ExportError, match=r"returns \[2, 3\] for logits, the model \[2, 7\]"):
        self_check(second, exported, images())


def test_nonfinite_model_output_is_found(tmp_path):
    model = seeded(nets.NotFinite)
    with pytest.raises(ExportError, match="the model returns NaN or infinity for logits"):
        self_check(model, export(model, tmp_path), images())


def test_nan_of_the_file_is_found(tmp_path):
    exported = export(seeded(), tmp_path)
    model = onnx.load(exported.path)
    for tensor in model.graph.initializer:
        if tensor.name == "fc.bias":
            tensor.CopyFrom(numpy_helper.from_array(np.full(3, np.nan, np.float32), "fc.bias"))
    onnx.save(model, exported.path)
    with pytest.raises(ExportError, match="the exported file returns NaN"):
        self_check(seeded(), exported, images())


def test_unloadable_file_is_found(tmp_path):
    exported = export(seeded(), tmp_path)
    exported.path.write_bytes(b"something else")
    with pytest.raises(ExportError, match="ONNX Runtime can't load"):
        self_check(seeded(), exported, images())


def test_file_without_weights_cannot_be_checked(tmp_path):
    with pytest.raises(ExportError, match="without weights"):
        self_check(seeded(), export(seeded(), tmp_path, export_params=False), images())


class Scaled(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class SignDependent(nn.Module):
    """Return a different output for negative sums."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else x * 5


class AddsBatchSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + float(len(x))


class AddsRandom(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(1)


class SquareRoot(nn.Module):
    """Return NaN for negative numbers, which the samples do not contain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


class Index(nn.Module):
    """Return integers: argmax may choose either of two equal scores."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(1)


def export_other(model: nn.Module, path: Path, *, batch: bool = True) -> Path:
    """Export another model with PyTorch's exporter, without the gate."""
    x = torch.rand(2, 3) + 0.5
    axes = {"x": {0: "batch"}, "output": {0: "batch"}} if batch else {}
    torch.onnx.export(
        torch.jit.trace(model, x, check_trace=False), (x,), str(path), dynamo=False,
        opset_version=13, input_names=["x"], output_names=["output"], dynamic_axes=axes,
    )  # fmt: skip
    return path


def objection(model: nn.Module, path: Path) -> CheckFailure | None:
    arrays: dict[str, Any] = {"x": np.random.default_rng(0).random((5, 3)).astype(np.float32) + 0.5}
    model = model.eval()
    with neutral(model):
        request = ExportRequest.from_example(model, Example(arrays), ExportSettings(batch_size=2))
        return NumericalCheck(request).objection(path)


@pytest.mark.parametrize(
    ("model", "other"),
    [
        (Scaled(), Scaled()),
        (Scaled(), Scaled(1 + 1e-4)),  # only the gate judges a difference this small
        (SquareRoot(), SquareRoot()),
        (Index(), Index()),
        (AddsRandom(), AddsRandom()),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_rounding_and_randomness_are_no_objection(tmp_path, model, other):
    assert objection(model, export_other(other, tmp_path / "m.onnx")) is None


@pytest.mark.parametrize(("model", "other", "kind", "says"), [
    (Scaled(), Scaled(1.1), "differs", r"differs by 0\.\d+ from the model in output, at 2 samples"),
    (Scaled(), Scaled(float("nan")), "fails", "returns NaN"),
    (AddsBatchSize(), AddsBatchSize(), "differs", "differs by 1 from the model in output, at 3 samples"),
    (SignDependent(), SignDependent(), "doubt", "where the inputs are negated"),
    (Index(), Scaled(), "fails", "exported file returns"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_objection_has_kind_and_cause(tmp_path, model, other, kind, says):
    result = objection(model, export_other(other, tmp_path / "m.onnx"))
    assert result is not None
    assert result.kind == kind
    assert re.search(says, result.cause), result.cause


@pytest.mark.filterwarnings("ignore")
def test_fixed_batch_is_a_failure(tmp_path):
    result = objection(Scaled(), export_other(Scaled(), tmp_path / "m.onnx", batch=False))
    assert result is not None
    assert result.kind == "fails"
    assert "fails with 3 samples" in result.cause


@pytest.mark.filterwarnings("ignore")
def test_invalid_file_is_a_failure(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"nothing")
    result = objection(Scaled(), tmp_path / "m.onnx")
    assert result is not None
    assert result.kind == "fails"
