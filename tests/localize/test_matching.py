"""Tensors are matched with values despite near-identity layers, unused outputs and misleading
names.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gate.localize.value_matching import difference
from tests.localize import nets
from tests.localize.nets import (
    VECTORS,
    Exporter,
    change_middle,
    change_weight,
    edit_weight,
    find_node,
    layer_rows,
    list_titles,
    localize_file,
)
from tests.modules import Function, Layers

SEQUENCES = np.random.default_rng(0).normal(size=(6, 7, 6)).astype(np.float32)
NAN, INF = math.nan, math.inf


class TestNearIdentityLayers:
    """Layers that return nearly their input are not confused with the layers around them."""

    @pytest.mark.parametrize(
        ("by", "nearly"),
        [("direct", nn.BatchNorm1d(5)), ("traced", nn.ELU()), ("scripted", nn.ReLU())],
    )
    def test_fault_before_a_near_identity_layer(self, tmp_path, by, nearly):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nearly, nn.Linear(5, 2)).eval()
        nn.init.constant_(model[0].bias, 9.0)  # so that no value is below zero
        candidate = nets.export(model, tmp_path / "m.onnx", VECTORS, by=by)
        assert not localize_file(model, candidate, VECTORS).diverges
        reported = localize_file(model, candidate, VECTORS, edit=edit_weight("0.weight"))
        assert (reported.first_divergence, list_titles(reported, "source")) == ("0", ["0"])
        assert reported.unmapped == ()
        assert "Gemm" in layer_rows(reported)["0"].tensor

    def test_fault_in_a_near_identity_layer(self, tmp_path):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).eval()
        nn.init.constant_(model[1].weight, 1.01)
        candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
        assert list_titles(
            localize_file(model, candidate, VECTORS, edit=edit_weight("1.weight")),
            "source",
        ) == ["1"]


def make_clamped() -> nn.Module:
    """Return a layer called twice, with a clamp between the calls that changes nothing."""
    return Layers(lambda m, x: m.twice(m.twice(x).clamp(-99, 99)), twice=lambda: nn.Linear(6, 6))


def test_unchanged_result_gets_no_tensor_of_earlier_code(tmp_path):
    """A module returns an unchanged value, and its code computes another tensor of that shape."""
    first = Layers(
        lambda m, x: m.dropout(m.linear((3 * x).tanh().flip(-1).to(x.dtype))) / 1.0,
        linear=lambda: nn.Linear(6, 6),
        dropout=nn.Dropout,
    )
    model = Layers(
        lambda m, x: m.last(m.first(x) + x), first=lambda: first, last=lambda: nn.Linear(6, 3)
    ).eval()
    candidate = nets.export(model, tmp_path / "m.onnx", SEQUENCES)
    record = localize_file(model, candidate, SEQUENCES, edit=edit_weight("last.bias"))
    assert list_titles(record, "source") == ["last"]
    assert "/first/linear/" in layer_rows(record)["first.linear"].tensor


@pytest.mark.parametrize("by", ["direct", "dynamo"])
def test_pass_through_of_a_wrong_value_is_not_the_source(tmp_path, by: Exporter):
    """Name the layer, not the clamp that passes its wrong value on.

    In the cut run the clamp's output is exact, because its input is replaced by the reference.
    """
    model = make_clamped().eval()
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS, by=by)
    record = localize_file(
        model,
        candidate,
        VECTORS,
        edit=edit_weight("twice.weight", lambda w: np.float32(1.0002) * w),
    )
    assert (record.first_divergence, record.fault_code) == ("twice", "weights")
    assert {row.module for row in record.layers if row.verdict == "source"} == {"twice"}


def make_first_token() -> nn.Module:
    """Return a model that adds the embedding of token 0, an index computed as a product with
    zero.
    """
    return Layers(
        lambda m, x: m.head(m.embed(x[:, 0].long() * 0) + x),
        embed=lambda: nn.Embedding(4, 6),
        head=lambda: nn.Linear(6, 3),
    )


@pytest.mark.further
@pytest.mark.parametrize("by", ["direct", "dynamo"])
def test_integers_equal_on_the_first_samples_only(tmp_path, by: Exporter):
    model = make_first_token().eval()
    inputs = VECTORS.copy()
    inputs[:, 0] = [0.1, 0.2, 1.5, 2.5, -3.5, 4.5]
    candidate = nets.export(model, tmp_path / "m.onnx", inputs, by=by)
    assert not localize_file(model, candidate, inputs).diverges
    record = localize_file(model, candidate, inputs, edit=edit_weight("head.weight"))
    assert (record.first_divergence, list_titles(record, "source")) == ("head", ["head"])


class Recurrent(nn.Module):
    """Two bidirectional recurrent layers whose final states are not used."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.memory = kind(6, 5, batch_first=True, num_layers=2, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        y, _ = self.memory(x)
        return self.head(y[:, -1])


