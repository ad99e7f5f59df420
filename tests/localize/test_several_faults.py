"""Several faults in one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

from gate import Localization, TestedFile
from tests.localize import nets, test_folded
from tests.localize.nets import (
    IMAGES,
    TOKENS,
    VECTORS,
    Flat,
    Residual,
    Tokens,
    change,
    found,
    middle,
    node,
)
from tests.localize.test_cause import setting
from tests.localize.test_folded import SEQUENCES, Encoder
from tests.measure import tiny

Spoil = Callable[[onnx.ModelProto], object]
fused_file = test_folded.fused_file


class Deep(nn.Module):
    """Three blocks with shortcuts and an activation each, one of them in code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        self.norm = nn.ModuleList([nn.LayerNorm(6) for _ in range(3)])
        self.gelu, self.tanh, self.head = nn.GELU(), nn.Tanh(), nn.Linear(6, 3)

    def forward(self, x):
        for norm, start, act in zip(
            self.norm, (0, 2, 4), (self.gelu, torch.relu, self.tanh), strict=True
        ):
            x = x + self.linear[start + 1](act(self.linear[start](norm(x))))
        return self.head(x)


def weight(name: str) -> Spoil:
    return lambda proto: change(proto, name, middle)


def read_by(op: str, place: int, argument: int = 1) -> Spoil:
    return lambda proto: change(proto, node(proto, op, place).input[argument], middle)


def to_leaky_relu(place: int) -> Spoil:
    def spoil(proto: onnx.ModelProto) -> None:
        changed = node(proto, "Relu", place)
        changed.op_type = "LeakyRelu"
        changed.attribute.append(helper.make_attribute("alpha", 0.1))

    return spoil


def to_sigmoid(proto: onnx.ModelProto) -> None:
    node(proto, "Tanh").op_type = "Sigmoid"


INPUTS = {Residual: IMAGES, Tokens: TOKENS, Flat: VECTORS, Deep: VECTORS}

