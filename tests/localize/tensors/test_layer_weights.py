"""Constants are compared with the weights of a module: counterparts, folding and rounding."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from onnx import helper
from torch import nn

from gate.localize.layer_weights import (
    WeightDifference,
    affine_differences,
    comparison,
    counterparts,
    folded_differences,
    transposed_weight,
    with_recurrent_differences,
)
from gate.weights.layouts import match_packed_rnn
from tests.localize import nets
from tests.localize.nets import render_difference
from tests.modules import Layers


def list_differences(*arguments, **settings) -> list[WeightDifference]:
    return list(comparison(*arguments, **settings).differences)


def make_linear(inputs: int = 4, outputs: int = 3, *, scale: float = 1.0) -> nn.Linear:
    torch.manual_seed(0)
    module = nn.Linear(inputs, outputs)
    with torch.no_grad():
        module.weight.mul_(scale)
    return module


def copy_weights(module: nn.Module, **changed: np.ndarray) -> dict[str, np.ndarray]:
    weights = {name: tensor.detach().numpy().copy() for name, tensor in module.state_dict().items()}
    return {f"of the file: {name}": array for name, array in {**weights, **changed}.items()}


def round_to_tf32(weight: torch.Tensor) -> torch.Tensor:
    """Round to the 10 mantissa bits of TF32, by arithmetic."""
    mantissa, exponent = np.frexp(weight.numpy().astype(np.float64))
    return torch.from_numpy(np.ldexp(np.round(mantissa * 2**11) / 2**11, exponent)).float()


class TestDifferences:
    @pytest.mark.parametrize(
        "found",
        [
            {},
            {"shape": np.array([3, 4])},
            {"other": np.ones((5, 5), np.float32)},
            {"integers": np.ones((3, 4), np.int64)},
            copy_weights(make_linear()),
            copy_weights(make_linear(), weight=make_linear().weight.detach().numpy().T),
        ],
        ids=["nothing", "integers", "another shape", "another type", "equal", "transposed"],
    )
    def test_equal_weights_and_unrelated_constants_have_no_difference(self, found):
        assert list_differences(make_linear(), "head", found) == []

    @pytest.mark.parametrize(
        ("find", "text"),
        [
            (lambda w: {"a": w + 10, "b": w + np.float32(0.125)}, "by at most 0.125"),
            (lambda w: {"head.weight": w * 2, "of another module": w}, "in 12 of 12 elements"),
            (lambda w: {"w": (w + 0.5 * (np.arange(12) % 6 == 0).reshape(3, 4)).T.astype("f")},
             "head.weight differs from the model's in 2 of 12 elements, by at most 0.5"),
        ],
        ids=["nearest constant", "name of the parameter", "two elements"],
    )  # fmt: skip
    def test_differing_elements_are_counted(self, find, text):
        module = make_linear()
        (difference,) = list_differences(module, "head", find(module.weight.detach().numpy()))
        assert (difference.module, difference.rounded_to) == ("head", None)
        assert text in render_difference(difference)

    def test_children_are_included_by_default(self):
        module = nn.Sequential(make_linear())
        constants = copy_weights(module[0], weight=np.zeros((3, 4), np.float32))
        (difference,) = list_differences(module, "", constants)
        assert (difference.module, render_difference(difference)[:10]) == ("0", "0.weight d")
        assert list_differences(module, "", constants, loose={}) == []

    def test_buffers_are_compared_but_not_counters(self):
        module = nn.BatchNorm2d(3)
        constants = copy_weights(module, running_var=np.full(3, 2, np.float32))
        del constants["of the file: weight"], constants["of the file: num_batches_tracked"]
        assert [item.detail["name"] for item in list_differences(module, "bn", constants)] == [
            "bn.running_var"
        ]

    @pytest.mark.parametrize(
        ("name", "rounding", "scale"),
        [
            ("float16", lambda w: w.half().float(), 1.0),
            ("bfloat16", lambda w: w.bfloat16().float(), 1.0),
            # Below 2^-14, float16 has fewer bits than TF32; above, they round alike except for
            # ties.
            ("float16", lambda w: w.half().float(), 1e-6),
            ("TF32", round_to_tf32, 1e-6),
        ],
    )
    def test_rounded_dtype_is_named(self, name, rounding, scale):
        module = make_linear(scale=scale)
        result = copy_weights(module, weight=rounding(module.weight.detach()).numpy())
        (difference,) = list_differences(module, "head", result)
        assert difference.rounded_to == name
        assert render_difference(difference) == f"head.weight is rounded to {name} in the file"

    def test_exactly_representable_weights_are_not_called_rounded(self):
        module = make_linear()
        with torch.no_grad():
            module.weight.copy_(module.weight.half().float())
        weight = module.weight.detach().numpy().copy()
        weight[0, 0] *= 2
        (difference,) = list_differences(module, "head", copy_weights(module, weight=weight))
        assert difference.rounded_to is None

    @pytest.mark.parametrize("outputs", [3, 4])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("turned", [False, True])
    def test_nonfinite_weight_is_described(self, outputs, value, turned):
        module = make_linear(4, outputs)
        weight = module.weight.detach().numpy().copy()
        weight[0, 1] = value
        (difference,) = list_differences(
            module, "head", copy_weights(module, weight=weight.T if turned else weight)
        )
        assert (difference.detail["code"], difference.detail["changed"]) == ("differs_in", 1)


class TestTransposed:
    @pytest.mark.parametrize(
        ("op", "turns", "right"), [("Gemm", 1, True), ("Gemm", 0, False), ("MatMul", None, False)]
    )
    def test_transposed_weight_depends_on_the_operator(self, op, turns, right):
        """Name a square weight that is transposed for this operator.

        `right`: whether the operator expects the parameter untransposed.
        """
        module = make_linear(4, 4)
        weight = module.weight.detach().numpy()
        node = helper.make_node(
            op, ["x", "w"], ["y"], **({} if turns is None else {"transB": turns})
        )
        for array, wrong in ((weight, not right), (weight.T, right)):
            difference = transposed_weight(module, "head", [node], {"w": array})
            assert (difference is not None) == wrong
            if difference:
                assert render_difference(difference) == "head.weight is transposed in the file"

    @pytest.mark.parametrize(
        ("module", "node", "found"),
        [
            (make_linear(4, 4), ("Conv", "w"), make_linear(4, 4).weight),
            (make_linear(4, 4), ("MatMul", "computed"), make_linear(4, 4).weight),
            (make_linear(4, 4), ("MatMul", "w"), torch.ones(4, 4)),
            (nn.Bilinear(4, 4, 4), ("MatMul", "w"), torch.ones(4, 4)),
        ],
        ids=["no product", "no constant", "another weight", "another module"],
    )
    def test_other_weights_are_not_called_transposed(self, module, node, found):
        product = helper.make_node(node[0], ["x", node[1]], ["y"])
        assert transposed_weight(module, "head", [product], {"w": found.detach().numpy()}) is None

    def test_transposed_weight_of_the_model_itself(self):
        module = make_linear(4, 4)
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        difference = transposed_weight(module, "", [node], {"w": module.weight.detach().numpy()})
        assert render_difference(difference) == "weight is transposed in the file"


class ComputedWeight(nn.Module):
    """A model whose code computes the weight it uses, which an exporter may store."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(6, 4))


