"""Node attributes are compared with module settings."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

from gate.localize.diagnosis import differing_settings, has_training_mode, mismatched_activation
from gate.summary.render import render_fault
from tests.localize import nets
from tests.localize.nets import VECTORS, list_titles, localize_file
from tests.measure import tiny
from tests.modules import Layers


def make_node(op: str, inputs: int = 1, **attributes: object):
    return helper.make_node(op, [f"i{index}" for index in range(inputs)], ["o"], **attributes)


WINDOW = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
EQUAL_SETTINGS = {
    "convolution": (nn.Conv2d(2, 2, 3, 2, 1), make_node("Conv", **WINDOW, dilations=[1, 1], group=1)),
    "defaults": (nn.Conv2d(2, 2, 3), make_node("Conv")),
    "one number for two": (nn.Conv2d(2, 2, 3, (2, 2)), make_node("Conv", strides=[2, 2])),
    "two paddings": (nn.Conv2d(2, 2, 3, padding=(1, 2)), make_node("Conv", pads=[1, 2, 1, 2])),
    "padding by name": (nn.Conv2d(2, 2, 3, padding="same"), make_node("Conv", pads=[1, 1, 1, 1])),
    "another mode of padding": (
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
        [make_node("Pad", mode="reflect"), make_node("Conv", pads=[0, 0, 0, 0])]),
    "pooling": (nn.MaxPool2d(3, 2, 1), make_node("MaxPool", **WINDOW, ceil_mode=0)),
    "average": (nn.AvgPool2d(2), make_node("AveragePool", kernel_shape=[2, 2], strides=[2, 2],
                                      count_include_pad=1)),
    "epsilon in float32": (nn.BatchNorm2d(3), make_node("BatchNormalization", epsilon=9.999999747e-06)),
    "a slope": (nn.LeakyReLU(0.2), make_node("LeakyRelu", alpha=0.2)),
    "by erf": (nn.GELU(), make_node("Gelu")),
    "no value": (nn.LPPool2d(3, 2), make_node("AveragePool", kernel_shape=[2, 2], strides=[2, 2])),
    "no such attribute": (nn.Identity(), make_node("Conv", strides=[5, 5])),
    "an operator without settings": (nn.ReLU(), make_node("Relu")),
    "no nodes": (nn.ReLU(), []),
}  # fmt: skip
DIFFERENT_SETTINGS = {
    "stride": (nn.Conv2d(2, 2, 3, 2), make_node("Conv", strides=[1, 1]),
               "strides is [1, 1] in the file, stride is (2, 2) in the model"),
    "default stride": (nn.Conv2d(2, 2, 3, 2), make_node("Conv"), "strides is 1 in the file"),
    "padding": (nn.Conv2d(2, 2, 3, padding=(1, 2)), make_node("Conv", pads=[1, 1, 1, 1]),
                "pads is [1, 1, 1, 1] in the file, padding is (1, 2)"),
    "groups": (nn.Conv2d(4, 4, 3, groups=2), make_node("Conv", group=4),
               "group is 4 in the file, groups is 2 in the model"),
    "transposed stride": (nn.ConvTranspose2d(2, 2, 3), make_node("ConvTranspose", strides=[2, 2]),
                          "strides is [2, 2] in the file"),
    "ceil mode": (nn.MaxPool2d(2, ceil_mode=True), make_node("MaxPool", kernel_shape=[2, 2],
                                                        strides=[2, 2], ceil_mode=0),
                  "ceil_mode is 0 in the file, ceil_mode is True in the model"),
    "padding in the mean": (nn.AvgPool2d(2, padding=1),
                            make_node("AveragePool", kernel_shape=[2, 2], strides=[2, 2],
                                 pads=[1, 1, 1, 1]),
                            "count_include_pad is 0 in the file, count_include_pad is True"),
    "epsilon": (nn.LayerNorm(4, eps=1e-6), make_node("LayerNormalization", epsilon=1e-5),
                "epsilon is 1e-05 in the file, eps is 1e-06 in the model"),
    "default epsilon": (nn.GroupNorm(1, 4, eps=1e-3), make_node("InstanceNormalization"),
                        "epsilon is 1e-05 in the file"),
    "slope": (nn.LeakyReLU(0.2), make_node("LeakyRelu"), "alpha is 0.01 in the file"),
    "tanh for erf": (nn.GELU(), make_node("Gelu", approximate="tanh"),
                     "approximate is tanh in the file, approximate is none in the model"),
    "erf for tanh": (nn.GELU("tanh"), make_node("Gelu", approximate="none"), "approximate is none"),
    "mode of padding": (nn.Conv2d(2, 2, 3, padding=1, padding_mode="replicate"),
                        [make_node("Pad", mode="reflect"), make_node("Conv")],
                        "padding mode is reflect in the file, padding_mode is replicate"),
    "no padding mode": (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
                        make_node("Conv", pads=[1, 1, 1, 1]),
                        "padding mode is constant in the file, padding_mode is circular"),
}  # fmt: skip


def norm_with_computed_input(op, index):
    """Return a norm and a node that computes one of its inputs."""
    norm = helper.make_node("BatchNormalization", [f"in{n}" for n in range(5)], ["y"])
    return [helper.make_node(op, ["x"], [f"in{index}"]), norm]


def as_list(nodes):
    return nodes if isinstance(nodes, list) else [nodes]


@pytest.mark.parametrize(("module", "nodes"), EQUAL_SETTINGS.values(), ids=EQUAL_SETTINGS)
def test_equal_settings_have_no_difference(module, nodes):
    assert list(differing_settings(module, as_list(nodes))) == []


@pytest.mark.parametrize(
    ("module", "nodes", "said"), DIFFERENT_SETTINGS.values(), ids=DIFFERENT_SETTINGS
)
def test_different_setting_is_described(module, nodes, said):
    (detail,) = differing_settings(module, as_list(nodes))
    assert said in render_fault("settings", {"details": [detail]}).text


@pytest.mark.parametrize(("nodes", "seen"), [
    ([make_node("BatchNormalization", 5, training_mode=1)], True),
    ([make_node("Relu"), make_node("Dropout", 3)], True),
    ([make_node("BatchNormalization", 5)], False),
    ([make_node("BatchNormalization", 5, training_mode=0)], False),
    ([make_node("Dropout", 2)], False),
    (norm_with_computed_input("ReduceMean", 3), True),
    (norm_with_computed_input("ReduceMean", 4), True),
    (norm_with_computed_input("Cast", 3), False),
    (norm_with_computed_input("ReduceMean", 1), False),
    ([], False),
])  # fmt: skip
def test_training_mode_of_nodes(nodes, seen):
    assert has_training_mode(nodes) is seen


def test_statistics_of_a_constant_are_no_training_mode():
    """A standardized weight is normalized by its own statistics."""
    nodes = [make_node("BatchNormalization", 5, training_mode=1)]
    assert not has_training_mode(nodes, lambda name: name == "i0")


TANH = [make_node(op) for op in ("Pow", "Mul", "Add", "Mul", "Tanh", "Add", "Mul", "Mul")]
ERF = [make_node("Constant"), *(make_node(op) for op in ("Div", "Erf", "Add", "Mul", "Mul"))]


@pytest.mark.parametrize(("module", "nodes", "function"), [
    (nn.Hardswish(), [make_node("Sigmoid"), make_node("Mul", 2)], "SiLU"),
    (nn.SiLU(), [make_node("Sigmoid"), make_node("Mul", 2)], None),
    (nn.SiLU(), [make_node("Mul"), make_node("Sigmoid"), make_node("Mul", 2)], None),
    (nn.ReLU6(), [make_node("Relu")], "ReLU"),
    (nn.GELU(), TANH, "GELU by tanh"),
    (nn.GELU("tanh"), TANH, None),
    (nn.GELU("tanh"), ERF, "GELU"),
    (nn.GELU(), ERF, None),
    (nn.LogSoftmax(1), [make_node("Softmax")], "Softmax"),
    (nn.Sequential(nn.Tanh()), [make_node("Sigmoid")], None),
    (nn.ReLU(), [], None),
])  # fmt: skip
def test_mismatched_activation(module, nodes, function):
    assert mismatched_activation(module, nodes) == function


def make_small_norm(eps: float) -> nn.Module:
    """Return a network with a LayerNorm whose second application changes nothing."""
    return Layers(
        lambda m, x: m.head(m.norm(0.3 * m.first(x))),
        first=lambda: nn.Linear(6, 32),
        norm=lambda: nn.LayerNorm(32, eps=eps),
        head=lambda: nn.Linear(32, 3),
    )


def test_wrong_epsilon_of_a_norm_is_named(tmp_path):
    candidate = nets.export(make_small_norm(1e-4).eval(), tmp_path / "m.onnx", VECTORS)
    reported = localize_file(make_small_norm(1e-5).eval(), candidate, VECTORS)
    assert reported.first_divergence == "norm"
    assert list_titles(reported, "source") == ["norm"]
    assert "epsilon" in reported.fault


class RootMeanSquare(nn.Module):
    """A norm of several operators; applied twice it changes nothing."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(32)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, True) + self.variance_epsilon)