FILES: list[tuple[type[nn.Module], nets.Exporter, dict[str, Spoil]]] = [
    (Residual, "direct", {"block.relu": to_leaky_relu(1), "block.conv2": read_by("Conv", 2), "head": weight("head.bias")}),
    (Residual, "dynamo", {"stem.2": to_leaky_relu(0), "block.conv1": read_by("Conv", 1)}),
    (Tokens, "direct", {"layer.qkv": read_by("MatMul", 0), "layer.norm2": setting("LayerNormalization", 1, epsilon=0.01), "head": weight("head.bias")}),
    (Tokens, "dynamo", {"embed": lambda proto: change(proto, "embed.weight", lambda values: values * 1.1), "layer.proj": weight("layer.proj.bias")}),
    (Flat, "dynamo", {"twice": weight("twice.bias"), "right": weight("right.weight")}),
    (Deep, "direct", {"": to_leaky_relu(0), "norm.2": read_by("LayerNormalization", 2), "head": weight("head.weight")}),
    (Deep, "dynamo", {"norm.0": read_by("LayerNormalization", 0), "linear.1": weight("linear.1.bias"), "tanh": to_sigmoid}),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    kept: dict[tuple[type[nn.Module], str], tuple[nn.Module, TestedFile]] = {}
    folder = tmp_path_factory.mktemp("files")

    def make(kind: type[nn.Module], by: nets.Exporter) -> tuple[nn.Module, TestedFile]:
        if (kind, by) not in kept:
            model, path = nets.made(kind), folder / f"{kind.__name__}-{by}.onnx"
            outputs = ("left", "right", "most") if kind is Flat else ("logits",)
            kept[kind, by] = model, nets.export(model, path, INPUTS[kind], by=by, outputs=outputs)
        return kept[kind, by]

    return make


def apply_all(spoils: Sequence[Spoil]) -> Spoil:
    def spoil(proto: onnx.ModelProto) -> None:
        for item in spoils:
            item(proto)

    return spoil


def assert_faults(told: Localization, faults: Sequence[str]) -> None:
    """All of them in their order, each with its own text and remedy."""
    assert [fault.module for fault in told.faults] == list(faults)
    assert (told.first_divergence, told.fault) == (faults[0], told.faults[0].text)
    assert len({fault.text for fault in told.faults}) == len(faults)
    assert all(fault.remedy for fault in told.faults)
    sources = {row.module for row in told.layers if row.verdict == "source"}
    assert sources == set(faults)


@pytest.mark.rows(3)
@pytest.mark.parametrize(("kind", "by", "faults"), FILES)
def test_exactly_the_faults_are_named(made, tmp_path, kind, by, faults):
    model, candidate = made(kind, by)
    bad = tiny.edit(candidate, tmp_path / "bad.onnx", apply_all(list(faults.values())))
    assert_faults(found(model, bad, INPUTS[kind]), list(faults))


FUSED: dict[str, Spoil] = {
    "": test_folded.drop_mask,
    "norm1": test_folded.FAULTS["norm1"],
    "down": test_folded.FAULTS["down"],
    "head": test_folded.FAULTS["head"],
}


@pytest.mark.parametrize("names", [("norm1", "down"), ("", "norm1", "head")])
def test_faults_of_a_file_with_fused_modules(fused_file, tmp_path, names):
    bad = tiny.edit(fused_file, tmp_path / "bad.onnx", apply_all([FUSED[name] for name in names]))
    assert_faults(found(Encoder().eval(), bad, SEQUENCES), names)


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    model = test_folded.Stack().eval()
    return model, test_folded.fuse(model, tmp_path_factory.mktemp("stack") / "m.onnx")


@pytest.mark.further
@pytest.mark.parametrize(
    ("parts", "amount"),
    [(("key", "query"), 0.05), (("value", "key"), 0.3), ((None, "query"), 0.05)],
)
def test_faults_of_two_packed_weights(stack, tmp_path, parts, amount):
    model, candidate = stack
    pairs = [
        (test_folded.change_packed(part, amount, layer=layer), f"{path}.{part}")
        for layer, (path, part) in enumerate(zip(("first", "second"), parts, strict=True))
        if part
    ]
    bad = tiny.edit(candidate, tmp_path / "bad.onnx", apply_all([spoil for spoil, _ in pairs]))
    assert_faults(found(model, bad, SEQUENCES), [name for _, name in pairs])


def test_at_most_five_faults_are_reported(made, tmp_path):
    model, candidate = made(Deep, "direct")
    spoils = [weight(f"linear.{at}.bias") for at in range(6)]
    reported = found(model, tiny.edit(candidate, tmp_path / "bad.onnx", apply_all(spoils)), VECTORS)
    assert [fault.module for fault in reported.faults] == [f"linear.{at}" for at in range(5)]


@pytest.mark.further
def test_localization_without_faults_is_read(made, tmp_path):
    model, candidate = made(Deep, "direct")
    bad = tiny.edit(candidate, tmp_path / "bad.onnx", weight("head.bias"))
    reported = found(model, bad, VECTORS)
    assert Localization.from_json(reported.to_json()) == reported
    assert Localization.from_json(reported.model_copy(update={"faults": ()}).to_json()).faults == ()
    assert np.isfinite(reported.whole_ratio)


PAIRS: list[tuple[type[nn.Module], nets.Exporter, str, tuple[Spoil, Spoil]]] = [
    (Deep, "direct", "linear.2", (read_by("Gemm", 2), weight("linear.2.bias"))),
    (Tokens, "direct", "layer.qkv", (read_by("MatMul", 0), weight("layer.qkv.bias"))),
    (Tokens, "direct", "layer.norm1", (read_by("LayerNormalization", 0), read_by("LayerNormalization", 0, 2))),
]  # fmt: skip


@pytest.mark.further
@pytest.mark.rows(2)
@pytest.mark.parametrize(("kind", "by", "module", "spoils"), PAIRS)
def test_both_wrong_tensors_of_a_layer_are_named(made, tmp_path, kind, by, module, spoils):
    model, candidate = made(kind, by)
    bad = tiny.edit(candidate, tmp_path / "bad.onnx", apply_all(spoils))
    (fault,) = found(model, bad, INPUTS[kind]).faults
    assert fault.module == module
    assert f"{module}.weight" in fault.text
    assert f"{module}.bias" in fault.text
    alone = tiny.edit(candidate, tmp_path / "one.onnx", spoils[0])
    (fault,) = found(model, alone, INPUTS[kind]).faults
    assert f"{module}.bias" not in fault.text