@pytest.mark.parametrize(("name", "change", "by_code", "said"), [
    ("stored", lambda w: w * 1.1 + 0.1, True, "neither w there nor what the model's code"),
    ("stored", lambda w: w.half().float(), False, "w is rounded"),
    ("stored", lambda w: torch.cat([w[:1] + 1.0, w[1:]]), False, "4 of 24 elements"),
    ("w", lambda w: w * 1.1 + 0.1, False, "24 of 24 elements"),
])  # fmt: skip
def test_computed_weight_is_not_compared_with_its_parameter(name, change, by_code, said):
    module = ComputedWeight()
    constants = {name: change(module.w.detach()).numpy()}
    (difference,) = list_differences(module, "", constants, loose={})
    assert difference.by_code is by_code
    assert said in render_difference(difference)


def test_swapped_lstm_directions_are_named():
    torch.manual_seed(0)
    module = nn.LSTM(3, 2, bidirectional=True)
    constants = {item.name: item.values for item in match_packed_rnn(module)}
    assert not with_recurrent_differences([], module, "memory", constants)
    swapped = {name: values[::-1].copy() for name, values in constants.items()}
    (difference,) = with_recurrent_differences([], module, "memory", swapped)
    assert difference.module == "memory"
    assert "the two directions are swapped in weight_ih_l0" in render_difference(difference)
    assert not with_recurrent_differences([], nn.Linear(3, 2), "memory", swapped)


