"""Small networks that exporters fold, fuse, inline and flatten, and helpers to export and edit
them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import nn
from torch.nn import functional

import gate
from gate import Localization, MeasurementJob, SampleSet
from gate.export.export_warnings import captured
from gate.localize import locate
from gate.localize.layer_weights import WeightDifference
from gate.localize.model_runner import BUDGET
from gate.policy.sections import DeterminismPolicy
from gate.records.localization import LayerRow
from gate.summary.render import render_fault
from tests.measure import tiny

Exporter = Literal["traced", "direct", "scripted", "dynamo"]
Edit = Callable[[onnx.ModelProto], object]


class Block(nn.Module):
    """Two convolutions with BatchNorm and a shortcut; the ReLU works in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + x)


class Residual(nn.Module):
    """A convolutional classifier: images (n, 3, 8, 8) to logits (n, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = Block(8)
        self.pool = nn.AvgPool2d(2)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(72, 5)

    def forward(self, x):
        x = self.pool(self.block(self.stem(x)))
        return self.head(self.drop(x.flatten(1)))


class Attention(nn.Module):
    """A transformer layer on (n, 6, 8)."""

    def __init__(self, dimensions: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dimensions)
        self.qkv = nn.Linear(dimensions, 3 * dimensions)
        self.proj = nn.Linear(dimensions, dimensions)
        self.norm2 = nn.LayerNorm(dimensions)
        self.fc1 = nn.Linear(dimensions, 2 * dimensions)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(2 * dimensions, dimensions)

    def forward(self, x):
        n, length, dimensions = x.shape
        split = self.qkv(self.norm1(x)).reshape(n, length, 3, self.heads, dimensions // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * 0.5).softmax(-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(n, length, dimensions))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class Tokens(nn.Module):
    """A text classifier: tokens (n, 6) to logits (n, 5) by embedding, attention, mean and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = Attention()
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.layer(self.embed(x)).mean(1))


class Shared(nn.Module):
    """Vectors (n, 6) to a dict of a tensor and a tuple; one module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.act = nn.Tanh()
        self.left = nn.Linear(6, 3)
        self.right = nn.Linear(6, 4)

    def forward(self, x):
        x = self.act(self.twice(x))
        x = self.act(self.twice(x))
        return {"left": self.left(x), "more": (self.right(x), x.argmax(1))}


class Flat(Shared):
    """A Shared network that returns a flat tuple, which every exporter supports."""

    def forward(self, x):
        x = self.act(self.twice(x))
        x = self.act(self.twice(x))
        return self.left(x), self.right(x), x.argmax(1)


class Codes(nn.Module):
    """Images (n, 3, 8, 8) to (n, 4), with functional code between the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        y = functional.interpolate(self.conv(x), scale_factor=2, mode="bilinear")
        y = torch.sigmoid(y) * self.gain
        return self.head(y.mean((2, 3)))


POLICY = tiny.policy(determinism=DeterminismPolicy(threads=1))
IMAGES = np.random.default_rng(0).normal(size=(6, 3, 8, 8)).astype(np.float32)
PICTURES = np.random.default_rng(4).normal(size=(6, 3, 8, 8)).astype(np.float32)
VECTORS = np.random.default_rng(1).normal(size=(6, 6)).astype(np.float32)
TOKENS = np.random.default_rng(2).integers(0, 11, size=(6, 6))
INPUTS = {Residual: IMAGES, Codes: IMAGES, Shared: VECTORS, Flat: VECTORS, Tokens: TOKENS}
OUTPUTS = {Shared: ("left", "right", "most"), Flat: ("left", "right", "most")}
UNFOLDED = {"do_constant_folding": False, "training": torch.onnx.TrainingMode.PRESERVE}
"""The settings of an export in which each BatchNorm keeps its node."""


def randomize(model: nn.Module) -> nn.Module:
    """Set BatchNorm statistics and affine weights far from their initial values."""
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, 0.2, 0.6)  # so that no ReLU has only zeros
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def build(kind: type[nn.Module]) -> nn.Module:
    """Build a network with the same weights every time."""
    torch.manual_seed(0)
    return randomize(kind())


def export(model, path, example, *, by="direct", outputs=("logits",), **settings):
    """Export a copy of the model with a dynamic batch axis."""
    model, arguments = copy.deepcopy(model), (torch.from_numpy(example[:2]),)
    with captured(), torch.no_grad():
        if by == "dynamo":
            shapes = ({0: torch.export.Dim.DYNAMIC},)
            program = torch.onnx.export(
                model, arguments, dynamo=True, opset_version=18, dynamic_shapes=shapes,
                input_names=["input"], output_names=list(outputs), verbose=False,
            )  # fmt: skip
            program.save(str(path), external_data=False)
            return tiny.candidate(path)
        if by == "traced":
            model = torch.jit.trace(model, arguments, strict=False)
        elif by == "scripted":
            model = torch.jit.script(model)
        axes = {name: {0: "batch"} for name in ("input", *outputs)}
        torch.onnx.export(
            model, arguments, str(path), dynamo=False, input_names=["input"],
            output_names=list(outputs),
            **{"opset_version": 17, "dynamic_axes": axes, **settings},
        )  # fmt: skip
    return tiny.candidate(path)


