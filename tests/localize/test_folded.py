"""Modules folded or fused into others have no tensor and are not named as the source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from gate import Localization, TestedFile
from tests.localize import nets
from tests.localize.nets import (
    IMAGES,
    VECTORS,
    change_middle,
    change_weight,
    edit_input,
    edit_weight,
    list_titles,
    localize_file,
)
from tests.measure import tiny
from tests.modules import Layers

SEQUENCES = {
    "x": np.random.default_rng(4).normal(size=(4, 5, 16)).astype(np.float32),
    "mask": np.tril(np.ones((4, 5), np.int64), 2),
}


class Pair(nn.Module):
    """Two consecutive linear layers, followed by others."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.approximate = approximate

    def forward(self, x):
        y = self.norm(self.apply_linear(x)) + x
        return self.head(functional.gelu(2 * y, approximate=self.approximate))

    def apply_linear(self, x):
        return self.second(self.first(x))


class Folded(Pair):
    """A Pair with one layer instead of two."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__(approximate)
        first, second = self.first.double(), self.second.double()
        self.both = nn.Linear(6, 6)
        self.both.weight.data = (second.weight @ first.weight).float().data
        self.both.bias.data = (second.weight @ first.bias + second.bias).float().data

    def apply_linear(self, x):
        return self.both(x)


class Normed(nn.BatchNorm2d):
    """A custom subclass of BatchNorm."""

    def forward(self, x):
        return super().forward(x)


class Scaled(nn.BatchNorm2d):
    """A subclass of BatchNorm with an additional factor, which is folded too."""

    def forward(self, x):
        return super().forward(x) * 1.5


def make_images_model(norm: type[nn.BatchNorm2d] = Normed, slope: float = 0.2) -> nn.Module:
    """Return a convolution and a norm, functional code and a head."""
    return Layers(
        lambda m, x: m.head(functional.leaky_relu(m.norm(m.conv(x)), slope).mean((2, 3))),
        conv=lambda: nn.Conv2d(3, 4, 3),
        norm=lambda: norm(4),
        head=lambda: nn.Linear(4, 3),
    )


class Encoder(nn.Module):
    """A BERT layer, which the transformer optimizer of ONNX Runtime fuses."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.norm0, self.norm1, self.norm2 = (nn.LayerNorm(16) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.head = nn.Linear(16, 3)
        self.scale = scale

    def forward(self, x, mask):
        return self.head(self.encode(self.norm0(x), mask)[:, 0])

    def encode(self, x, mask):
        q, k, v = (self.split_heads(part) for part in self.project(x))
        weights = q @ k.transpose(-1, -2) / self.scale
        weights = weights + (1.0 - mask[:, None, None, :].to(torch.float32)) * -10000.0
        y = (weights.softmax(-1) @ v).permute(0, 2, 1, 3).contiguous()
        y = y.view(y.shape[0], y.shape[1], 16)
        x = self.norm1(self.out(y) + x)
        return self.norm2(self.down(functional.gelu(self.up(x))) + x)

    def project(self, x):
        return self.query(x), self.key(x), self.value(x)

    def split_heads(self, x):
        return x.view(x.shape[0], x.shape[1], 4, 4).permute(0, 2, 1, 3)


class Packed(Encoder):
    """An Encoder with one product for query, key and value, as some exporters write it."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__(scale)
        parts = (self.query, self.key, self.value)
        self.qkv = nn.Linear(16, 48)
        self.qkv.weight.data = torch.cat([part.weight.data for part in parts])
        self.qkv.bias.data = torch.cat([part.bias.data for part in parts])

    def project(self, x):
        return self.qkv(x).chunk(3, -1)


class Layer(Encoder):
    """An Encoder without a head."""

    def forward(self, x, mask):
        return self.encode(x, mask)


class Stack(nn.Module):
    """Two encoder layers with a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Layer(), Layer(), nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)

    def forward(self, x, mask):
        return self.head(self.second(self.first(self.norm(x), mask), mask)[:, 0])


