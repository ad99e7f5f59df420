"""Strategy `scripted` with nested inputs and outputs, and numeric tensor names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from gate.errors import ExportError
from gate.export.export import Exported, export_model, self_check
from gate.export.strategies import rename, temporary_names
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


def test_other_script_errors_are_passed_on(tmp_path):
    class Generator(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sum(y for y in x.unbind(1))  # type: ignore[return-value]

    with pytest.raises(ExportError, match=r"torch\.jit\.script failed"):
        export(tmp_path, Generator(), "x")
    assert torch.is_grad_enabled()


def test_numeric_names_are_replaced():
    assert temporary_names(["0", "pool", "a.0", "12"]) == [
        "parity_gate_value_0", "pool", "a.0", "parity_gate_value_12"
    ]  # fmt: skip


def test_conflicting_names_in_subgraphs_are_renamed(tmp_path):
    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])

    def branch(operator: str) -> onnx.GraphProto:
        node = helper.make_node(operator, ["0"], [f"{operator}_out"])
        return helper.make_graph([node], operator, [], [value(f"{operator}_out")])

    positive = helper.make_tensor_value_info("positive", TensorProto.BOOL, [])
    nodes = [
        helper.make_node("Add", ["x", "x"], ["0"]),
        helper.make_node(
            "If", ["positive"], ["parity_gate_value_0"],
            then_branch=branch("Identity"), else_branch=branch("Neg"),
        ),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "g", [value("x"), positive], [value("parity_gate_value_0")])
    path = tmp_path / "m.onnx"
    opsets = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    rename(path, ("x", "positive", "0"))
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["0"]
    x = np.array([1.0, 2.0], np.float32)
    for flag, sign in ((True, 2), (False, -2)):
        (observed,) = session.run(["0"], {"x": x, "positive": np.array(flag)})
        assert (observed == sign * x).all()


def test_file_without_numeric_names_is_unchanged(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"untouched")
    rename(tmp_path / "m.onnx", ("x", "logits"))
    assert (tmp_path / "m.onnx").read_bytes() == b"untouched"
