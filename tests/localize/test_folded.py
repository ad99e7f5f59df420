"""Modules folded or fused into others have no tensor and are not named as sources."""

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
from tests.localize.nets import IMAGES, VECTORS, change, found, middle, verdicts
from tests.measure import tiny

SEQUENCES = {
    "x": np.random.default_rng(4).normal(size=(4, 5, 16)).astype(np.float32),
    "mask": np.tril(np.ones((4, 5), np.int64), 2),
}


class Pair(nn.Module):
    """Two linear layers without anything between them, then others."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.approximate = approximate

    def forward(self, x):
        y = self.norm(self.joined(x)) + x
        return self.head(functional.gelu(2 * y, approximate=self.approximate))

    def joined(self, x):
        return self.second(self.first(x))


class Folded(Pair):
    """The same with one layer for the two."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__(approximate)
        first, two = self.first.double(), self.second.double()
        self.both = nn.Linear(6, 6)
        self.both.weight.data = (two.weight @ first.weight).float().data
        self.both.bias.data = (two.weight @ first.bias + two.bias).float().data

    def joined(self, x):
        return self.both(x)


class Normed(nn.BatchNorm2d):
    """A subclass of the user's."""

    def forward(self, x):
        return super().forward(x)


class Scaled(nn.BatchNorm2d):
    """A subclass that computes more, which is folded too."""

    def forward(self, x):
        return super().forward(x) * 1.5


class Images(nn.Module):
    """Convolution and norm, code that is no module, a head."""

    def __init__(self, norm: type[nn.BatchNorm2d] = Normed, slope: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), norm(4)
        self.head = nn.Linear(4, 3)
        self.slope = slope

    def forward(self, x):
        y = functional.leaky_relu(self.norm(self.conv(x)), self.slope)
        return self.head(y.mean((2, 3)))


class Encoder(nn.Module):
    """A layer of BERT, as the transformer optimizer of ONNX Runtime fuses it."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.norm0, self.norm1, self.norm2 = (nn.LayerNorm(16) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.head = nn.Linear(16, 3)
        self.scale = scale

    def forward(self, x, mask):
        return self.head(self.encoded(self.norm0(x), mask)[:, 0])

    def encoded(self, x, mask):
        q, k, v = (self.heads(part) for part in self.projected(x))
        weights = q @ k.transpose(-1, -2) / self.scale
        weights = weights + (1.0 - mask[:, None, None, :].to(torch.float32)) * -10000.0
        y = (weights.softmax(-1) @ v).permute(0, 2, 1, 3).contiguous()
        y = y.view(y.shape[0], y.shape[1], 16)
        x = self.norm1(self.out(y) + x)
        return self.norm2(self.down(functional.gelu(self.up(x))) + x)

    def projected(self, x):
        return self.query(x), self.key(x), self.value(x)

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], 4, 4).permute(0, 2, 1, 3)


class Packed(Encoder):
    """The same with one product for query, key and value, as other exporters write it."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__(scale)
        parts = (self.query, self.key, self.value)
        self.qkv = nn.Linear(16, 48)
        self.qkv.weight.data = torch.cat([part.weight.data for part in parts])
        self.qkv.bias.data = torch.cat([part.bias.data for part in parts])

    def projected(self, x):
        return self.qkv(x).chunk(3, -1)


class Layer(Encoder):
    """The same without a head."""

    def forward(self, x, mask):
        return self.encoded(x, mask)


class Stack(nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Layer(), Layer(), nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)

    def forward(self, x, mask):
        return self.head(self.second(self.first(self.norm(x), mask), mask)[:, 0])


