from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from torch import nn

from gate.errors import ExportError
from gate.export.export import Exported, export_model, self_check
from tests.export import nets
from tests.export.nets import images, seeded, settings


def export(model: nn.Module, folder: Path, **overrides: Any) -> Exported:
    return export_model(
        model, images(), settings=settings(**overrides), output=folder / "model.onnx"
    )


@pytest.mark.parametrize("batch_size", [2, 3, 4])
def test_a_right_export_is_close_at_both_batches(tmp_path: Path, batch_size: int) -> None:
    model = seeded().train()
    modes = [module.training for module in model.modules()]
    found = self_check(model, export(model, tmp_path, batch_size=batch_size), images())
    assert list(found) == ["max_abs_diff_export_batch", "max_abs_diff_other_batch"]
    assert all(0 <= value < 1e-5 for value in found.values())
    assert [module.training for module in model.modules()] == modes


def test_a_train_that_forgets_to_return_the_model(tmp_path: Path) -> None:
    class Frozen(nets.TwoOutputs):
        def train(self, mode: bool = True) -> None:  # type: ignore[override]
            super().train(mode)

    model = seeded(Frozen)
    exported = export(model, tmp_path, output_names=("logits", "features"))
    assert max(self_check(model, exported, images()).values()) < 1e-5


def test_a_fixed_batch_is_checked_at_its_own_size_only(tmp_path: Path) -> None:
    exported = export(seeded(), tmp_path, dynamic_batch=False)
    assert list(self_check(seeded(), exported, images())) == ["max_abs_diff_export_batch"]


def test_several_outputs_are_all_looked_at(tmp_path: Path) -> None:
    model = seeded(nets.TwoOutputs)
    exported = export(model, tmp_path, output_names=("logits", "features"))
    assert max(self_check(model, exported, images()).values()) < 1e-5
    other = copy.deepcopy(model)
    other.fc.bias.data += 1e-4
    found = self_check(other, exported, images())
    assert found["max_abs_diff_export_batch"] == pytest.approx(1e-4, abs=1e-5)


def test_the_difference_is_of_the_weights(tmp_path: Path) -> None:
    exported = export(seeded(), tmp_path)
    other = seeded()
    other.fc.bias.data[1] += 1e-4
    found = self_check(other, exported, images())
    assert found["max_abs_diff_export_batch"] == pytest.approx(1e-4, abs=1e-5)
    assert found["max_abs_diff_other_batch"] == pytest.approx(1e-4, abs=1e-5)


def test_other_numbers_are_caught(tmp_path: Path) -> None:
    exported = export(seeded(), tmp_path)
    other = seeded()
    other.fc.bias.data[1] += 0.25
    with pytest.raises(ExportError, match="differs by 0.25 from the model in logits"):
        self_check(other, exported, images())


def test_a_baked_batch_is_caught(tmp_path: Path) -> None:
    model = seeded(nets.BakedBatch)
    exported = export(model, tmp_path)
    assert exported.subject.outputs[0].shape == ("batch", 3)  # the file itself looks right
    with pytest.raises(ExportError, match=r"fails with 3 samples.*use x\.shape\[0\]"):
        self_check(model, exported, images())


def test_another_shape_is_caught(tmp_path: Path) -> None:
    exported = export(seeded(), tmp_path)
    other = nn.Sequential(seeded(), nn.Linear(3, 7))
    with pytest.raises(ExportError, match=r"returns \[2, 3\] for logits, the model \[2, 7\]"):
        self_check(other, exported, images())


def test_values_that_are_not_finite_are_caught(tmp_path: Path) -> None:
    model = seeded(nets.NotFinite)
    with pytest.raises(ExportError, match="the model returns NaN or infinity for logits"):
        self_check(model, export(model, tmp_path), images())


def test_a_file_that_returns_nan_is_caught(tmp_path: Path) -> None:
    exported = export(seeded(), tmp_path)
    model = onnx.load(exported.path)
    for tensor in model.graph.initializer:
        if tensor.name == "fc.bias":
            tensor.CopyFrom(numpy_helper.from_array(np.full(3, np.nan, np.float32), "fc.bias"))
    onnx.save(model, exported.path)
    with pytest.raises(ExportError, match="the exported file returns NaN"):
        self_check(seeded(), exported, images())


def test_a_file_that_cannot_be_loaded(tmp_path: Path) -> None:
    exported = export(seeded(), tmp_path)
    exported.path.write_bytes(b"something else")
    with pytest.raises(ExportError, match="ONNX Runtime can't load"):
        self_check(seeded(), exported, images())


def test_a_file_without_weights_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="without weights"):
        self_check(seeded(), export(seeded(), tmp_path, export_params=False), images())