def with_layer(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), layer, nn.ReLU(), nn.Linear(32, 3)).eval()


@pytest.mark.parametrize(("layer", "wrong", "value", "export"), [
    (RootMeanSquare(1e-6), RootMeanSquare(1e-3), "0.001", {"by": "dynamo"}),
    (nn.LayerNorm(32), nn.LayerNorm(32, eps=1e-3), "0.001", {"opset_version": 14}),
    (nn.Hardtanh(), nn.Hardtanh(max_val=0.9), "0.9", {}),
])  # fmt: skip
def test_an_idempotent_layer_with_another_constant_has_nodes(tmp_path, layer, wrong, value, export):
    candidate = nets.export(with_layer(wrong), tmp_path / "m.onnx", VECTORS, **export)
    reported = localize_file(with_layer(layer), candidate, VECTORS)
    assert list_titles(reported, "source") == ["1"]
    row = next(row for row in reported.layers if row.module == "1")
    assert (row.code, row.params["details"][0]["got"]) == ("settings", value)


def test_a_layer_behind_a_copy_of_its_input_has_nodes(tmp_path):
    class Copied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.second(self.first(x).relu()).relu())

    def spoil(proto):
        nets.change_weight(proto, "second.weight", lambda values: values.T)
        reader = nets.find_node(proto, "Gemm", 1)
        copy = onnx.helper.make_node("Identity", [reader.input[0]], ["copy"], name="/Identity")
        proto.graph.node.insert(list(proto.graph.node).index(reader), copy)
        reader.input[0] = "copy"

    model = Copied().eval()
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
    reported = localize_file(model, candidate, VECTORS, edit=spoil)
    assert (reported.first_divergence, reported.fault_code) == ("second", "weights")