RNG = np.random.default_rng(0)
TABLE, GATES, HIDDEN = (RNG.normal(size=size) for size in ((12, 4), (8, 3), (8, 2)))
BIAS = RNG.normal(size=5)


def add_one_at(array, *indices):
    changed = array.copy()
    for index in indices:
        changed.reshape(-1)[index] += 1.0
    return changed


def to_float32(**arrays):
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


MODEL = {
    name: array.astype(np.float32).astype(np.float64)
    for name, array in {"table": TABLE, "gates": GATES, "hidden": HIDDEN, "bias": BIAS}.items()
}


def pack_gates(gates, hidden):
    """Pack the gates as LSTM does: both weights of a direction in one constant, reordered."""
    return np.concatenate([np.roll(gates, 2, 0).ravel(), np.roll(hidden, 2, 0).ravel()])


@pytest.mark.parametrize(("constant", "differing", "same"), [
    (TABLE, {}, {"table"}),
    (TABLE.T, {}, {"table"}),
    (TABLE.reshape(1, 12, 4, 1), {}, {"table"}),
    (TABLE[[3, 3, 0, 7]][None], {}, {"table"}),
    (pack_gates(GATES, HIDDEN), {}, {"gates", "hidden"}),
    (add_one_at(TABLE, 5), {"table": (1, 48)}, set()),
    (add_one_at(TABLE, 5, 6).T[None], {"table": (2, 48)}, set()),
    (add_one_at(TABLE, 5)[[1, 1, 2]], {"table": (2, 12)}, set()),
    (pack_gates(add_one_at(GATES, 0), HIDDEN), {"gates": (1, 24)}, {"hidden"}),
    (pack_gates(GATES, add_one_at(HIDDEN, 3, 4)), {"hidden": (2, 16)}, {"gates"}),
    (np.ones(5), {"bias": (5, 5)}, set()),
    (np.ones(7), {}, set()),
])  # fmt: skip
def test_counterparts_of_a_constant(constant, differing, same):
    result = counterparts(MODEL, to_float32(constant=constant))
    assert {pair.name: (pair.changed, pair.total) for pair in result.differing} == differing
    assert set(result.same) == same
    assert set(result.unpaired) == MODEL.keys() - differing.keys() - same


def test_row_of_a_table_is_not_matched_with_an_unused_parameter():
    """Match a precomputed row of a table with the table, not with an unused parameter of zeros."""
    model = {**MODEL, "token": np.zeros(4)}
    paired = counterparts(model, to_float32(constant=TABLE[3]))
    assert paired.differing == []
    assert paired.same == ["table"]
    assert "token" in paired.unpaired


@pytest.mark.parametrize(("constant", "differing", "same"), [
    (np.roll(GATES, 2, 0)[None], {}, {"gates"}),
    (np.roll(add_one_at(GATES, 0), 2, 0)[None], {"gates": (1, 24)}, set()),
    (GATES * 1.1, {"gates": (24, 24)}, set()),
])  # fmt: skip
def test_reordered_gates_match(constant, differing, same):
    result = counterparts(MODEL, to_float32(constant=constant), reordered=True)
    assert {pair.name: (pair.changed, pair.total) for pair in result.differing} == differing
    assert set(result.same) == same