def localize_file(
    model, candidate, inputs, *, edit=None, runtime="ort-cpu", limit=6, budget=BUDGET
):
    """Localize the divergence of a file from the model on these inputs, after an optional `edit` of
    the file.
    """
    if edit is not None:
        candidate = tiny.edit(candidate, candidate.path.with_name("edited.onnx"), edit)
    samples = SampleSet.from_arrays(inputs if isinstance(inputs, Mapping) else {"input": inputs})
    case = MeasurementJob(model, candidate, samples, policy=POLICY)
    with mock.patch.object(locate, "BUDGET", budget):
        return locate.locate(case, runtime=runtime, limit=limit)


def layer_rows(record: Localization) -> dict[str, LayerRow]:
    """Return the rows of module calls by title, without rows of code and of file outputs."""
    module_rows = [row for row in record.layers if not row.kind.startswith(("code", "output"))]
    return {row.title: row for row in module_rows}


def list_titles(record: Localization, verdict: str) -> list[str]:
    """Return the titles of the rows with this verdict, in order."""
    return [row.title for row in record.layers if row.verdict == verdict]


def find_node(proto: onnx.ModelProto, op: str, index: int = 0) -> onnx.NodeProto:
    """Return the node of this operator type with this index among its kind."""
    return [item for item in proto.graph.node if item.op_type == op][index]


def find_weight(proto: onnx.ModelProto, name: str) -> onnx.TensorProto:
    """Return the initializer of this name."""
    return next(item for item in proto.graph.initializer if item.name == name)


def change_weight(proto: onnx.ModelProto, name: str, edit: Any) -> None:
    """Replace the values of an initializer by `edit(values)`."""
    tensor = find_weight(proto, name)
    values = edit(numpy_helper.to_array(tensor).copy())
    tensor.CopyFrom(numpy_helper.from_array(np.array(values, order="C"), name))


def change_middle(values: np.ndarray) -> np.ndarray:
    """Change one value in the middle and return the array."""
    values.reshape(-1)[values.size // 2] += 0.1 * np.abs(values).max()
    return values


def edit_weight(name: str, edit: Any = change_middle) -> Edit:
    """Return an edit that replaces the values of an initializer by `edit(values)`."""
    return lambda proto: change_weight(proto, name, edit)


def edit_input(op: str, index: int, argument: int = 1, edit: Any = change_middle) -> Edit:
    """Return an edit of the weight that a node reads."""
    return lambda proto: change_weight(proto, find_node(proto, op, index).input[argument], edit)


def edit_operator(op: str, replacement: str, index: int = 0) -> Edit:
    """Return an edit that replaces the operator of a node."""
    return lambda proto: setattr(find_node(proto, op, index), "op_type", replacement)


def edit_attributes(op: str, index: int = 0, **values: object) -> Edit:
    """Return an edit that sets attributes of a node."""

    def edit(proto: onnx.ModelProto) -> None:
        node = find_node(proto, op, index)
        kept = [attribute for attribute in node.attribute if attribute.name not in values]
        del node.attribute[:]
        node.attribute.extend(kept)
        node.attribute.extend(helper.make_attribute(*pair) for pair in values.items())

    return edit


def remove_node(op: str, index: int = 0) -> Edit:
    """Return an edit that removes a node; its readers read its first input."""
    return lambda proto: bypass(proto, find_node(proto, op, index))


def bypass(proto: onnx.ModelProto, removed: onnx.NodeProto) -> None:
    """Remove a node; its readers read its first input."""
    old, new = removed.output[0], removed.input[0]
    proto.graph.node.remove(removed)
    for item in proto.graph.node:
        for at, name in enumerate(item.input):
            if name == old:
                item.input[at] = new


def render_difference(difference: WeightDifference) -> str:
    """Return the message about a weight that differs."""
    return render_fault("weights", {"details": [difference.detail]}).text


def check(folder: Path, model: nn.Module, inputs: np.ndarray, spoil: Edit, **settings: Any) -> Any:
    """Export the model, edit the file, and return the localization of its rejection."""
    candidate = export(model.eval(), folder / "m.onnx", inputs, **settings)
    proto = onnx.load(candidate.path)
    spoil(proto)
    onnx.save(proto, candidate.path)
    result = gate.check(candidate.path, model, {"input": inputs})
    assert result.decision.verdict.value == "FAIL"
    return result.explanation.localisation


def first_detail(record: Localization) -> tuple[str | None, str | None, dict[str, Any]]:
    """Return the layer, the code of the fault, and its only detail."""
    (detail,) = record.fault_params["details"]
    return record.first_divergence, record.fault_code, detail