class Grouped(nn.Module):
    """Modules and code with settings that no attribute of a node states: (n, 6) to (n, 4, 4)."""

    def __init__(
        self,
        groups: int = 4,
        heads: int = 4,
        dim: int = -1,
        gain: float = 1.5,
        *,
        turned: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 16), nn.GroupNorm(groups, 16)
        self.fold = nn.Unflatten(1, (4, 4))
        self.attention = nn.MultiheadAttention(4, heads, batch_first=True)
        self.softmax, self.gain, self.turned = nn.Softmax(dim), gain, turned
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.fold(self.norm(self.first(x)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.left(self.softmax(x) * self.gain)
        return self.right(x.transpose(1, 2) if self.turned else x)


@pytest.mark.parametrize("by", ["direct", "dynamo"])
@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("norm", "num_groups", 2),
        ("norm", "num_groups", 8),
        ("attention", "num_heads", 2),
        ("softmax", "dim", 1),
        ("", "gain", 2.5),
        ("", "turned", False),
    ],
)
def test_setting_that_no_node_states_is_found_by_a_run(tmp_path, by, module, name, value):
    model, wrong = Grouped().eval(), Grouped().eval()
    setattr(wrong.get_submodule(module), name, value)
    torch.backends.mha.set_fastpath_enabled(False)
    candidate = nets.export(wrong, tmp_path / "m.onnx", VECTORS, by=by)
    torch.backends.mha.set_fastpath_enabled(True)
    reported = localize_file(model, candidate, VECTORS)
    assert (reported.first_divergence, reported.fault_code) == (module, "settings")
    (detail,) = reported.fault_params["details"]
    full_name = f"{module}.{name}" if module else name
    assert (detail["setting"], detail["got"]) == (full_name, str(value))