def test_reordered_rows_are_a_difference():
    (pair,) = counterparts(MODEL, to_float32(constant=np.roll(TABLE, 1, 0))).differing
    assert (pair.name, pair.changed) == ("table", 48)


def test_precomputed_constant_may_differ_by_rounding():
    rounded = to_float32(constant=BIAS * (1 + 2.0**-23))
    model = {"bias": MODEL["bias"]}
    assert counterparts(model, rounded, loose={"bias"}).same == ["bias"]
    assert counterparts(model, rounded).differing


def test_name_decides_the_counterpart():
    result = to_float32(bias=add_one_at(BIAS, 1), other=BIAS)
    (pair,) = counterparts({"bias": MODEL["bias"]}, result).differing
    assert (pair.name, pair.changed) == ("bias", 1)
    unpaired = counterparts({"bias": MODEL["bias"]}, to_float32(gamma=BIAS + 1), excluded={"gamma"})
    assert (unpaired.differing, unpaired.unpaired) == ([], ["bias"])


@pytest.mark.parametrize(
    ("constant", "named"),
    [
        (add_one_at(BIAS, 1), True),
        (BIAS * 1.02, True),
        (np.ones(5), False),
        (BIAS[::-1] + 3, False),
    ],
)
def test_loose_counterpart_needs_similar_values(constant, named):
    result = counterparts({"bias": MODEL["bias"]}, to_float32(constant=constant), loose={"bias"})
    assert bool(result.differing) == named


def test_equal_tensors_share_a_counterpart():
    biases = {"a": MODEL["bias"], "b": MODEL["bias"]}
    assert counterparts(biases, to_float32(constant=BIAS)).same == ["a", "b"]


@pytest.fixture
def conv_and_norm():
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3), make_norm()


