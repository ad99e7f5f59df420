"""Tensors with similar values or matching names are not confused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.localize import nets
from tests.localize.nets import IMAGES, TOKENS, VECTORS, find_node, layer_rows, localize_file
from tests.modules import Layers

SERIES = VECTORS[:, :, None] @ VECTORS[:1, None, :4]


class SmallBias(nn.Module):
    """Linear layers with biases near zero, and Dropout after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 3)
        nn.init.constant_(self.first.bias, 1e-6)
        nn.init.constant_(self.second.bias, -1e-6)

    def forward(self, x):  # on three axes, Linear is exported as MatMul and Add
        return self.drop(self.second(self.drop(self.first(x[:, None])))).squeeze(1)


def make_with_tables() -> nn.Module:
    """Return a model that adds a table and one that is independent of the samples, between
    modules.
    """
    return Layers(
        lambda m, x: m.norm(m.drop(m.embed(x) + m.table)) + m.positions(torch.arange(x.shape[1])),
        embed=lambda: nn.Embedding(11, 8),
        drop=nn.Dropout,
        norm=lambda: nn.LayerNorm(8),
        positions=lambda: nn.Embedding(6, 8),
        table=lambda: nn.Parameter(torch.randn(6, 8)),
    )


def make_recurrent() -> nn.Module:
    """Return an LSTM with one used output, which the head transposes."""
    return Layers(
        lambda m, x: m.head(m.lstm(x)[0]),
        lstm=lambda: nn.LSTM(4, 8, num_layers=2, bidirectional=True, batch_first=True),
        head=lambda: nn.Linear(16, 3),
    )


class NormAct(nn.BatchNorm2d):
    """A BatchNorm that contains its activation, as in timm."""

    def __init__(self) -> None:
        super().__init__(4)
        self.act = nn.SiLU()
        nn.init.uniform_(self.weight, 0.5, 1.5)
        nn.init.normal_(self.bias)
        nn.init.normal_(self.running_mean)

    def forward(self, x):
        args = (self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        return self.act(nn.functional.batch_norm(x, *args))


def make_conv_norm_act() -> nn.Module:
    """Convolutions with BatchNorm and activation in one module."""
    return Layers(
        lambda m, x: m.bn2(m.conv2(m.bn1(m.conv1(x)))).mean((2, 3)),
        conv1=lambda: nn.Conv2d(3, 4, 3),
        bn1=NormAct,
        conv2=lambda: nn.Conv2d(4, 4, 3),
        bn2=NormAct,
    )


def make_scaled() -> nn.Module:
    """Return a product and a small bias; the value before the bias is similar to the output."""
    return Layers(
        lambda m, x: x * m.weight + m.bias,
        weight=lambda: nn.Parameter(torch.rand(6) + 0.5),
        bias=lambda: nn.Parameter(torch.full((6,), 0.02)),
    )


def make_computed() -> nn.Module:
    """Return a parameter read through a softmax, which exporters precompute, and an integer
    buffer.
    """
    return Layers(
        lambda m, x: (x @ m.choice.softmax(0)) * m.signs,
        choice=lambda: nn.Parameter(torch.randn(6, 6)),
        signs=lambda: nn.Buffer(torch.tensor([1, 2, 3, 4, 5, 6])),
    )


def build(kind):
    torch.manual_seed(0)
    return kind().eval()


@pytest.mark.parametrize("by", ["direct", pytest.param("dynamo", marks=pytest.mark.proof)])
@pytest.mark.parametrize(
    ("kind", "example"),
    [
        (SmallBias, VECTORS),
        (make_with_tables, TOKENS),
        (make_recurrent, SERIES),
        (make_conv_norm_act, IMAGES),
    ],
)
def test_correct_file_has_no_divergence(tmp_path, kind, example, by):
    model = build(kind)
    candidate = nets.export(model, tmp_path / "m.onnx", example, by=by)
    reported = localize_file(model, candidate, example)
    assert (reported.first_divergence, reported.diverges) == (None, False)


@pytest.mark.rows(7)
@pytest.mark.parametrize("by", ["direct", pytest.param("dynamo", marks=pytest.mark.proof)])
@pytest.mark.parametrize(("kind", "example", "parameter", "module"), [
    (SmallBias, VECTORS, "second.weight", "second"),
    (make_with_tables, TOKENS, "table", ""),
    (make_with_tables, TOKENS, "positions.weight", "positions"),
    (make_conv_norm_act, IMAGES, "conv2.weight", "conv2"),
    (make_conv_norm_act, IMAGES, "bn1.bias", "bn1"),
    (make_conv_norm_act, IMAGES, "bn2.running_mean", "bn2"),
    (make_recurrent, SERIES, "lstm.weight_hh_l1", "lstm"),
    (make_recurrent, SERIES, "lstm.bias_ih_l0_reverse", "lstm"),
])  # fmt: skip
def test_module_of_the_wrong_parameter_is_the_only_source(
    tmp_path, kind, example, parameter, module, by
):
    model, wrong = build(kind), build(kind)
    tensor = (
        wrong.get_parameter if parameter in dict(wrong.named_parameters()) else wrong.get_buffer
    )
    tensor(parameter).data.view(-1)[::2] *= 1.5
    candidate = nets.export(wrong, tmp_path / "m.onnx", example, by=by)
    reported = localize_file(model, candidate, example)
    assert reported.first_divergence == module
    if "." not in parameter or parameter.startswith("lstm"):
        assert f"{parameter} differs from the model's" in reported.cause
    assert {row.module for row in reported.layers if row.verdict == "source"} == {module}


def test_output_of_a_module_is_its_last_node(tmp_path):
    def net():
        return nn.Sequential(nn.Linear(6, 6), build(make_scaled), nn.Linear(6, 3)).eval()

    torch.manual_seed(1)
    model = net()
    torch.manual_seed(1)
    wrong = net()
    wrong[1].weight.data.mul_(1.1)
    candidate = nets.export(wrong, tmp_path / "m.onnx", VECTORS)
    reported = localize_file(model, candidate, VECTORS)
    assert reported.first_divergence == "1"
    assert layer_rows(reported)["1"].tensor.startswith("/1/Add")
    assert layer_rows(reported)["2"].verdict == "propagated"


def test_computed_constant_is_no_other_weight(tmp_path):
    model, wrong = build(make_computed), build(make_computed)
    wrong.signs = wrong.signs.flip(0)
    candidate = nets.export(wrong, tmp_path / "m.onnx", VECTORS)
    assert "choice" not in localize_file(model, candidate, VECTORS).cause


def test_scalar_of_the_code_is_no_other_weight(tmp_path):
    """An exporter may drop a factor of 1. The code also uses 0.25."""
    model = nn.Sequential(
        nn.Linear(6, 6),
        Layers(
            lambda m, x: (torch.tanh(x) + 0.25) * m.factor,
            factor=lambda: nn.Parameter(torch.ones(())),
        ),
        nn.Linear(6, 3),
    ).eval()

    def subtract(proto):
        find_node(proto, "Add").op_type = "Sub"
        scaling = find_node(proto, "Mul")
        scaling.op_type = "Identity"
        del scaling.input[1]

    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
    reported = localize_file(model, candidate, VECTORS, edit=subtract)
    assert (reported.first_divergence, reported.fault_code) == ("1", "settings")
    [detail] = reported.fault_params["details"]
    assert (detail["got"], detail["want"]) == ("Sub", "Add")
