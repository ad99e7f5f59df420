"""`gate.check` names the layer and the cause of faults that no attribute of a node shows."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

from tests.localize import nets
from tests.localize.nets import (
    PICTURES,
    VECTORS,
    Edit,
    check,
    edit_attributes,
    find_node,
    first_detail,
    remove_node,
)
from tests.modules import Layers

SEQUENCES = np.random.default_rng(3).normal(size=(6, 5, 6)).astype(np.float32)


def make_recurrent(kind: type[nn.RNNBase], directions: int = 1) -> nn.Module:
    """Return a recurrent module with learned initial states, between two linear layers."""

    def compute(m, x):
        states = [s.expand(-1, x.shape[0], -1).contiguous() for s in (m.h, m.c)]
        return m.head(m.rnn(m.first(x), tuple(states) if kind is nn.LSTM else states[0])[0])

    return Layers(
        compute,
        first=lambda: nn.Linear(6, 6),
        rnn=lambda: kind(6, 4, batch_first=True, bidirectional=directions == 2),
        head=lambda: nn.Linear(4 * directions, 3),
        h=lambda: nn.Parameter(torch.randn(directions, 1, 4)),
        c=lambda: nn.Parameter(torch.randn(directions, 1, 4)),
    )


def drop_inputs(*indices: int) -> Edit:
    def spoil(proto: onnx.ModelProto) -> None:
        node = next(node for node in proto.graph.node if node.op_type in ("GRU", "LSTM"))
        for index in indices:
            node.input[index] = ""
        while not node.input[-1]:
            del node.input[-1]

    return spoil


@pytest.mark.parametrize("by", ["direct", "dynamo"])
@pytest.mark.parametrize(
    ("kind", "directions", "lost", "states"),
    [
        (nn.GRU, 1, (5,), "the initial state h_0"),
        (nn.LSTM, 2, (5, 6), "the initial state h_0 and the initial state c_0"),
        (nn.LSTM, 1, (6,), "the initial state c_0"),
    ],
)
def test_lost_initial_state_is_named(tmp_path, by, kind, directions, lost, states):
    model = make_recurrent(kind, directions)
    record = check(tmp_path, model, SEQUENCES, drop_inputs(*lost), by=by)
    module, code, detail = first_detail(record)
    assert (module, code) == ("rnn", "settings")
    assert detail == {"code": "lost_input", "setting": states}
    assert [fault.module for fault in record.faults] == ["rnn"]


def exchange_states(proto: onnx.ModelProto) -> None:
    node = find_node(proto, "LSTM")
    output, hidden, cell = [*node.output, "", ""][:3]
    del node.output[:]
    node.output.extend([output, cell or "cell", hidden or "hidden"])


def exchange_directions(proto: onnx.ModelProto) -> None:
    node = find_node(proto, "LSTM")
    output, node.output[0] = node.output[0], "directions"
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1, 0]), "order"))
    turned = helper.make_node("Gather", ["directions", "order"], [output], axis=1)
    proto.graph.node.insert(list(proto.graph.node).index(node) + 1, turned)


def last_state(m, x):
    return m.head(m.rnn(m.first(x))[1][0][-1])


@pytest.mark.parametrize("by", ["direct", "dynamo"])
@pytest.mark.parametrize(
    ("compute", "spoil", "expected"),
    [
        (
            last_state,
            exchange_states,
            ("", {"code": "exchanged_outputs", "setting": "rnn", "got": 3, "want": 2}),
        ),
        (
            lambda m, x: m.head(m.rnn(m.first(x))[0]),
            exchange_directions,
            (
                "rnn",
                {
                    "code": "reordered_values",
                    "setting": "axis 2",
                    "order": "4, 5, 6, 7, 0, 1, 2, 3",
                },
            ),
        ),
    ],
)
def test_exchanged_outputs_are_named(tmp_path, by, compute, spoil, expected):
    both = spoil is exchange_directions
    model = Layers(
        compute,
        first=lambda: nn.Linear(6, 6),
        rnn=lambda: nn.LSTM(6, 4, batch_first=True, bidirectional=both),
        head=lambda: nn.Linear(8 if both else 4, 3),
    )
    module, code, detail = first_detail(check(tmp_path, model, SEQUENCES, spoil, by=by))
    assert ((module, detail), code) == (expected, "settings")


def test_halves_that_code_exchanges_are_named(tmp_path):
    def exchange(proto: onnx.ModelProto) -> None:
        node = find_node(proto, "MatMul", 1)
        proto.graph.initializer.append(numpy_helper.from_array(np.array([2, 3, 0, 1]), "order"))
        turned = helper.make_node("Gather", [node.input[0], "order"], ["turned"], axis=2)
        proto.graph.node.insert(list(proto.graph.node).index(node), turned)
        node.input[0] = "turned"

    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    module, code, detail = first_detail(check(tmp_path, model, SEQUENCES, exchange))
    assert (module, code) == ("1", "settings")
    assert (detail["code"], detail["how"]) == ("reordered_input", "with exchanged halves")


def make_attention(mask) -> nn.Module:
    """Return attention of one head on (n, 5, 6); `mask` adds it to the (n, 5, 5) scores."""

    def compute(m, x):
        q, k, v = m.qkv(m.norm(m.first(x))).chunk(3, dim=-1)
        return m.head(m.proj(mask(q @ k.transpose(1, 2)).softmax(-1) @ v))

    return Layers(
        compute,
        first=lambda: nn.Linear(6, 8),
        norm=lambda: nn.LayerNorm(8),
        qkv=lambda: nn.Linear(8, 24),
        proj=lambda: nn.Linear(8, 8),
        head=lambda: nn.Linear(8, 3),
    )


def add_mask(scores):
    return scores + torch.full((5, 5), -1e9).triu(1)


def fill_mask(scores):
    size = scores.shape[-1]
    return scores.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), -1e9)


def move_diagonal(proto: onnx.ModelProto) -> None:
    """Move the diagonal of the mask by one, in a node Trilu or in the constant."""
    for node in proto.graph.node:
        if node.op_type == "Trilu":
            proto.graph.initializer.append(numpy_helper.from_array(np.array(2), "moved"))
            node.input[1] = "moved"
            return
    tensors = [*proto.graph.initializer]
    tensors += [a.t for n in proto.graph.node if n.op_type == "Constant" for a in n.attribute]
    tensor = next(tensor for tensor in tensors if list(tensor.dims)[-2:] == [5, 5])
    mask = numpy_helper.to_array(tensor)
    moved = np.concatenate([mask[..., 1:, :], mask[..., -1:, :]], axis=-2)
    tensor.CopyFrom(numpy_helper.from_array(moved, tensor.name))


@pytest.mark.parametrize("by", ["direct", "dynamo"])
@pytest.mark.parametrize("mask", [add_mask, fill_mask])
def test_moved_diagonal_of_a_mask_is_named(tmp_path, by, mask):
    record = check(tmp_path, make_attention(mask), SEQUENCES, move_diagonal, by=by)
    module, code, detail = first_detail(record)
    assert (module, code, detail["code"]) == ("", "settings", "right_with")
    assert int(detail["got"]) - int(detail["want"]) == 1


def make_channels_last() -> nn.Module:
    """Return a LayerNorm over the channels of pictures, as in ConvNeXt."""

    class Norm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    model = Layers(
        lambda m, x: m.head(m.point(m.norm(m.conv(x))).amax((2, 3))),
        conv=lambda: nn.Conv2d(3, 8, 3, padding=1),
        norm=lambda: Norm(8),
        point=lambda: nn.Conv2d(8, 8, 1),
        head=lambda: nn.Linear(8, 3),
    )
    return nets.randomize(model)


def drop_transpositions(proto: onnx.ModelProto) -> None:
    for index in (0, 1):
        edit_attributes("Transpose", index, perm=[0, 1, 2, 3])(proto)


def reduce_rows(proto: onnx.ModelProto) -> None:
    for index in (0, 1):
        edit_attributes("ReduceMean", index, axes=[2])(proto)


@pytest.mark.parametrize(
    ("spoil", "opset", "setting"),
    [
        (drop_transpositions, 17, "perm of 2 nodes Transpose"),
        (reduce_rows, 14, "axes of 2 nodes ReduceMean"),
    ],
)
def test_axes_of_several_nodes_of_a_norm_are_named(tmp_path, spoil, opset, setting):
    record = check(tmp_path, make_channels_last(), PICTURES, spoil, opset_version=opset)
    module, code, detail = first_detail(record)
    assert (module, code) == ("norm", "settings")
    assert (detail["code"], detail["setting"]) == ("right_with", setting)


@pytest.mark.parametrize("by", ["direct", "dynamo"])
@pytest.mark.parametrize("call", [0, 1])
def test_call_of_a_shared_module_is_named(tmp_path, by, call):
    def spoil(proto: onnx.ModelProto) -> None:
        node = find_node(proto, "Gemm", call)
        weight = numpy_helper.to_array(nets.find_weight(proto, node.input[1]))
        proto.graph.initializer.append(numpy_helper.from_array(weight * np.float32(1.1), "other"))
        node.input[1] = "other"

    model = Layers(
        lambda m, x: m.head(m.twice(m.twice(x).tanh()).tanh()),
        twice=lambda: nn.Linear(6, 6),
        head=lambda: nn.Linear(6, 3),
    )
    record = check(tmp_path, model, VECTORS, spoil, by=by)
    assert (record.first_divergence, record.fault_code) == ("twice", "weights")
    assert (record.fault_params["call"], record.fault_params["calls"]) == (call + 1, 2)
    assert f"call {call + 1} of 2" in record.fault


@pytest.mark.parametrize("by", ["direct", "dynamo"])
def test_lost_code_is_no_fault_of_later_layers(tmp_path, by):
    def spoil(proto: onnx.ModelProto) -> None:
        remove_node("Relu")(proto)
        edit_attributes("LayerNormalization", 0, epsilon=0.1)(proto)

    model = Layers(
        lambda m, x: m.head(m.act(m.third(m.norm(m.second(m.first(x).relu()))))),
        first=lambda: nn.Linear(6, 8),
        second=lambda: nn.Linear(8, 8),
        norm=lambda: nn.LayerNorm(8),
        third=lambda: nn.Linear(8, 8),
        act=nn.GELU,
        head=lambda: nn.Linear(8, 3),
    )
    record = check(tmp_path, model, VECTORS, spoil, by=by)
    faults = [(fault.module, fault.code) for fault in record.faults]
    assert faults == [("", "code"), ("norm", "settings")]