def make_norm() -> nn.Module:
    norm = nn.BatchNorm2d(4).eval()
    for tensor in (norm.weight, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    for tensor in (norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    return norm


def fold(conv: nn.Module, norm: nn.Module, *, eps: float | None = None) -> dict[str, np.ndarray]:
    """Fold a BatchNorm into a layer in float32, as an exporter does."""
    with torch.no_grad():
        scale = norm.weight / torch.sqrt(norm.running_var + (norm.eps if eps is None else eps))
        bias = 0 if conv.bias is None else conv.bias
        weight = conv.weight * scale.reshape(-1, *[1] * (conv.weight.dim() - 1))
        return {"w": weight.numpy(), "b": (norm.bias + (bias - norm.running_mean) * scale).numpy()}


class TestFolded:
    def list_texts(self, conv_and_norm, found, **settings) -> list[tuple[str, str]]:
        differences = folded_differences(conv_and_norm, ("conv", "bn"), found, **settings)
        return [(item.module, render_difference(item)) for item in differences]

    @pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3, bias=False), nn.Linear(6, 4)])
    def test_folding_into_other_layers(self, conv_and_norm, layer):
        assert self.list_texts((layer, conv_and_norm[1]), fold(layer, conv_and_norm[1])) == []
        norm = nn.BatchNorm2d(4, affine=False).eval()
        norm.weight_, norm.bias_ = torch.ones(4), torch.zeros(4)
        matches = {"w": layer.weight.detach().numpy() / np.sqrt(np.float32(1 + norm.eps))}
        assert self.list_texts((layer, norm), matches) == []

    @pytest.mark.parametrize("found", [{}, {"w": np.ones((2, 2), np.float32)}])
    def test_missing_folded_constants_have_no_difference(self, conv_and_norm, found):
        assert self.list_texts(conv_and_norm, found) == []

    def test_transposed_convolution_is_not_compared(self, conv_and_norm):
        pair, found = (nn.ConvTranspose2d(4, 4, 3), conv_and_norm[1]), np.ones((4, 4, 3, 3))
        assert self.list_texts(pair, {"w": found.astype(np.float32)}) == []

    def test_wrong_folded_eps(self, conv_and_norm):
        found = fold(*conv_and_norm, eps=1e-2)
        (difference,) = folded_differences(conv_and_norm, ("conv", "bn"), found)
        assert (difference.module, difference.by_code) == ("bn", True)
        text = "the folded eps of bn is 0.01; the model has 1e-05"
        assert render_difference(difference) == text

    @pytest.mark.parametrize(
        ("name", "place", "change", "module", "text"),
        [
            ("b", ..., lambda b: b + np.float32(0.1), "bn",
             "the folded offset of bn (bias, running_mean) differs from the model's"),
            ("b", 2, lambda _: np.nan, "bn", "offset of bn"),
            ("b", 2, lambda _: np.inf, "bn", "offset of bn"),
            # The layer is named, because the folded offset is right.
            ("w", ..., lambda w: w * np.float32(1.5), "conv", "108 of 108 elements"),
            ("w", 2, lambda w: w * 3, "conv", "27 of 108 elements"),
            ("w", (2, 1, 0, 0), lambda w: w + 1, "conv", "1 of 108 elements"),
            ("w", (2, 1, 0, 0), lambda _: np.nan, "conv", "1 of 108 elements"),
            ("w", (2, 1, 0, 0), lambda _: -np.inf, "conv", "1 of 108 elements"),
        ],
    )  # fmt: skip
    def test_wrong_folded_constant(self, conv_and_norm, name, place, change, module, text):
        found = fold(*conv_and_norm)
        found[name][place] = change(found[name][place])
        ((named, message),) = self.list_texts(conv_and_norm, found)
        assert (named, text in message) == (module, True)

    def test_wrong_folded_scale(self, conv_and_norm):
        result = fold(*conv_and_norm)
        with torch.no_grad():
            conv_and_norm[1].running_var.mul_(torch.tensor([1.2, 0.9, 1.1, 1.0]))
        assert self.list_texts(conv_and_norm, result) == [
            ("bn", "the folded scale of bn (weight, running_var, eps) differs from the model's")
        ]

    def test_zero_channel_is_no_difference(self, conv_and_norm):
        assert self.list_texts(conv_and_norm, fold(*conv_and_norm)) == []
        with torch.no_grad():
            conv_and_norm[0].weight[1] = 0
        assert self.list_texts(conv_and_norm, fold(*conv_and_norm)) == []

    @pytest.mark.parametrize(
        ("name", "rounding"), [("float16", torch.Tensor.half), ("bfloat16", torch.Tensor.bfloat16)]
    )
    def test_rounding_before_or_after_folding_is_named(self, conv_and_norm, name, rounding):
        conv, norm = conv_and_norm
        after = fold(conv, norm)
        after["w"] = rounding(torch.from_numpy(after["w"])).float().numpy()
        text = f"conv.weight is rounded to {name} in the file"
        assert self.list_texts(conv_and_norm, after) == [("conv", f"{text}, after folding")]
        narrow = nn.Conv2d(3, 4, 3)
        narrow.load_state_dict(conv.state_dict())
        with torch.no_grad():
            narrow.weight.copy_(rounding(conv.weight).float())
        assert self.list_texts(conv_and_norm, fold(narrow, norm)) == [("conv", text)]

    def test_folding_in_float16_has_no_difference(self, conv_and_norm):
        """Accept weights folded in float16, where each step rounds."""
        conv, norm = conv_and_norm
        half = [module.half() for module in (copy.deepcopy(conv), copy.deepcopy(norm))]
        assert self.list_texts(conv_and_norm, fold(*half)) != []
        assert self.list_texts(conv_and_norm, fold(*half), format_="float16") == []

    @pytest.mark.parametrize(
        ("change", "named", "text"),
        [
            (lambda conv, norm: conv.weight[1, 2, 0, 0].add_(1.0), "conv", "1 of 108 elements"),
            (lambda conv, norm: norm.running_var.mul_(1.1), "bn", "the folded scale of bn"),
            (lambda conv, norm: norm.bias.add_(0.1), "bn", "the folded offset of bn"),
        ],
    )
    def test_wrong_number_folded_in_float16_is_found(self, conv_and_norm, change, named, text):
        half = [copy.deepcopy(module) for module in conv_and_norm]
        with torch.no_grad():
            change(*half)
        ((module, message),) = self.list_texts(
            conv_and_norm, fold(*(item.half() for item in half)), format_="float16"
        )
        assert (module, text in message) == (named, True)