@pytest.mark.parametrize(
    ("spoil", "module", "code", "setting"),
    [
        (lambda proto: nets.bypass(proto, proto.graph.node[-3]), "", "transposed_input", "left"),
        (
            nets.edit_attributes("Transpose", -1, perm=[0, 1, 2]),
            "",
            "right_with",
            "perm of Transpose",
        ),
        (nets.edit_attributes("Softmax", 0, axis=-2), "attention", "right_with", "axis of Softmax"),
    ],
)
def test_changed_axes_are_found_by_a_run(tmp_path, spoil, module, code, setting):
    class Plain(Grouped):
        def forward(self, x):
            x = self.fold(self.norm(self.first(x)))
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return self.right(self.left(x).transpose(1, 2))

    model = Plain().eval()
    torch.backends.mha.set_fastpath_enabled(False)
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
    torch.backends.mha.set_fastpath_enabled(True)
    reported = localize_file(model, candidate, VECTORS, edit=spoil)
    assert (reported.first_divergence, reported.fault_code) == (module, "settings")
    (detail,) = reported.fault_params["details"]
    assert (detail["code"], setting in detail["setting"]) == (code, True)


class Scaled(nn.Module):
    """A norm that PyTorch has no class for, so that the file computes it with several nodes."""

    def __init__(self, largest: float = 2.0) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, largest, 8))

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True) * self.gamma


class NormedQuery(nn.Module):
    """Attention with norms of query and key, and a sum with the input of the attention."""

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.first, self.both, self.last = nn.Linear(6, 8), nn.Linear(8, 16), nn.Linear(8, 3)
        self.q_norm, self.k_norm, self.act = Scaled(), Scaled(largest), nn.Tanh()

    def forward(self, x):
        x = self.act(self.first(x))
        q, k = self.both(x).split(8, dim=-1)
        return self.last(x + self.q_norm(q) * self.k_norm(k).exp())


def swap_halves(proto):
    split = nets.find_node(proto, "Split")
    split.output[0], split.output[1] = split.output[1], split.output[0]


def add_other(proto):
    """Let the sum add the first layer's output without the activation."""
    tanh = nets.find_node(proto, "Tanh")
    (total,) = [n for n in proto.graph.node if n.op_type == "Add" and tanh.output[0] in n.input]
    total.input[list(total.input).index(tanh.output[0])] = tanh.input[0]


@pytest.mark.parametrize("by", ["direct", "dynamo"])
@pytest.mark.parametrize(
    ("spoil", "largest", "code"),
    [
        (swap_halves, 3.0, "reads_instead"),
        (swap_halves, 2.0, "exchanged"),  # both norms are equal, so each has the other's tensor
        (add_other, 3.0, "reads_instead"),
    ],
)
def test_another_tensor_that_code_passes_on_is_found_by_a_run(tmp_path, by, spoil, largest, code):
    torch.manual_seed(0)
    model = NormedQuery(largest).eval()
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS, by=by)
    reported = localize_file(model, candidate, VECTORS, edit=spoil)
    assert (reported.first_divergence, reported.fault_code) == ("", "settings")
    (detail,) = reported.fault_params["details"]
    assert detail["code"] == code