def make_halves() -> nn.Module:
    return Function(lambda x: (x[:, :3] * 2, x[:, 3:] * 3))


def make_split() -> nn.Module:
    """Return a module with two outputs, both of which are used."""
    return Layers(
        lambda m, x: m.left((pair := m.halves(x))[0]) * m.right(pair[1]),
        halves=make_halves,
        left=lambda: nn.Linear(3, 4),
        right=lambda: nn.Linear(3, 4),
    )


class TestSeveralOutputs:
    @pytest.mark.parametrize(("kind", "by"), [(nn.LSTM, "direct"), (nn.GRU, "scripted")])
    def test_unused_output_of_a_module_is_ignored(self, tmp_path, kind, by):
        model = Recurrent(kind).eval()
        candidate = nets.export(model, tmp_path / "m.onnx", SEQUENCES, by=by)
        reported = localize_file(model, candidate, SEQUENCES)
        assert not reported.diverges
        assert {row.verdict for row in reported.layers} == {"ok"}
        assert [row.kind for row in reported.layers if row.module == "memory"] == [kind.__name__]

        def change_head(proto: onnx.ModelProto) -> None:
            change_weight(proto, "head.bias", change_middle)

        reported = localize_file(model, candidate, SEQUENCES, edit=change_head)
        assert list_titles(reported, "source") == ["head"]

    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
    def test_fault_in_a_module_with_several_outputs(self, tmp_path, kind):
        model = Recurrent(kind).eval()
        candidate = nets.export(model, tmp_path / "m.onnx", SEQUENCES)

        def scale_weight(proto: onnx.ModelProto) -> None:
            change_weight(
                proto, find_node(proto, kind.__name__).input[1], lambda w: w * np.float32(1.1)
            )

        reported = localize_file(model, candidate, SEQUENCES, edit=scale_weight)
        assert reported.first_divergence == "memory"
        assert set(list_titles(reported, "source")) == {"memory"}

    @pytest.mark.parametrize("place", [0, 1])
    def test_fault_in_one_of_two_outputs(self, tmp_path, place):
        model = make_split().eval()
        candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
        assert not localize_file(model, candidate, VECTORS).diverges

        def replace_operator(proto: onnx.ModelProto) -> None:
            find_node(proto, "Mul", place).op_type = "Sub"

        reported = localize_file(model, candidate, VECTORS, edit=replace_operator)
        assert list_titles(reported, "source") == ["halves"]
        assert [row.verdict for row in reported.layers[:2]].count("ok") == 1

    @pytest.mark.parametrize(
        ("place", "behind", "several"), [(0, nn.Identity, False), (1, nn.Dropout, True)]
    )
    def test_fault_in_a_returned_output(self, tmp_path, place, behind, several):
        model = Returned(behind() if several else None).eval()
        candidate = nets.export(model, tmp_path / "m.onnx", VECTORS, outputs=("one", "two"))
        assert not localize_file(model, candidate, VECTORS).diverges

        def replace_operator(proto: onnx.ModelProto) -> None:
            find_node(proto, "Mul", place).op_type = "Sub"

        reported = localize_file(model, candidate, VECTORS, edit=replace_operator)
        assert reported.first_divergence == "halves"
        assert list_titles(reported, "source") == ["halves"]


