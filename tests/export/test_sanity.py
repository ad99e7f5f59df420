"""What a ladder sees in a file: what is wrong for certain, what is in doubt, what is rounding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gate.export.request import Example, ExportRequest
from gate.export.strategies import neutral
from gate.export.verify_export import CheckFailure, NumericalCheck
from gate.records.export import ExportSettings


class Scaled(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Positive(nn.Module):
    """Another answer for negative sums."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else x * 5


class Length(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + float(len(x))


class Dice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(1)


class Rooted(nn.Module):
    """NaN for negative numbers: made-up data is none of its data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


class Index(nn.Module):
    """Integers: equal scores may be told apart in either way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(1)


def written(model: nn.Module, path: Path, *, batch: bool = True) -> Path:
    """The file that an exporter makes of another model, without asking the gate."""
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


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("model", "other"),
    [
        (Scaled(), Scaled()),
        (Scaled(), Scaled(1 + 1e-4)),  # the gate's to judge
        (Rooted(), Rooted()),
        (Index(), Index()),
        (Dice(), Dice()),
    ],
)
def test_rounding_and_chance_are_no_reason(tmp_path: Path, model: nn.Module, other: nn.Module):
    assert objection(model, written(other, tmp_path / "m.onnx")) is None


@pytest.mark.parametrize(
    ("model", "other", "kind", "says"),
    [
        (
            Scaled(),
            Scaled(1.1),
            "differs",
            r"differs by 0\.\d+ from the model in output, at 2 samples",
        ),
        (Scaled(), Scaled(float("nan")), "fails", "returns NaN"),
        (Length(), Length(), "differs", "differs by 1 from the model in output, at 3 samples"),
        (Positive(), Positive(), "doubt", "where the inputs are negated"),
        (Index(), Scaled(), "fails", "exported file returns"),
    ],
)
def test_says_what_is_wrong(
    tmp_path: Path, model: nn.Module, other: nn.Module, kind: str, says: str
):
    found = objection(model, written(other, tmp_path / "m.onnx"))
    assert found is not None
    assert found.kind == kind
    assert re.search(says, found.cause), found.cause


def test_a_fixed_batch_fails_for_certain(tmp_path: Path):
    found = objection(Scaled(), written(Scaled(), tmp_path / "m.onnx", batch=False))
    assert found is not None
    assert found.kind == "fails"
    assert "fails with 3 samples" in found.cause


def test_what_is_no_file_fails_for_certain(tmp_path: Path):
    (tmp_path / "m.onnx").write_bytes(b"nothing")
    found = objection(Scaled(), tmp_path / "m.onnx")
    assert found is not None
    assert found.kind == "fails"