class Stacked(nn.Module):
    """Two recurrent modules, the first with two layers, and an optional sum before the head."""

    def __init__(self, added: float = 0.0) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 5, num_layers=2, batch_first=True)
        self.lstm, self.head, self.added = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3), added

    def forward(self, x):
        y, _ = self.lstm(self.gru(x[:, None] * torch.linspace(-1, 1, 4)[:, None])[0])
        return self.head(y[:, -1] + self.added * y[:, -1].exp() if self.added else y[:, -1])


def swap_gates(proto):
    for gru in (node for node in proto.graph.node if node.op_type == "GRU"):
        nets.change_weight(proto, gru.input[2], lambda r: np.roll(r, 5, axis=1))


def clear_linear_before_reset(proto):
    for attribute in nets.find_node(proto, "GRU", 1).attribute:
        if attribute.name == "linear_before_reset":
            attribute.i = 0


@pytest.mark.parametrize(
    ("added", "spoil", "module", "code"),
    [
        (0.0, clear_linear_before_reset, "gru", "settings"),
        (0.0, swap_gates, "gru", "weights"),
        (0.01, None, "", "settings"),
    ],
)
def test_fault_is_in_the_module_before(tmp_path, added, spoil, module, code):
    torch.manual_seed(0)
    model, wrong = Stacked().eval(), Stacked(added).eval()
    wrong.load_state_dict(model.state_dict())
    candidate = nets.export(wrong, tmp_path / "m.onnx", VECTORS)
    if spoil is not None:
        proto = onnx.load(candidate.path)
        spoil(proto)
        onnx.save(proto, candidate.path)
        candidate = tiny.candidate(candidate.path)
    reported = localize_file(model, candidate, VECTORS)
    assert (reported.first_divergence, reported.fault_code) == (module, code)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (nn.LSTM, ["weight_hh_l0_reverse"]),
        (nn.GRU, ["bias_hh_l0_reverse"]),
        (nn.GRU, ["weight_ih_l0", "weight_ih_l0_reverse"]),
    ],
)
def test_another_weight_of_one_direction_is_named(tmp_path, kind, names):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.rnn = kind(6, 5, batch_first=True, bidirectional=True)
            self.head = nn.Linear(10, 3)

        def forward(self, x):
            return self.head(self.rnn(x[:, None] * torch.linspace(-1, 1, 4)[:, None])[0][:, 1])

    model, wrong = Both().eval(), Both().eval()
    with torch.no_grad():
        for name in names:
            getattr(wrong.rnn, name).add_(0.1).mul_(1.5)
    reported = localize_file(model, nets.export(wrong, tmp_path / "m.onnx", VECTORS), VECTORS)
    assert (reported.first_divergence, reported.fault_code) == ("rnn", "weights")
    named = [detail["name"] for detail in reported.fault_params["details"]]
    assert named == [f"rnn.{name}" for name in names]


def round_to_half(values):
    return values.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("layer", [0, 1])
def test_rounded_weight_of_one_of_several_layers_is_named(tmp_path, kind, layer):
    model = Layers(
        lambda m, x: m.rnn(x[:, None] * torch.linspace(-1, 1, 4)[:, None])[0],
        rnn=lambda: kind(6, 6, num_layers=2, batch_first=True),
    ).eval()
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)

    def edit(proto):
        node = nets.find_node(proto, kind.__name__, layer)
        nets.change_weight(proto, node.input[2], round_to_half)

    reported = localize_file(model, candidate, VECTORS, edit=edit)
    (detail,) = reported.fault_params["details"]
    name = f"rnn.weight_hh_l{layer}"
    assert detail == {"code": "rounded", "name": name, "format": "float16"}
