"""Several faults in one file are all named."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

from gate import Localization
from tests.localize import nets, test_folded
from tests.localize.nets import (
    INPUTS,
    VECTORS,
    Edit,
    Flat,
    Residual,
    Tokens,
    edit_attributes,
    edit_input,
    edit_weight,
    find_node,
    localize_file,
)
from tests.localize.test_folded import SEQUENCES, Encoder

fused_file = test_folded.fused_file


class Deep(nn.Module):
    """Three blocks with a shortcut and an activation each; one activation is in code."""

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


def to_leaky_relu(index: int) -> Edit:
    def spoil(proto: onnx.ModelProto) -> None:
        changed = find_node(proto, "Relu", index)
        changed.op_type = "LeakyRelu"
        changed.attribute.append(helper.make_attribute("alpha", 0.1))

    return spoil


def to_sigmoid(proto: onnx.ModelProto) -> None:
    find_node(proto, "Tanh").op_type = "Sigmoid"


FILES: list[tuple[type[nn.Module], nets.Exporter, dict[str, Edit]]] = [
    (Residual, "direct", {"block.relu": to_leaky_relu(1), "block.conv2": edit_input("Conv", 2), "head": edit_weight("head.bias")}),
    (Residual, "dynamo", {"stem.2": to_leaky_relu(0), "block.conv1": edit_input("Conv", 1)}),
    (Tokens, "direct", {"layer.qkv": edit_input("MatMul", 0), "layer.norm2": edit_attributes("LayerNormalization", 1, epsilon=0.01), "head": edit_weight("head.bias")}),
    (Tokens, "dynamo", {"embed": edit_weight("embed.weight", lambda values: values * 1.1), "layer.proj": edit_weight("layer.proj.bias")}),
    (Flat, "dynamo", {"twice": edit_weight("twice.bias"), "right": edit_weight("right.weight")}),
    (Deep, "direct", {"": to_leaky_relu(0), "norm.2": edit_input("LayerNormalization", 2), "head": edit_weight("head.weight")}),
    (Deep, "dynamo", {"norm.0": edit_input("LayerNormalization", 0), "linear.1": edit_weight("linear.1.bias"), "tanh": to_sigmoid}),
]  # fmt: skip


def apply_all(spoils: Sequence[Edit]) -> Edit:
    def spoil(proto: onnx.ModelProto) -> None:
        for item in spoils:
            item(proto)

    return spoil


def assert_faults(record: Localization, faults: Sequence[str]) -> None:
    """Assert that exactly these faults are named in order, each with a text and a remedy."""
    assert [fault.module for fault in record.faults] == list(faults)
    assert (record.first_divergence, record.fault) == (faults[0], record.faults[0].text)
    assert len({fault.text for fault in record.faults}) == len(faults)
    assert all(fault.remedy for fault in record.faults)
    sources = {row.module for row in record.layers if row.verdict == "source"}
    assert sources == set(faults)


@pytest.mark.rows(3)
@pytest.mark.parametrize(("kind", "by", "faults"), FILES)
def test_exactly_the_faults_are_named(export_net, kind, by, faults):
    model, candidate = export_net(kind, by)
    assert_faults(
        localize_file(
            model, candidate, INPUTS.get(kind, VECTORS), edit=apply_all(list(faults.values()))
        ),
        list(faults),
    )


FUSED: dict[str, Edit] = {
    "": test_folded.drop_mask,
    "norm1": test_folded.FAULTS["norm1"],
    "down": test_folded.FAULTS["down"],
    "head": test_folded.FAULTS["head"],
}


@pytest.mark.parametrize("names", [("norm1", "down"), ("", "norm1", "head")])
def test_faults_of_a_file_with_fused_modules(fused_file, names):
    assert_faults(
        localize_file(
            Encoder().eval(), fused_file, SEQUENCES, edit=apply_all([FUSED[name] for name in names])
        ),
        names,
    )


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    model = test_folded.Stack().eval()
    return model, test_folded.fuse(model, tmp_path_factory.mktemp("stack") / "m.onnx")


@pytest.mark.further
@pytest.mark.parametrize(
    ("parts", "amount"),
    [(("key", "query"), 0.05), (("value", "key"), 0.3), ((None, "query"), 0.05)],
)
def test_faults_of_two_packed_weights(stack, parts, amount):
    model, candidate = stack
    pairs = [
        (test_folded.change_packed(part, amount, layer=layer), f"{path}.{part}")
        for layer, (path, part) in enumerate(zip(("first", "second"), parts, strict=True))
        if part
    ]
    assert_faults(
        localize_file(model, candidate, SEQUENCES, edit=apply_all([spoil for spoil, _ in pairs])),
        [name for _, name in pairs],
    )


def test_at_most_five_faults_are_reported(export_net):
    model, candidate = export_net(Deep, "direct")
    spoils = [edit_weight(f"linear.{at}.bias") for at in range(6)]
    reported = localize_file(model, candidate, VECTORS, edit=apply_all(spoils))
    assert [fault.module for fault in reported.faults] == [f"linear.{at}" for at in range(5)]


@pytest.mark.further
def test_localization_without_faults_is_read(export_net):
    model, candidate = export_net(Deep, "direct")
    reported = localize_file(model, candidate, VECTORS, edit=edit_weight("head.bias"))
    assert Localization.from_json(reported.to_json()) == reported
    assert Localization.from_json(reported.model_copy(update={"faults": ()}).to_json()).faults == ()
    assert np.isfinite(reported.whole_ratio)


PAIRS: list[tuple[type[nn.Module], nets.Exporter, str, tuple[Edit, Edit]]] = [
    (Deep, "direct", "linear.2", (edit_input("Gemm", 2), edit_weight("linear.2.bias"))),
    (Tokens, "direct", "layer.qkv", (edit_input("MatMul", 0), edit_weight("layer.qkv.bias"))),
    (Tokens, "direct", "layer.norm1", (edit_input("LayerNormalization", 0), edit_input("LayerNormalization", 0, 2))),
]  # fmt: skip


@pytest.mark.further
@pytest.mark.rows(2)
@pytest.mark.parametrize(("kind", "by", "module", "spoils"), PAIRS)
def test_both_wrong_tensors_of_a_layer_are_named(export_net, kind, by, module, spoils):
    model, candidate = export_net(kind, by)
    (fault,) = localize_file(
        model, candidate, INPUTS.get(kind, VECTORS), edit=apply_all(spoils)
    ).faults
    assert fault.module == module
    assert f"{module}.weight" in fault.text
    assert f"{module}.bias" in fault.text
    (fault,) = localize_file(model, candidate, INPUTS.get(kind, VECTORS), edit=spoils[0]).faults
    assert f"{module}.bias" not in fault.text
