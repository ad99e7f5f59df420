"""`gate.check` names one changed node, number, input or weight, and code that the file lacks."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional

from tests.localize import nets
from tests.localize.nets import PICTURES, VECTORS, check, edit_attributes, find_node, first_detail
from tests.modules import Layers

TOKENS = np.random.default_rng(5).integers(0, 11, size=(6, 6))


def make_pictures(between, **layers) -> nn.Module:
    """Return a network that computes `between` between two convolutions."""
    return nets.randomize(
        Layers(
            lambda m, x: m.head(m.last(between(m, m.first(x))).mean((2, 3))),
            first=lambda: nn.Conv2d(3, 8, 3, padding=1),
            last=lambda: nn.Conv2d(8, 8, 3),
            head=lambda: nn.Linear(8, 3),
            **layers,
        )
    )


def average_pool(proto: onnx.ModelProto) -> None:
    node = find_node(proto, "MaxPool")
    node.op_type = "AveragePool"
    kept = [attribute for attribute in node.attribute if attribute.name == "kernel_shape"]
    kept += [attribute for attribute in node.attribute if attribute.name == "strides"]
    del node.attribute[:]
    node.attribute.extend(kept)


def pool(m, x):
    return functional.max_pool2d(x, 2)


def enlarge(m, x):
    return functional.interpolate(x, scale_factor=2, mode="bilinear")


NEAREST = {
    "mode": "nearest",
    "coordinate_transformation_mode": "asymmetric",
    "nearest_mode": "floor",
}
LINEAR = "mode=linear, coordinate_transformation_mode=half_pixel"


@pytest.mark.parametrize("by", ["direct", "dynamo"])
@pytest.mark.parametrize(
    ("between", "layers", "spoil", "expected"),
    [
        (pool, {}, average_pool, ("", "operator of AveragePool", "MaxPool")),
        (
            lambda m, x: m.pool(x),
            {"pool": lambda: nn.MaxPool2d(2)},
            average_pool,
            ("pool", "operator of AveragePool", "MaxPool"),
        ),
        (
            enlarge,
            {},
            edit_attributes("Resize", **NEAREST),
            ("", "interpolation of Resize", LINEAR),
        ),
        (
            lambda m, x: m.up(x),
            {"up": lambda: nn.Upsample(scale_factor=2)},
            edit_attributes("Resize", nearest_mode="ceil"),
            ("up", "interpolation of Resize", "nearest_mode=floor"),
        ),
    ],
)
def test_changed_operator_of_pictures_is_named(tmp_path, by, between, layers, spoil, expected):
    model = make_pictures(between, **layers)
    blamed, code, detail = first_detail(check(tmp_path, model, PICTURES, spoil, by=by))
    kind = " ".join(detail["setting"].split()[:3])
    assert (code, detail["code"]) == ("settings", "right_with")
    assert (blamed, kind, detail["want"]) == expected


def make_vectors(between, **layers) -> nn.Module:
    """Return a network that computes `between` between two linear layers."""
    return nets.randomize(
        Layers(
            lambda m, x: m.head(between(m, m.first(x))),
            first=lambda: nn.Linear(6, 32),
            head=lambda: nn.Linear(32, 3),
            **layers,
        )
    )


def replace_number(proto: onnx.ModelProto) -> None:
    """Replace the constant 0.1 by 0.12."""
    tensors = [*proto.graph.initializer]
    tensors += [a.t for n in proto.graph.node if n.op_type == "Constant" for a in n.attribute]
    for tensor in tensors:
        array = numpy_helper.to_array(tensor)
        if array.size == 1 and np.isclose(array.item(), 0.1):
            tensor.CopyFrom(numpy_helper.from_array(np.full_like(array, 0.12), tensor.name))


@pytest.mark.parametrize("by", ["direct", "dynamo"])
def test_changed_number_of_code_is_named(tmp_path, by):
    model = make_vectors(lambda m, x: torch.where(x > 0.1, x, 0 * x))
    record = check(tmp_path, model, VECTORS, replace_number, by=by)
    module, code, detail = first_detail(record)
    assert (module, code) == ("", "settings")
    assert (detail["got"], detail["want"]) == ("0.12", "0.1")


def exchange(op: str, index: int, other: int, argument: int) -> nets.Edit:
    """Exchange the inputs `argument` of two nodes."""

    def spoil(proto: onnx.ModelProto) -> None:
        first, second = find_node(proto, op, index), find_node(proto, op, other)
        names = second.input[argument], first.input[argument]
        first.input[argument], second.input[argument] = names

    return spoil


def exchange_affine(proto: onnx.ModelProto) -> None:
    for product in proto.graph.node:
        if product.op_type == "LayerNormalization":
            product.input[1], product.input[2] = product.input[2], product.input[1]
            return
    product, total = find_node(proto, "Mul"), find_node(proto, "Add", -1)
    product.input[1], total.input[1] = total.input[1], product.input[1]


@pytest.mark.parametrize("export", [{}, {"opset_version": 14}, {"by": "dynamo"}])
def test_exchanged_weight_and_bias_of_a_norm_are_named(tmp_path, export):
    model = make_vectors(lambda m, x: m.norm(x), norm=lambda: nn.LayerNorm(32))
    record = check(tmp_path, model, VECTORS, exchange_affine, **export)
    names = {"setting": "norm.bias", "want": "norm.weight"}
    assert first_detail(record) == ("norm", "settings", {"code": "exchanged", **names})


@pytest.mark.parametrize("by", ["direct", "dynamo"])
@pytest.mark.parametrize(
    ("make", "spoil", "name"),
    [
        (lambda: nn.Linear(32, 32), exchange("Gemm", 1, 2, 1), "weight"),
        (lambda: nn.LayerNorm(32), exchange("LayerNormalization", 0, 1, 2), "bias"),
    ],
)
def test_exchanged_tensors_of_two_layers_are_named(tmp_path, by, make, spoil, name):
    model = make_vectors(lambda m, x: m.b(m.a(x).sin()), a=make, b=make)
    record = check(tmp_path, model, VECTORS, spoil, by=by)
    assert [(fault.module, fault.code) for fault in record.faults] == [
        ("a", "weights"),
        ("b", "weights"),
    ]
    detail = {"code": "reads_instead", "setting": f"b.{name}", "want": f"a.{name}"}
    assert record.faults[0].params["details"] == [detail]


@pytest.mark.parametrize(
    ("turn", "how"),
    [
        (lambda table: table[::-1], "reversed"),
        (lambda table: np.roll(table, 1, 0), "shifted by one"),
    ],
)
def test_positions_in_another_order_are_named(tmp_path, turn, how):
    def spoil(proto: onnx.ModelProto) -> None:
        table = next(t for t in proto.graph.initializer if tuple(t.dims) == (6, 32))
        turned = np.ascontiguousarray(turn(numpy_helper.to_array(table)))
        table.CopyFrom(numpy_helper.from_array(turned, table.name))

    model = Layers(
        lambda m, x: m.head((m.embed(x) + m.at(torch.arange(x.shape[1]))).tanh()),
        embed=lambda: nn.Embedding(11, 32),
        at=lambda: nn.Embedding(9, 32),
        head=lambda: nn.Linear(32, 3),
    )
    module, code, detail = first_detail(check(tmp_path, model, TOKENS, spoil, by="dynamo"))
    assert (module, code, detail["how"], detail["axis"]) == ("", "settings", how, 0)


class Excitation(nn.Module):
    """Pictures, each channel multiplied by a number that is computed from its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.mix, self.gate = nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid()

    def forward(self, x):
        return x * self.gate(self.mix(self.pool(x)))