def trained(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def compare(model, other, path, inputs, **how):
    """What is found in the file of the other model."""
    return found(trained(model), nets.export(trained(other), path, inputs, **how), inputs)


def code_sources(record: Localization) -> list[str]:
    """Operators of the code that is a source."""
    return [
        row.kind for row in record.layers if row.verdict == "source" and row.kind.startswith("code")
    ]


@pytest.mark.rows(2)
@pytest.mark.parametrize("by", ["direct", "dynamo"])
def test_two_folded_linear_layers(tmp_path, by):
    right = compare(Pair(), Folded(), tmp_path / "right.onnx", VECTORS, by=by)
    assert not right.diverges
    assert right.unmapped == ("first",)
    wrong = compare(Pair(), Folded("tanh"), tmp_path / "wrong.onnx", VECTORS, by=by)
    assert wrong.first_divergence == ""
    assert len(code_sources(wrong)) == len(verdicts(wrong, "source")) == 1
    assert "Tanh" in code_sources(wrong)[0]


@pytest.mark.parametrize("name", ["both.weight", "both.bias"])
def test_wrong_folded_layer_is_named_by_its_tensor(tmp_path, name):
    candidate = nets.export(trained(Folded()), tmp_path / "m.onnx", VECTORS)
    bad = tiny.edit(candidate, tmp_path / "bad.onnx", lambda p: change(p, name, middle))
    reported = found(trained(Pair()), bad, VECTORS)
    assert reported.first_divergence == "second"
    assert verdicts(reported, "source") == ["second"]
    assert "differs from" not in reported.cause  # neither weight is there to be compared
    assert "first" in reported.cause


@pytest.mark.further
@pytest.mark.parametrize(("norm", "by"), [(Normed, "direct"), (Scaled, "dynamo")])
def test_folded_subclass_of_batch_norm(tmp_path, norm, by):
    right = compare(Images(norm), Images(norm), tmp_path / "right.onnx", IMAGES, by=by)
    assert not right.diverges
    wrong = compare(Images(norm), Images(norm, 0.3), tmp_path / "wrong.onnx", IMAGES, by=by)
    assert wrong.first_divergence == ""
    assert code_sources(wrong) == ["code: LeakyRelu, ReduceMean"]
    assert verdicts(wrong, "source") == ["(model)"]


def fuse(model: nn.Module, path: Path) -> TestedFile:
    """The file after the transformer optimizer of ONNX Runtime."""
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
    """Add `amount` to a number of query, key or value in the packed weight, or bias (2)."""

    def add(values: np.ndarray) -> np.ndarray:
        row = values[3] if argument == 1 else values
        row[16 * ("query", "key", "value").index(part) + 5] += amount
        return values

    def spoil(proto: onnx.ModelProto) -> None:
        change(proto, nets.node(proto, "Attention", layer).input[argument], add)

    return spoil


def change_private_copy(proto: onnx.ModelProto, node: onnx.NodeProto, argument: int) -> None:
    """Change a constant that other nodes read too, for this node alone."""
    constant = onnx.numpy_helper.to_array(nets.weight(proto, node.input[argument]))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(constant + 0.1, "another"))
    node.input[argument] = "another"


FAULTS = {
    "down": lambda proto: change(
        proto, nets.node(proto, "SkipLayerNormalization", 1).input[4], middle
    ),
    "head": lambda proto: change(proto, "head.bias", middle),
    "norm1": lambda proto: change_private_copy(
        proto, nets.node(proto, "SkipLayerNormalization"), 3
    ),
}


def drop_mask(proto: onnx.ModelProto) -> None:
    """An optimizer that drops the mask."""
    nets.node(proto, "Attention").input[3] = ""


