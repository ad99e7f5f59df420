"""Declared dynamic axes of outputs are checked; undeclared ones cause a notice."""

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

EXAMPLE = {"x": np.random.default_rng(0).standard_normal((7, 6)).astype(np.float32)}
WIDE = {"x": {1: "width"}}


class Doubled(nn.Module):
    """Return (batch, 2 * width) and (batch, 3) for (batch, width)."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.cat([x, x], 1), "z": x.mean(1, keepdim=True).repeat(1, 3)}


class NonzeroColumns(nn.Module):
    """Return a number of rows that depends only on the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x.sum(0) > 0).float()


def export(folder: Path, model: nn.Module, axes: dict[str, Any], **more: Any) -> Exported:
    chosen: dict[str, Any] = {"strategy": "direct", "lint": "off", "dynamic_axes": axes, **more}
    settings = ExportSettings(**chosen)
    return export_model(model, EXAMPLE, settings=settings, output=folder / "m.onnx")


@pytest.mark.parametrize(("strategy", "opset"), [("direct", 13), ("dynamo", 18)])
def test_declared_axis_is_checked_with_another_size(tmp_path, strategy, opset):
    axes = {**WIDE, "y": {1: "doubled"}}
    exported = export(tmp_path, Doubled(), axes, strategy=strategy, opset=opset)
    y, z = exported.subject.outputs
    assert (y.shape, z.shape) == (("batch", "doubled"), ("batch", 3))
    onnx.checker.check_model(onnx.load(exported.path), full_check=True)
    assert "max_abs_diff_other_width" in self_check(Doubled(), exported, EXAMPLE)
    assert exported.record.notices == ()
    used = exported.record.settings
    assert "y:1=doubled" in str(used.get("dynamic_axes") or used["dynamic_shapes"])


def test_declared_batch_axis_keeps_its_name(tmp_path):
    exported = export(tmp_path, Doubled(), {"y": {0: "rows"}})
    assert exported.subject.outputs[0].shape == ("rows", 12)


@pytest.mark.parametrize(("axes", "says"), [
    ({"z": {1: "classes"}}, r"axis 1 of z may have any size, .* returns 3 there .*batch 4 and"),
    ({**WIDE, "z": {1: "classes"}}, r"batch 4 and 5, width 6 and 9\), and for other data"),
    ({"z": {2: "depth"}}, r"names axis 2 of z, the model returns the shape \[4, 3\]"),
    ({"w": {1: "width"}}, "names w, the inputs are x, the outputs y, z"),
    ({**WIDE, "y": {1: "width"}}, "axis 1 of y is 12, axis 1 of x is 6. Axes with one label"),
    ({**WIDE, "y": {1: "n"}, "z": {0: "n"}}, "label n have several sizes"),
    ({**WIDE, "y": {1: "batch"}}, "label batch have several sizes"),
])  # fmt: skip
def test_wrong_axis_declaration_is_refused(tmp_path, axes, says):
    with pytest.raises(ExportError, match=says):
        export(tmp_path, Doubled(), axes)
    assert list(tmp_path.iterdir()) == []


def test_data_dependent_axis(tmp_path):
    """An undeclared data-dependent axis causes a notice; a declared one is checked with other
    data."""
    fixed: dict[str, Any] = {"dynamic_batch": False, "output_names": ("found",)}
    (notice,) = export(tmp_path, NonzeroColumns(), {}, **fixed).record.notices
    assert notice.startswith("axis 0 of found has no fixed size in the file (")
    assert notice.endswith("the settings do not ask for that: it depends on the data, or the exporter lost "
                           "its size")  # fmt: skip
    exported = export(tmp_path, NonzeroColumns(), {"found": {0: "count"}}, **fixed)
    assert exported.subject.outputs[0].shape == ("count", 1)
    assert exported.record.notices == ()


class FixedWidth(nn.Module):
    """Return an output whose width is a constant in the trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, keepdim=True) * x.new_ones(1, 2 * int(x.shape[1]))


def test_fixed_declared_axis_fails_with_another_size(tmp_path):
    settings = {"strategy": "traced", "output_names": ("y",)}
    exported = export(tmp_path, FixedWidth(), {**WIDE, "y": {1: "doubled"}}, **settings)
    with pytest.raises(ExportError, match=r"returns \[\d+, \d+\] for y|the exported file fails"):
        self_check(FixedWidth(), exported, EXAMPLE)


def test_undeclared_dynamic_axis_is_a_notice(tmp_path):
    exported = export(tmp_path, Doubled(), {**WIDE, "y": {0: "rows"}})
    (notice,) = exported.record.notices
    assert "axis 1 of y has no fixed size" in notice
    assert "declares other axes of it" in notice
    assert export(tmp_path, Doubled(), WIDE).record.notices == ()