class ChannelsLast(nn.Module):
    """A LayerNorm over the channels of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def lose_excitation(proto: onnx.ModelProto) -> None:
    product, gate = find_node(proto, "Mul"), find_node(proto, "Sigmoid")
    kept = next(name for name in product.input if name != gate.output[0])
    product.input[:] = [kept, gate.output[0]]
    nets.bypass(proto, product)


@pytest.mark.parametrize("by", ["direct", "dynamo"])
@pytest.mark.parametrize("make", [lambda: nn.GroupNorm(2, 8), ChannelsLast])
@pytest.mark.parametrize(
    "between", [lambda m, x: m.norm(m.se(x)), lambda m, x: m.norm(x + m.se(x))]
)
def test_lost_product_is_no_fault_of_the_layer_behind_it(tmp_path, by, make, between):
    model = make_pictures(between, se=Excitation, norm=make)
    pictures = np.random.default_rng(6).normal(size=(6, 3, 9, 10)).astype(np.float32)
    record = check(tmp_path, model, pictures, lose_excitation, by=by)
    assert [(fault.module, fault.code) for fault in record.faults] == [("se", "code")]


def test_random_operators_are_not_changed(tmp_path):
    """ONNX Runtime ends the process if the standard deviation is 0, a number of forward."""

    def add_noise(proto: onnx.ModelProto) -> None:
        clip = find_node(proto, "Clip")
        clean, clip.output[0] = clip.output[0], "clean"
        noise = onnx.helper.make_node("RandomNormalLike", ["clean"], ["noise"], scale=0.1)
        noisy = onnx.helper.make_node("Add", ["clean", "noise"], [clean])
        at = list(proto.graph.node).index(clip) + 1
        nodes = [*proto.graph.node[:at], noise, noisy, *proto.graph.node[at:]]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)

    model = make_pictures(lambda m, x: torch.clamp(x, 0.0, 0.5))
    record = check(tmp_path, model, PICTURES, add_noise, by="direct")
    assert record.fault_code == "code"