def randomize_norms(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def compare(model, exported, path, inputs, **options):
    """Localize the faults in the file of `exported`."""
    return localize_file(
        randomize_norms(model),
        nets.export(randomize_norms(exported), path, inputs, **options),
        inputs,
    )


def code_sources(record: Localization) -> list[str]:
    """Return the kinds of the code rows that are a source."""
    return [
        row.kind for row in record.layers if row.verdict == "source" and row.kind.startswith("code")
    ]


@pytest.mark.rows(2)
@pytest.mark.parametrize("by", ["direct", "dynamo"])
def test_two_folded_linear_layers(tmp_path, by):
    correct = compare(Pair(), Folded(), tmp_path / "right.onnx", VECTORS, by=by)
    assert not correct.diverges
    assert correct.unmapped == ("first",)
    wrong = compare(Pair(), Folded("tanh"), tmp_path / "wrong.onnx", VECTORS, by=by)
    assert wrong.first_divergence == ""
    assert len(code_sources(wrong)) == len(list_titles(wrong, "source")) == 1
    assert "Tanh" in code_sources(wrong)[0]


@pytest.mark.parametrize("name", ["both.weight", "both.bias"])
def test_wrong_folded_layer_is_named_by_its_tensor(tmp_path, name):
    candidate = nets.export(randomize_norms(Folded()), tmp_path / "m.onnx", VECTORS)
    reported = localize_file(randomize_norms(Pair()), candidate, VECTORS, edit=edit_weight(name))
    assert reported.first_divergence == "second"
    assert list_titles(reported, "source") == ["second"]
    assert "differs from" not in reported.cause  # the file has neither of the two weights
    assert "first" in reported.cause


@pytest.mark.further
@pytest.mark.parametrize(("norm", "by"), [(Normed, "direct"), (Scaled, "dynamo")])
def test_folded_subclass_of_batch_norm(tmp_path, norm, by):
    correct = compare(
        make_images_model(norm), make_images_model(norm), tmp_path / "right.onnx", IMAGES, by=by
    )
    assert not correct.diverges
    wrong = compare(
        make_images_model(norm),
        make_images_model(norm, 0.3),
        tmp_path / "wrong.onnx",
        IMAGES,
        by=by,
    )
    assert wrong.first_divergence == ""
    assert code_sources(wrong) == ["code: LeakyRelu, ReduceMean"]
    assert list_titles(wrong, "source") == ["(model)"]


def fuse(model: nn.Module, path: Path) -> TestedFile:
    """Export and fuse a model with the transformer optimizer of ONNX Runtime."""
    from onnxruntime.transformers import optimizer

    tiny.export(model, path, example=SEQUENCES)
    result = optimizer.optimize_model(
        str(path), model_type="bert", num_heads=4, hidden_size=16, opt_level=0
    )
    assert "Attention" in {node.op_type for node in result.model.graph.node}
    onnx.save(result.model, path)
    return tiny.candidate(path)


@pytest.fixture(scope="module")
def fused_file(tmp_path_factory):
    return fuse(Encoder(), tmp_path_factory.mktemp("fused") / "m.onnx")


def change_packed(part, amount, *, argument=1, layer=0):
    """Add `amount` to a number of query, key or value in the packed weight (1) or bias (2)."""

    def add(values: np.ndarray) -> np.ndarray:
        row = values[3] if argument == 1 else values
        row[16 * ("query", "key", "value").index(part) + 5] += amount
        return values

    def spoil(proto: onnx.ModelProto) -> None:
        change_weight(proto, nets.find_node(proto, "Attention", layer).input[argument], add)

    return spoil


def change_private_copy(proto: onnx.ModelProto, node: onnx.NodeProto, argument: int) -> None:
    """Change a constant for one node, although other nodes read it too."""
    constant = onnx.numpy_helper.to_array(nets.find_weight(proto, node.input[argument]))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(constant + 0.1, "another"))
    node.input[argument] = "another"


FAULTS = {
    "down": edit_input("SkipLayerNormalization", 1, 4),
    "head": edit_weight("head.bias"),
    "norm1": lambda proto: change_private_copy(
        proto, nets.find_node(proto, "SkipLayerNormalization"), 3
    ),
}


def drop_mask(proto: onnx.ModelProto) -> None:
    """Remove the mask input of the fused attention."""
    nets.find_node(proto, "Attention").input[3] = ""


