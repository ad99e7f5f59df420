"""Strategy `scripted` with nested inputs and outputs, and numeric tensor names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from torch import Tensor, nn

from gate.errors import ExportError
from gate.export.export import Exported, export_model, self_check
from gate.records.export import ExportSettings


class Dicts(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["image"]
        if bool(x.sum() > 0):
            x = x * 2
        return {"a": x, "b": batch["mask"] + 1.0}


class Lists(nn.Module):
    def forward(self, items: list[Tensor]) -> list[Tensor]:
        out: list[Tensor] = []
        for item in items:
            out.append(item * 2)
        return out


class Tuples(nn.Module):
    def forward(
        self, pair: tuple[Tensor, list[Tensor]], z: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        a, rest = pair
        return a + z, (a * rest[0], rest[1])


class ListsInDict(nn.Module):
    def forward(self, batch: dict[str, list[Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        return batch["x"][0] * batch["x"][1], {"q": batch["x"][1] * 3.0}


class Fields(NamedTuple):
    first: Tensor
    rest: list[Tensor]


class Named(nn.Module):
    def forward(self, x: Tensor) -> Fields:
        return Fields(x + 1.0, [x * 2.0, x * 3.0])


class MayBeNone(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x if y is None else x + y


class WithoutAnnotation(nn.Module):
    def forward(self, batch):
        return {"a": batch["image"] * 2}


class MixedDict(nn.Module):
    def forward(self, x: Tensor):
        return {"a": x, "b": [x * 2, x * 3]}


class ByKeyword(nn.Module):
    def forward(self, x: Tensor, *, y: Tensor) -> Tensor:
        return x + y if bool(x.sum() > 0) else x - y


def example(*names: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((6, 3)).astype(np.float32) for name in names}


def export(folder: Path, model: nn.Module, *names: str) -> Exported:
    settings = ExportSettings(strategy="scripted", lint="off", opset=17)
    return export_model(model.eval(), example(*names), settings=settings, output=folder / "m.onnx")


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        (Dicts(), ("batch.image", "batch.mask"), ["a", "b"]),
        (Lists(), ("items.0", "items.1"), ["output_0", "output_1"]),
        (Tuples(), ("pair.0", "pair.1.0", "pair.1.1", "z"),
         ["output_0", "output_1.0", "output_1.1"]),
        (ListsInDict(), ("batch.x.0", "batch.x.1"), ["output_0", "output_1.q"]),
        (Named(), ("x",), ["first", "rest.0", "rest.1"]),
        (MayBeNone(), ("x", "y"), ["output"]),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, nn.Module) else "",
)  # fmt: skip
def test_scripted_export_of_nested_types(tmp_path, model, inputs, outputs):
    exported = export(tmp_path, model, *inputs)
    assert tuple(spec.name for spec in exported.subject.inputs) == inputs
    assert [spec.name for spec in exported.subject.outputs] == outputs
    assert max(self_check(model, exported, example(*inputs)).values()) < 1e-6
    branches = [node.op_type for node in onnx.load(exported.path).graph.node].count("If")
    assert branches == isinstance(model, Dicts)


@pytest.mark.parametrize(("model", "inputs", "says"), [
    (WithoutAnnotation(), ("batch.image",), r"takes batch as a dict, .*\n.*\n?Annotate it, such as batch: d"),
    (MixedDict(), ("x",), r"values of several types \(Tensor, list\)(.|\n)*Return a named tuple"),
    (ByKeyword(), ("x", "y"), r"takes y by keyword only(.|\n)*leave out the \*"),
], ids=lambda given: type(given).__name__ if isinstance(given, nn.Module) else "")  # fmt: skip
def test_unscriptable_model_is_refused(tmp_path, model, inputs, says):
    with pytest.raises(ExportError, match=says):
        export(tmp_path, model, *inputs)
    assert not (tmp_path / "m.onnx").exists()
