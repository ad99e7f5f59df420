"""Swapped or unread inputs and missing or reordered outputs are named."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from gate.export.failures import UnsupportedOperator, opset_for_all, remedy, ways_out
from tests.localize import nets
from tests.localize.nets import IMAGES, change_weight, edit_weight, list_titles, localize_file
from tests.localize.test_folded import Encoder, fused_file
from tests.measure import tiny
from tests.modules import Layers

__all__ = ["fused_file"]

A, B, C = np.random.default_rng(0).normal(size=(3, 6, 6)).astype(np.float32)


class ThreeInputs(nn.Module):
    """A model with three inputs of one shape: two are read by layers, the third by code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, a, b, c):
        return self.head(torch.tanh(self.first(a) - 2 * self.second(b) + c[:, :5]))


def rename_inputs(names: dict[str, str]):
    """Return an edit that makes the nodes read other inputs."""

    def spoil(proto: onnx.ModelProto) -> None:
        for node in proto.graph.node:
            for at, name in enumerate(node.input):
                node.input[at] = names.get(name, name)

    return spoil


@pytest.mark.parametrize("names", [
    {"b": "c", "c": "b"},
    {"a": "b", "b": "c", "c": "a"},
], ids="".join)  # fmt: skip
def test_swapped_inputs_are_named(tmp_path, names):
    inputs = {"a": A, "b": B, "c": C}
    candidate = tiny.export(ThreeInputs().eval(), tmp_path / "m.onnx", example=inputs)
    reported = localize_file(ThreeInputs().eval(), candidate, inputs, edit=rename_inputs(names))
    assert reported.first_divergence == ""
    assert len(list_titles(reported, "source")) == 1
    assert all(f"{by} instead of {name}" in reported.fault for name, by in names.items())
    assert "input_names" in reported.remedy


class OptionalInput(nn.Module):
    """A model with an optional input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, a, b=None):
        return self.first(a) if b is None else self.first(a) + self.second(b)


def test_input_that_only_the_model_takes_is_named(tmp_path):
    candidate = tiny.export(OptionalInput().eval(), tmp_path / "m.onnx", example={"a": A})
    reported = localize_file(OptionalInput().eval(), candidate, {"a": A, "b": B})
    assert (reported.fault_code, reported.fault_params["inputs"]) == ("unread_input", ["b"])


class Masked(nn.Module):
    """Attention over tokens with padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids, mask):
        x = self.embed(ids)
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        scores = scores.masked_fill(mask[:, None, :] == 0, -1e9)
        return self.head((scores.softmax(-1) @ self.v(x))[:, -1])


LEFT_PADDED = np.triu(np.ones((6, 5), np.int64))[::-1].copy()


def drop_mask(proto: onnx.ModelProto) -> None:
    where_node = nets.find_node(proto, "Where")
    rename_inputs({where_node.output[0]: where_node.input[2]})(proto)


def test_unread_mask_is_named(tmp_path):
    ids = np.random.default_rng(0).integers(0, 11, size=(6, 5))
    inputs = {"ids": ids, "mask": LEFT_PADDED}
    candidate = tiny.export(Masked().eval(), tmp_path / "m.onnx", example=inputs)
    reported = localize_file(Masked().eval(), candidate, inputs, edit=drop_mask)
    assert reported.first_divergence == ""
    assert "input mask" in reported.fault
    assert len(list_titles(reported, "source")) == 1


def test_mask_read_only_by_length_is_named(fused_file):
    """Name an unsupported mask: the fused attention supports only padding at the end."""
    inputs = {"x": np.random.default_rng(4).normal(size=(4, 5, 16)).astype(np.float32)}
    inputs["mask"] = np.tril(np.ones((4, 5), np.int64), 2)[:, ::-1].copy()
    reported = localize_file(Encoder().eval(), fused_file, inputs)
    assert reported.first_divergence == ""
    assert "Attention" in reported.fault
    assert "use_raw_attention_mask" in reported.remedy


class Sums(nn.Module):
    """A model with one output computed from another."""

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.signs = nn.Linear(6, 4), (sign,)

    def forward(self, x):
        rows = torch.tanh(self.layer(x) + x[:, :4]).cumsum(1)
        return rows, (self.signs[0] * rows + 1).sum(1)


def test_fault_in_an_output_computed_from_another(tmp_path):
    outputs = ("rows", "sums")
    correct = nets.export(Sums().eval(), tmp_path / "m.onnx", A, outputs=outputs)
    assert not localize_file(Sums().eval(), correct, A).diverges
    bad = nets.export(Sums(-1.0).eval(), tmp_path / "bad.onnx", A, outputs=outputs)
    reported = localize_file(Sums().eval(), bad, A)
    (detail,) = reported.fault_params["details"]
    assert (reported.first_divergence, reported.fault_code) == ("", "settings")
    assert (detail["code"], detail["got"], detail["want"]) == ("right_with", "-1", "1")


def make_two_outputs(*, keep: tuple[int, ...] = (0, 1)) -> nn.Module:
    return Layers(
        lambda m, x: tuple((m.left, m.right)[at](torch.tanh(m.body(x))) for at in keep),
        body=lambda: nn.Linear(6, 4),
        left=lambda: nn.Linear(4, 3),
        right=lambda: nn.Linear(4, 2),
    )