class Returned(nn.Module):
    """Two outputs of a module, returned directly or through a pass-through module."""

    def __init__(self, pass_through: nn.Module | None) -> None:
        super().__init__()
        self.halves, self.pass_through = make_halves(), pass_through

    def forward(self, x):
        left, right = self.halves(x)
        return (
            (self.pass_through(left), self.pass_through(right))
            if self.pass_through
            else (left, right)
        )


class TestNames:
    """Node names help matching, but are not trusted."""

    @pytest.mark.parametrize("rename", ["", "node{}", "/0/Gemm_{}", "/stranger/Relu_{}"])
    def test_misleading_node_names(self, tmp_path, rename):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh()).eval()
        candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)

        def rename_nodes(proto: onnx.ModelProto) -> None:
            for index, item in enumerate(proto.graph.node):
                item.name = rename.format(index)

        reported = localize_file(model, candidate, VECTORS, edit=rename_nodes)
        assert list(layer_rows(reported)) == ["0", "1", "2", "3"]
        assert not reported.diverges

        def rename_and_change(proto: onnx.ModelProto) -> None:
            rename_nodes(proto)
            change_weight(proto, "2.weight", change_middle)

        reported = localize_file(model, candidate, VECTORS, edit=rename_and_change)
        assert list_titles(reported, "source") == ["2"]


@pytest.mark.parametrize(("value", "tensor", "want"), [
    ([3.0, 4.0], [3.0, 4.0], 0.0),
    ([3.0, 4.0], [3.0, 4.5], 0.1),
    ([0.0, 0.0], [0.0, 0.0], 0.0),
    ([0.0, 0.0], [0.0, 1.0], INF),
    ([NAN, 4.0], [NAN, 4.0], 0.0),
    ([NAN, 4.0], [NAN, 5.0], 0.25),
    ([NAN, 4.0], [4.0, NAN], INF),
    ([INF, 4.0], [-INF, 4.0], INF),
    ([NAN], [NAN], 0.0),
    ([], [], 0.0),
    ([True, False], [True, False], 0.0),
])  # fmt: skip
def test_relative_difference(value, tensor, want):
    assert difference(np.array(value), np.array(tensor)) == pytest.approx(want)


@given(
    st.lists(st.floats(-1e3, 1e3).filter(lambda number: abs(number) > 1e-3), min_size=1), st.data()
)
def test_relative_difference_does_not_depend_on_scale(value, data):
    scale = data.draw(st.sampled_from([1e-6, 1.0, 1e6]))
    array = np.array(value)
    shifted = array + data.draw(st.floats(0.01, 1.0))
    assert difference(array * scale, shifted * scale) == pytest.approx(difference(array, shifted))


class Packed(nn.Module):
    """An LSTM over sequences (n, 7, 6) of different lengths, sorted for it and back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        lengths = (x[:, 0] > 0).sum(1) + 1
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], True, total_length=7)
        return self.head(padded.sum(1))


def test_values_that_are_equal_on_the_first_batch_only_are_not_blamed(tmp_path):
    lengths = (SEQUENCES[:, 0] > 0).sum(1)
    inputs = SEQUENCES[[lengths.argmax(), *range(6)]]  # The first two are sorted by length.
    candidate = nets.export(Packed().eval(), tmp_path / "m.onnx", SEQUENCES)
    reported = localize_file(Packed().eval(), candidate, inputs, edit=edit_weight("head.weight"))
    assert (reported.first_divergence, list_titles(reported, "source")) == ("head", ["head"])