class TestFusedAttention:
    def test_correct_fused_attention_has_no_fault(self, fused_file):
        reported = localize_file(Encoder().eval(), fused_file, SEQUENCES)
        assert not reported.diverges
        assert {"query", "key", "value"} <= set(reported.unmapped)

    @pytest.mark.parametrize("source", FAULTS)
    def test_fault_behind_fused_attention(self, fused_file, source):
        reported = localize_file(Encoder().eval(), fused_file, SEQUENCES, edit=FAULTS[source])
        assert reported.first_divergence == source
        assert list_titles(reported, "source") == [source]

    def test_missing_mask_of_fused_attention(self, fused_file):
        reported = localize_file(Encoder(4.0).eval(), fused_file, SEQUENCES)
        assert reported.first_divergence not in ("query", "key", "value")
        assert len(list_titles(reported, "source")) == 1
        reported = localize_file(Encoder().eval(), fused_file, SEQUENCES, edit=drop_mask)
        assert reported.first_divergence not in ("query", "key", "value")
        assert len(list_titles(reported, "source")) == 1

    @pytest.mark.rows(2)
    @pytest.mark.parametrize(
        ("part", "argument", "amount"),
        [
            ("query", 2, 0.05), ("key", 1, 0.05), ("value", 2, 0.3), ("key", 1, 1.0),
        ],
    )  # fmt: skip
    def test_wrong_number_in_packed_attention_weights(self, fused_file, part, argument, amount):
        """Find a changed number, also if it is small and earlier layers deviate more."""
        spoil = change_packed(part, amount, argument=argument)
        reported = localize_file(Encoder().eval(), fused_file, SEQUENCES, edit=spoil)
        assert [fault.module for fault in reported.faults] == [part]
        assert f"{part}.{'weight' if argument == 1 else 'bias'}" in reported.fault

    def test_equal_bias_of_all_keys_has_no_effect(self, fused_file):
        """Accept an equal bias of all keys, which adds the same to all scores of a query."""
        assert not localize_file(
            Encoder().eval(), fused_file, SEQUENCES, edit=change_packed("key", 0.5, argument=2)
        ).diverges

    def test_packed_attention_projection(self, tmp_path):
        correct = tiny.export(Packed(), tmp_path / "right.onnx", example=SEQUENCES)
        assert not localize_file(Encoder().eval(), correct, SEQUENCES).diverges
        wrong = tiny.export(Packed(4.0), tmp_path / "wrong.onnx", example=SEQUENCES)
        reported = localize_file(Encoder().eval(), wrong, SEQUENCES)
        assert reported.first_divergence not in ("query", "key", "value")
        assert len(list_titles(reported, "source")) == 1


def test_wrong_weight_behind_a_folded_layer_is_found(tmp_path):
    """Find a weight that has no name in the file and no element in common with the model."""
    inputs = VECTORS[:, None, :]
    candidate = nets.export(randomize_norms(Folded()), tmp_path / "m.onnx", inputs)

    def spoil(proto: onnx.ModelProto) -> None:
        (*_, last) = (item for item in proto.graph.node if item.op_type == "MatMul")
        change_weight(proto, last.input[1], lambda values: values * np.float32(1.1))

    reported = localize_file(randomize_norms(Pair()), candidate, inputs, edit=spoil)
    assert reported.first_divergence == "head"
    assert reported.fault.startswith("head.weight")


class Parallel(nn.Module):
    """Two layers on the same value, joined by `join`."""

    def __init__(self, first: nn.Module, join: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.first, self.second = first, nn.Tanh()
        self.head = nn.LazyLinear(3)
        self.join = join

    def forward(self, x):
        y = self.conv(x)
        pair = (self.first(y), self.second(y))
        apply_linear = pair[0] + pair[1] if self.join == "add" else torch.cat(pair, 1)
        return self.head(apply_linear.mean((2, 3)))


@pytest.mark.parametrize(("join", "by"), [("add", "direct"), ("cat", "dynamo")])
def test_merged_equal_layers_are_named(tmp_path, join, by):
    """Name a layer that an exporter has merged with an equal operator on equal inputs."""
    model, merged = Parallel(nn.ELU(), join), Parallel(nn.Tanh(), join)
    for item in (model, merged):
        item(torch.from_numpy(IMAGES))
    merged.load_state_dict(model.state_dict())
    reported = compare(model, merged, tmp_path / "m.onnx", IMAGES, by=by)
    assert reported.first_divergence == "first"
    assert list_titles(reported, "source") == ["first"]


def make_recurrent() -> nn.Module:
    """Return a GRU and an LSTM; exporters merge their transposes."""
    return Layers(
        lambda m, x: m.head(m.lstm(m.gru(x)[0])[0][:, -1]),
        gru=lambda: nn.GRU(16, 6, batch_first=True, bidirectional=True),
        lstm=lambda: nn.LSTM(12, 10, batch_first=True),
        head=lambda: nn.Linear(10, 3),
    )


def set_reset_first(proto: onnx.ModelProto) -> None:
    """Set linear_before_reset to the default of ONNX, which differs from PyTorch."""
    for attribute in nets.find_node(proto, "GRU").attribute:
        if attribute.name == "linear_before_reset":
            attribute.i = 0


def change_bias(proto: onnx.ModelProto) -> None:
    change_weight(proto, nets.find_node(proto, "GRU").input[3], change_middle)


@pytest.mark.further
@pytest.mark.parametrize(
    ("spoil", "text"), [(set_reset_first, "linear_before_reset"), (change_bias, "gru.bias_")]
)
def test_consecutive_recurrent_layers(tmp_path, spoil, text):
    series = SEQUENCES["x"]
    candidate = nets.export(make_recurrent().eval(), tmp_path / "m.onnx", series)
    reported = localize_file(make_recurrent().eval(), candidate, series, edit=spoil)
    assert reported.first_divergence == "gru"
    assert list_titles(reported, "source") == ["gru"]
    assert text in reported.fault