def test_unfolded_norm_weights_have_no_difference():
    """Accept equal affine weights of a norm that computes batch statistics."""
    norm = nn.BatchNorm2d(4)
    nn.init.uniform_(norm.weight)
    nn.init.uniform_(norm.bias)
    weight, bias = (tensor.detach().numpy() for tensor in (norm.weight, norm.bias))
    assert affine_differences(norm, "bn", {"weight": weight, "bias": bias}) == []
    (difference,) = affine_differences(norm, "bn", {"scale": weight * 2, "bias": bias})
    assert render_difference(difference).startswith("the scale of bn")


def test_norm_in_float16():
    torch.manual_seed(0)
    norm = make_norm()
    ones = nn.Conv2d(4, 4, 1, bias=False)
    with torch.no_grad():
        ones.weight.fill_(1.0)
    constants = fold(ones.half(), copy.deepcopy(norm).half())
    matches = {"scale": constants["w"][:, 0, 0, 0], "offset": constants["b"]}
    assert affine_differences(norm, "bn", matches) != []
    assert affine_differences(norm, "bn", matches, format_="float16") == []
    (difference,) = affine_differences(
        norm, "bn", {**matches, "offset": constants["b"] * np.float16(1.05)}, format_="float16"
    )
    assert render_difference(difference).startswith("the offset of bn")


def make_table() -> nn.Module:
    """Return a custom module that adds a table."""
    return Layers(lambda m, x: x + m.table, table=lambda: torch.randn(6, 8))


def make_positioned() -> nn.Module:
    """Vectors (n, 6) to (n, 6, 3): one table of positions in code and one in a module."""
    return Layers(
        lambda m, x: m.head(m.inner(torch.tanh(m.embed(x[..., None]) + m.positions))),
        embed=lambda: nn.Linear(1, 8),
        positions=lambda: torch.randn(6, 8),
        inner=make_table,
        head=lambda: nn.Linear(8, 3),
    )


@pytest.mark.parametrize(("by", "owner", "name", "how", "cause"), [
    ("direct", "", "positions", lambda t: t.half().float(), "is rounded to float16 in the file"),
    ("dynamo", "inner", "table", lambda t: t + 0.01 * (t > 1.0), "differs from the model's"),
], ids=["rounded", "another"])  # fmt: skip
def test_wrong_table_is_named(tmp_path, by, owner, name, how, cause):
    model = nets.build(make_positioned)
    wrong = copy.deepcopy(model)
    holder = wrong.get_submodule(owner)
    setattr(holder, name, how(getattr(holder, name)))
    candidate = nets.export(wrong, tmp_path / "model.onnx", nets.VECTORS, by=by)
    localization = nets.localize_file(model, candidate, nets.VECTORS)
    assert localization.first_divergence == owner
    assert f"{f'{owner}.{name}'.lstrip('.')} {cause}" in localization.cause


def test_leftover_tensor_attribute_is_not_a_weight():
    """Ignore an array attribute with the shape of the weights whose values differ from the
    constant.
    """
    module = nn.Linear(4, 3)
    module.last_input = torch.randn(3, 4)
    weight = module.weight.detach().numpy()
    changed = comparison(module, "head", {"w": weight * np.float32(3.0)})
    assert [item.detail["name"] for item in changed.differences] == ["head.weight"]
    same = comparison(module, "head", {"w": weight, "b": module.bias.detach().numpy()})
    assert same.differences == ()
    assert same.same == ("head.weight", "head.bias")
    assert same.unpaired == ()