@pytest.mark.parametrize("kept", [0, 1])
def test_missing_output_is_named(tmp_path, kept):
    one_output = make_two_outputs(keep=(kept,)).eval()
    candidate = tiny.export(one_output, tmp_path / "m.onnx", example={"x": A}, outputs=("y",))
    reported = localize_file(make_two_outputs().eval(), candidate, {"x": A})
    assert reported.diverges
    assert reported.first_divergence == ""
    assert reported.fault == f"the file lacks output {2 - kept} of the model, counted from 1"
    assert "output_names" in reported.remedy


ORDER = [2, 0, 1, 4, 3]


def test_reordered_rows_of_the_head_are_named(tmp_path):
    model = nets.build(nets.Residual)
    candidate = nets.export(model, tmp_path / "m.onnx", IMAGES)

    def spoil(proto: onnx.ModelProto) -> None:
        change_weight(proto, "head.weight", lambda values: values[ORDER])
        change_weight(proto, "head.bias", lambda values: values[ORDER])

    reported = localize_file(model, candidate, IMAGES, edit=spoil)
    assert reported.first_divergence == "head"
    assert reported.fault.startswith("head.weight")
    assert "another order in the file: 2, 0, 1, 4, 3" in reported.fault


def test_reordered_columns_are_named(tmp_path):
    model = nets.build(nets.Residual)
    candidate = nets.export(model, tmp_path / "m.onnx", IMAGES)
    assert (
        "columns in another order in the file: 71, 70"
        in localize_file(
            model,
            candidate,
            IMAGES,
            edit=edit_weight("head.weight", lambda values: values[:, ::-1]),
        ).fault
    )


class Clamped(nn.Module):
    """A model with infinite parameters as open bounds."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)
        self.high = nn.Parameter(torch.tensor([math.inf]))
        self.low = nn.Parameter(torch.tensor([-math.inf, -0.1, -math.inf, 0.0]))
        self.scale = scale

    def forward(self, x):
        y = torch.minimum(self.layer(x), self.high)
        return self.scale * torch.maximum(y, self.low)


def test_infinite_parameters_are_no_fault(tmp_path):
    candidate = nets.export(Clamped(2.0).eval(), tmp_path / "m.onnx", A)
    reported = localize_file(Clamped().eval(), candidate, A)
    assert reported.first_divergence == ""
    assert "nan" not in reported.cause
    assert "differ" not in reported.cause


def test_deformable_convolution_needs_dynamo_and_opset_19():
    operators = (UnsupportedOperator("torchvision::deform_conv2d", path="layer"),)
    for tried in (["traced", "direct"], ["traced", "direct", "scripted", "dynamo"]):
        assert "dynamo" in remedy(operators, tried)
        assert "19" in remedy(operators, tried)
        assert "19 has torchvision::deform_conv2d" in ways_out(operators, tried)[0]
    assert opset_for_all(operators) is None  # no opset is sufficient for this exporter


def make_grid(offset: float = 0.5) -> nn.Module:
    """Return a model that returns a layer output and a constant."""
    return Layers(
        lambda m, x: (m.layer(x), torch.arange(7) + offset), layer=lambda: nn.Linear(6, 4)
    )


def test_a_constant_output_with_other_values_is_named(tmp_path):
    correct = nets.export(make_grid().eval(), tmp_path / "right.onnx", A)
    assert not localize_file(make_grid().eval(), correct, A).diverges
    wrong = nets.export(make_grid(0.0).eval(), tmp_path / "wrong.onnx", A)
    assert localize_file(make_grid().eval(), wrong, A).fault_code == "constant_output"


def make_sorted(finish=lambda y: y.sort(-1).values) -> nn.Module:
    """Return a model that returns what code makes of the last layer's values."""
    return Layers(lambda m, x: finish(m.layer(x)), layer=lambda: nn.Linear(6, 4))


def test_missing_code_after_the_last_layer_is_named(tmp_path):
    bad = nets.export(make_sorted(lambda y: y).eval(), tmp_path / "m.onnx", A)
    reported = localize_file(make_sorted().eval(), bad, A)
    assert (reported.first_divergence, reported.fault_code) == ("", "missing_value")
    assert reported.fault_params == {"variant": "output", "name": "logits", "layer": "layer"}


class Unit(nn.Module):
    """A model that scales rows to unit length; eps protects rows of zeros."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.eps = nn.Linear(6, 6, bias=False), eps

    def forward(self, x):
        h = self.first(x)
        length = (h.square().sum(-1, keepdim=True) + self.eps).sqrt()
        return h * length.square() / length**3


def test_tensor_of_zeros_is_no_output_of_zeros(tmp_path):
    bad = nets.export(Unit(0.0).eval(), tmp_path / "m.onnx", A)
    record = localize_file(Unit(1e-8).eval(), bad, {"input": np.zeros_like(A)})
    assert record.fault_code != "output_order"


def test_input_of_a_repeated_call_is_not_called_unread(tmp_path):
    """The exporter merges two equal calls of a layer, so the second call has no tensor."""
    model = Layers(lambda m, a: (m.layer(a), m.layer(a) > 0), layer=lambda: nn.Linear(6, 5)).eval()

    def invert(proto: onnx.ModelProto) -> None:
        nets.find_node(proto, "Greater").op_type = "Less"

    candidate = tiny.export(model, tmp_path / "m.onnx", example={"a": A})
    reported = localize_file(model, candidate, {"a": A}, edit=invert)
    assert (reported.first_divergence, reported.fault_code) == ("", "code")
