"""Models whose state changes in forward, and sums over repeated indices, are not exported
wrongly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gate.errors import ExportError, ExportRefused
from gate.export.export import Exported, export_model, self_check
from gate.records.export import ExportSettings
from tests.lint.rule_examples import IndexAdd, Limited

pytestmark = pytest.mark.filterwarnings("ignore")


def ids(rows: int = 6) -> dict[str, Any]:
    """Return ids of which the first two samples, which are traced, look up three rows of twelve."""
    return {"x": np.minimum(np.arange(3 * rows), 11).reshape(rows, 3).astype(np.int64)}


def numbers(rows: int = 6) -> dict[str, Any]:
    return {"x": np.random.default_rng(0).normal(size=(rows, 6)).astype(np.float32)}


def export(model: nn.Module, folder: Path, example: dict[str, Any], **settings: Any) -> Exported:
    """Export as `gate export` does, and assert that the model is unchanged."""
    before = copy.deepcopy(model.state_dict())
    requested = ExportSettings(**{"opset": "auto", "batch_size": 2, **settings})
    exported = export_model(model.eval(), example, settings=requested, output=folder / "model.onnx")
    self_check(model, exported, example)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return exported


@pytest.mark.parametrize(("make", "example"), [(Limited, ids), (IndexAdd, numbers)])
@pytest.mark.parametrize("strategy", ["traced", "direct", "scripted"])
def test_stateful_model_is_refused_by_lint_or_self_check(make, example, strategy, tmp_path):
    with pytest.raises(ExportRefused, match="TRC019|TRC020"):
        export(make(), tmp_path, example(), strategy=strategy)
    if strategy != "scripted":
        with pytest.raises(ExportError, match="differs by"):
            export(make(), tmp_path, example(), strategy=strategy, lint="off")