class TestFusedAttention:
    def test_correct_fused_attention_has_no_fault(self, fused_file):
        reported = found(Encoder().eval(), fused_file, SEQUENCES)
        assert not reported.diverges
        assert {"query", "key", "value"} <= set(reported.unmapped)

    @pytest.mark.parametrize("source", FAULTS)
    def test_fault_behind_fused_attention(self, fused_file, tmp_path, source):
        bad = tiny.edit(fused_file, tmp_path / "bad.onnx", FAULTS[source])
        reported = found(Encoder().eval(), bad, SEQUENCES)
        assert reported.first_divergence == source
        assert verdicts(reported, "source") == [source]

    def test_missing_mask_of_fused_attention(self, fused_file, tmp_path):
        reported = found(Encoder(4.0).eval(), fused_file, SEQUENCES)
        assert reported.first_divergence not in ("query", "key", "value")
        assert len(verdicts(reported, "source")) == 1
        reported = found(
            Encoder().eval(), tiny.edit(fused_file, tmp_path / "m.onnx", drop_mask), SEQUENCES
        )
        assert reported.first_divergence not in ("query", "key", "value")
        assert len(verdicts(reported, "source")) == 1

    @pytest.mark.rows(2)
    @pytest.mark.parametrize(
        ("part", "argument", "amount"),
        [
            ("query", 2, 0.05), ("key", 1, 0.05), ("value", 2, 0.3), ("key", 1, 1.0),
        ],
    )  # fmt: skip
    def test_wrong_number_in_packed_attention_weights(
        self, fused_file, tmp_path, part, argument, amount
    ):
        """A small one leaves the outputs nearly equal, behind layers that are farther off."""
        spoil = change_packed(part, amount, argument=argument)
        reported = found(
            Encoder().eval(), tiny.edit(fused_file, tmp_path / "bad.onnx", spoil), SEQUENCES
        )
        assert [fault.module for fault in reported.faults] == [part]
        assert f"{part}.{'weight' if argument == 1 else 'bias'}" in reported.fault

    def test_equal_bias_of_all_keys_has_no_effect(self, fused_file, tmp_path):
        """It adds the same to all scores of a query."""
        bad = tiny.edit(fused_file, tmp_path / "m.onnx", change_packed("key", 0.5, argument=2))
        assert not found(Encoder().eval(), bad, SEQUENCES).diverges

    def test_packed_attention_projection(self, tmp_path):
        right = tiny.export(Packed(), tmp_path / "right.onnx", example=SEQUENCES)
        assert not found(Encoder().eval(), right, SEQUENCES).diverges
        wrong = tiny.export(Packed(4.0), tmp_path / "wrong.onnx", example=SEQUENCES)
        reported = found(Encoder().eval(), wrong, SEQUENCES)
        assert reported.first_divergence not in ("query", "key", "value")
        assert len(verdicts(reported, "source")) == 1


def test_wrong_weight_behind_a_folded_layer_is_found(tmp_path):
    """The weight has no name in the file, and no element of it is the model's."""
    inputs = VECTORS[:, None, :]
    candidate = nets.export(trained(Folded()), tmp_path / "m.onnx", inputs)

    def spoil(proto: onnx.ModelProto) -> None:
        (*_, last) = (item for item in proto.graph.node if item.op_type == "MatMul")
        change(proto, last.input[1], lambda values: values * np.float32(1.1))

    reported = found(trained(Pair()), tiny.edit(candidate, tmp_path / "bad.onnx", spoil), inputs)
    assert reported.first_divergence == "head"
    assert reported.fault.startswith("head.weight")


class Levels(nn.Module):
    """Two layers that read the same value, joined by `join`."""

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
        joined = pair[0] + pair[1] if self.join == "add" else torch.cat(pair, 1)
        return self.head(joined.mean((2, 3)))


@pytest.mark.parametrize(("join", "by"), [("add", "direct"), ("cat", "dynamo")])
def test_merged_equal_layers_are_named(tmp_path, join, by):
    """Exporters write equal operators on equal inputs once."""
    model, second = Levels(nn.ELU(), join), Levels(nn.Tanh(), join)
    for item in (model, second):
        item(torch.from_numpy(IMAGES))
    second.load_state_dict(model.state_dict())
    reported = compare(model, second, tmp_path / "m.onnx", IMAGES, by=by)
    assert reported.first_divergence == "first"
    assert verdicts(reported, "source") == ["first"]


class Recurrent(nn.Module):
    """A GRU, whose last axis order exporters join with that of the LSTM behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru = nn.GRU(16, 6, batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(12, 10, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(self.lstm(self.gru(x)[0])[0][:, -1])


def set_reset_first(proto: onnx.ModelProto) -> None:
    """ONNX's default for a GRU, not PyTorch's."""
    for attribute in nets.node(proto, "GRU").attribute:
        if attribute.name == "linear_before_reset":
            attribute.i = 0


def change_bias(proto: onnx.ModelProto) -> None:
    change(proto, nets.node(proto, "GRU").input[3], middle)


@pytest.mark.further
@pytest.mark.parametrize(
    ("spoil", "text"), [(set_reset_first, "linear_before_reset"), (change_bias, "gru.bias_")]
)
def test_consecutive_recurrent_layers(tmp_path, spoil, text):
    series = SEQUENCES["x"]
    candidate = nets.export(Recurrent().eval(), tmp_path / "m.onnx", series)
    reported = found(Recurrent().eval(), tiny.edit(candidate, tmp_path / "bad.onnx", spoil), series)
    assert reported.first_divergence == "gru"
    assert verdicts(reported, "source") == ["gru"]
    assert text in reported.fault
