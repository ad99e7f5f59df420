"""Comparison of constants with the weights of a module: counterparts, folding, rounding."""

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
    misplaced_tensors,
    transposed_weight,
)
from gate.weights.layouts import match_packed_rnn
from tests.localize import nets
from tests.localize.nets import text_of


def differences(*given, **settings) -> list[WeightDifference]:
    return list(comparison(*given, **settings).differences)


def linear(inputs: int = 4, outputs: int = 3, *, scale: float = 1.0) -> nn.Linear:
    torch.manual_seed(0)
    module = nn.Linear(inputs, outputs)
    with torch.no_grad():
        module.weight.mul_(scale)
    return module


def arrays(module: nn.Module, **changed: np.ndarray) -> dict[str, np.ndarray]:
    custom = {name: tensor.detach().numpy().copy() for name, tensor in module.state_dict().items()}
    return {f"of the file: {name}": array for name, array in {**custom, **changed}.items()}


def _tf32(weight: torch.Tensor) -> torch.Tensor:
    """To 10 bits of mantissa, by arithmetic instead of bits."""
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
        ],
        ids=["nothing", "integers", "another shape", "another type"],
    )
    def test_unrelated_constants_have_no_difference(self, found):
        assert differences(linear(), "head", found) == []

    def test_equal_weights_have_no_difference(self):
        module = linear()
        weight = module.weight.detach().numpy()
        assert differences(module, "head", arrays(module)) == []
        assert differences(module, "head", arrays(module, weight=weight.T)) == []

    def test_differing_elements_are_counted(self):
        module = linear()
        weight = module.weight.detach().numpy().copy()
        weight[1, 2] += 0.25
        weight[0, 0] -= 0.5
        (folded_texts,) = differences(module, "head", arrays(module, weight=weight.T))
        assert folded_texts.module == "head"
        assert text_of(folded_texts) == (
            "head.weight differs from the model's in 2 of 12 elements, by at most 0.5"
        )
        assert folded_texts.rounded_to is None

    def test_nearest_constant_is_compared(self):
        module = linear()
        weight = module.weight.detach().numpy()
        far, near = weight + 10, weight + np.float32(0.125)
        (folded_texts,) = differences(module, "head", {"a": far, "b": near})
        assert "by at most 0.125" in text_of(folded_texts)

    def test_constant_with_the_parameter_name_is_preferred(self):
        module = linear()
        weight = module.weight.detach().numpy()
        matches = {"head.weight": weight * 2, "another module's, by chance equal": weight}
        (folded_texts,) = differences(module, "head", matches)
        assert "head.weight differs from the model's in 12 of 12" in text_of(folded_texts)

    def test_children_are_included_by_default(self):
        module = nn.Sequential(linear())
        result = arrays(module[0], weight=np.zeros((3, 4), np.float32))
        (folded_texts,) = differences(module, "", result)
        assert (folded_texts.module, text_of(folded_texts)[:10]) == ("0", "0.weight d")
        assert differences(module, "", result, loose={}) == []

    def test_buffers_are_compared_but_not_counters(self):
        module = nn.BatchNorm2d(3)
        result = arrays(module, running_var=np.full(3, 2, np.float32))
        del result["of the file: weight"], result["of the file: num_batches_tracked"]
        assert [item.detail["name"] for item in differences(module, "bn", result)] == [
            "bn.running_var"
        ]

    @pytest.mark.parametrize(
        ("name", "rounding", "scale"),
        [
            ("float16", lambda w: w.half().float(), 1.0),
            ("bfloat16", lambda w: w.bfloat16().float(), 1.0),
            # Below 2^-14 float16 has fewer bits than TF32; else they round alike, but for ties.
            ("float16", lambda w: w.half().float(), 1e-6),
            ("TF32", _tf32, 1e-6),
        ],
    )
    def test_rounded_dtype_is_named(self, name, rounding, scale):
        module = linear(scale=scale)
        result = arrays(module, weight=rounding(module.weight.detach()).numpy())
        (folded_texts,) = differences(module, "head", result)
        assert folded_texts.rounded_to == name
        assert text_of(folded_texts) == f"head.weight is rounded to {name} in the file"

    def test_exactly_representable_weights_are_not_called_rounded(self):
        module = linear()
        with torch.no_grad():
            module.weight.copy_(module.weight.half().float())
        weight = module.weight.detach().numpy().copy()
        weight[0, 0] *= 2
        (folded_texts,) = differences(module, "head", arrays(module, weight=weight))
        assert folded_texts.rounded_to is None

    @pytest.mark.parametrize("outputs", [3, 4])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("turned", [False, True])
    def test_nonfinite_weight_is_described(self, outputs, value, turned):
        module = linear(4, outputs)
        weight = module.weight.detach().numpy().copy()
        weight[0, 1] = value
        (folded_texts,) = differences(
            module, "head", arrays(module, weight=weight.T if turned else weight)
        )
        assert (folded_texts.detail["code"], folded_texts.detail["changed"]) == ("differs_in", 1)


class TestTransposed:
    @pytest.mark.parametrize(
        ("op", "turns", "right"), [("Gemm", 1, True), ("Gemm", 0, False), ("MatMul", None, False)]
    )
    def test_transposed_weight_depends_on_the_operator(self, op, turns, right):
        """`right`: whether the parameter as it is is right there."""
        module = linear(4, 4)
        weight = module.weight.detach().numpy()
        node = helper.make_node(
            op, ["x", "w"], ["y"], **({} if turns is None else {"transB": turns})
        )
        for array, wrong in ((weight, not right), (weight.T, right)):
            folded_texts = transposed_weight(module, "head", [node], {"w": array})
            assert (folded_texts is not None) == wrong
            if folded_texts:
                assert text_of(folded_texts) == "head.weight is transposed in the file"

    @pytest.mark.parametrize(
        ("module", "node", "found"),
        [
            (linear(4, 4), ("Conv", "w"), linear(4, 4).weight),
            (linear(4, 4), ("MatMul", "computed"), linear(4, 4).weight),
            (linear(4, 4), ("MatMul", "w"), torch.ones(4, 4)),
            (nn.Bilinear(4, 4, 4), ("MatMul", "w"), torch.ones(4, 4)),
        ],
        ids=["no product", "no constant", "another weight", "another module"],
    )
    def test_other_weights_are_not_called_transposed(self, module, node, found):
        created = helper.make_node(node[0], ["x", node[1]], ["y"])
        assert transposed_weight(module, "head", [created], {"w": found.detach().numpy()}) is None

    def test_transposed_weight_of_the_model_itself(self):
        module = linear(4, 4)
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        folded_texts = transposed_weight(module, "", [node], {"w": module.weight.detach().numpy()})
        assert text_of(folded_texts) == "weight is transposed in the file"


class Standardised(nn.Module):
    """Its code computes the weight that is used, which an exporter may store."""

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
    module = Standardised()
    matches = {name: change(module.w.detach()).numpy()}
    (difference,) = differences(module, "", matches, loose={})
    assert difference.by_code is by_code
    assert said in text_of(difference)


def test_swapped_lstm_directions_are_named():
    torch.manual_seed(0)
    module = nn.LSTM(3, 2, bidirectional=True)
    right = {item.name: item.values for item in match_packed_rnn(module)}
    assert not [*misplaced_tensors(module, "memory", right)]
    turned = {name: values[::-1].copy() for name, values in right.items()}
    (difference,) = misplaced_tensors(module, "memory", turned)
    assert difference.module == "memory"
    assert "the two directions are swapped in weight_ih_l0" in text_of(difference)
    assert not [*misplaced_tensors(nn.Linear(3, 2), "memory", turned)]


RNG = np.random.default_rng(0)
TABLE, GATES, HIDDEN = (RNG.normal(size=size) for size in ((12, 4), (8, 3), (8, 2)))
BIAS = RNG.normal(size=5)


def add_one_at(array, *places):
    changed = array.copy()
    for location in places:
        changed.reshape(-1)[location] += 1.0
    return changed


def float32(**arrays):
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


MODEL = {
    name: array.astype(np.float32).astype(np.float64)
    for name, array in {"table": TABLE, "gates": GATES, "hidden": HIDDEN, "bias": BIAS}.items()
}


def packed(gates, hidden):
    """As LSTM has them: both of one direction in one constant, the gates in another order."""
    return np.concatenate([np.roll(gates, 2, 0).ravel(), np.roll(hidden, 2, 0).ravel()])


@pytest.mark.parametrize(("constant", "differing", "same"), [
    (TABLE, {}, {"table"}),
    (TABLE.T, {}, {"table"}),
    (TABLE.reshape(1, 12, 4, 1), {}, {"table"}),
    (TABLE[[3, 3, 0, 7]][None], {}, {"table"}),
    (packed(GATES, HIDDEN), {}, {"gates", "hidden"}),
    (add_one_at(TABLE, 5), {"table": (1, 48)}, set()),
    (add_one_at(TABLE, 5, 6).T[None], {"table": (2, 48)}, set()),
    (add_one_at(TABLE, 5)[[1, 1, 2]], {"table": (2, 12)}, set()),
    (packed(add_one_at(GATES, 0), HIDDEN), {"gates": (1, 24)}, {"hidden"}),
    (packed(GATES, add_one_at(HIDDEN, 3, 4)), {"hidden": (2, 16)}, {"gates"}),
    (np.ones(5), {"bias": (5, 5)}, set()),
    (np.ones(7), {}, set()),
])  # fmt: skip
def test_counterparts_of_a_constant(constant, differing, same):
    folded_texts = counterparts(MODEL, float32(constant=constant))
    assert {pair.name: (pair.changed, pair.total) for pair in folded_texts.differing} == differing
    assert set(folded_texts.same) == same
    assert set(folded_texts.unpaired) == MODEL.keys() - differing.keys() - same


def test_row_of_a_table_is_not_matched_with_an_unused_parameter():
    """A row of a table that was computed beforehand, beside a token that nothing uses."""
    model = {**MODEL, "token": np.zeros(4)}
    paired = counterparts(model, float32(constant=TABLE[3]))
    assert paired.differing == []
    assert paired.same == ["table"]
    assert "token" in paired.unpaired


@pytest.mark.parametrize(("constant", "differing", "same"), [
    (np.roll(GATES, 2, 0)[None], {}, {"gates"}),
    (np.roll(add_one_at(GATES, 0), 2, 0)[None], {"gates": (1, 24)}, set()),
    (GATES * 1.1, {"gates": (24, 24)}, set()),
])  # fmt: skip
def test_reordered_gates_match(constant, differing, same):
    folded_texts = counterparts(MODEL, float32(constant=constant), reordered=True)
    assert {pair.name: (pair.changed, pair.total) for pair in folded_texts.differing} == differing
    assert set(folded_texts.same) == same


def test_reordered_rows_are_a_difference():
    (pair,) = counterparts(MODEL, float32(constant=np.roll(TABLE, 1, 0))).differing
    assert (pair.name, pair.changed) == ("table", 48)


def test_precomputed_constant_may_differ_by_rounding():
    anew = float32(constant=BIAS * (1 + 2.0**-23))
    model = {"bias": MODEL["bias"]}
    assert counterparts(model, anew, loose={"bias"}).same == ["bias"]
    assert counterparts(model, anew).differing


def test_name_decides_the_counterpart():
    result = float32(bias=add_one_at(BIAS, 1), other=BIAS)
    (pair,) = counterparts({"bias": MODEL["bias"]}, result).differing
    assert (pair.name, pair.changed) == ("bias", 1)
    left = counterparts({"bias": MODEL["bias"]}, float32(gamma=BIAS + 1), excluded={"gamma"})
    assert (left.differing, left.unpaired) == ([], ["bias"])


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
    folded_texts = counterparts({"bias": MODEL["bias"]}, float32(constant=constant), loose={"bias"})
    assert bool(folded_texts.differing) == named


def test_equal_tensors_share_a_counterpart():
    biases = {"a": MODEL["bias"], "b": MODEL["bias"]}
    assert counterparts(biases, float32(constant=BIAS)).same == ["a", "b"]


@pytest.fixture
def pair():
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()
    for tensor in (norm.weight, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    for tensor in (norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    return conv, norm


def folded(conv: nn.Module, norm: nn.Module, *, eps: float | None = None) -> dict[str, np.ndarray]:
    """As an exporter folds, in float32."""
    with torch.no_grad():
        scale = norm.weight / torch.sqrt(norm.running_var + (norm.eps if eps is None else eps))
        bias = 0 if conv.bias is None else conv.bias
        weight = conv.weight * scale.reshape(-1, *[1] * (conv.weight.dim() - 1))
        return {"w": weight.numpy(), "b": (norm.bias + (bias - norm.running_mean) * scale).numpy()}


class TestFolded:
    def folded_texts(self, pair, found, **settings) -> list[tuple[str, str]]:
        named = folded_differences(pair, ("conv", "bn"), found, **settings)
        return [(item.module, text_of(item)) for item in named]

    def test_correct_folding_has_no_difference(self, pair):
        assert self.folded_texts(pair, folded(*pair)) == []

    @pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3, bias=False), nn.Linear(6, 4)])
    def test_folding_into_other_layers(self, pair, layer):
        assert self.folded_texts((layer, pair[1]), folded(layer, pair[1])) == []
        norm = nn.BatchNorm2d(4, affine=False).eval()
        norm.weight_, norm.bias_ = torch.ones(4), torch.zeros(4)
        matches = {"w": layer.weight.detach().numpy() / np.sqrt(np.float32(1 + norm.eps))}
        assert self.folded_texts((layer, norm), matches) == []

    @pytest.mark.parametrize("found", [{}, {"w": np.ones((2, 2), np.float32)}])
    def test_missing_folded_constants_have_no_difference(self, pair, found):
        assert self.folded_texts(pair, found) == []

    def test_transposed_convolution_is_not_compared(self, pair):
        layer = nn.ConvTranspose2d(4, 4, 3)
        assert self.folded_texts((layer, pair[1]), {"w": np.ones((4, 4, 3, 3), np.float32)}) == []

    def test_wrong_folded_eps(self, pair):
        (difference,) = folded_differences(pair, ("conv", "bn"), folded(*pair, eps=1e-2))
        text = "the folded eps of bn is 0.01; the model has 1e-05"
        assert (difference.module, text_of(difference), difference.by_code) == ("bn", text, True)

    def test_wrong_folded_scale(self, pair):
        result = folded(*pair)
        with torch.no_grad():
            pair[1].running_var.mul_(torch.tensor([1.2, 0.9, 1.1, 1.0]))
        assert self.folded_texts(pair, result) == [
            ("bn", "the folded scale of bn (weight, running_var, eps) differs from the model's")
        ]

    def test_wrong_folded_offset(self, pair):
        result = folded(*pair)
        result["b"] = result["b"] + np.float32(0.1)
        assert self.folded_texts(pair, result) == [
            ("bn", "the folded offset of bn (bias, running_mean) differs from the model's")
        ]

    def test_wrong_folded_layer_weight(self, pair):
        """The offset is right: it was not the scale."""
        result = folded(*pair)
        result["w"] = result["w"] * np.float32(1.5)
        ((module, text),) = self.folded_texts(pair, result)
        assert (module, "108 of 108 elements" in text) == ("conv", True)

    def test_wrong_folded_channel(self, pair):
        result = folded(*pair)
        result["w"][2] *= 3
        ((module, text),) = self.folded_texts(pair, result)
        assert (module, "27 of 108 elements" in text) == ("conv", True)

    def test_wrong_single_folded_weight(self, pair):
        result = folded(*pair)
        result["w"][2, 1, 0, 0] += 1
        ((module, text),) = self.folded_texts(pair, result)
        assert (module, "1 of 108 elements" in text) == ("conv", True)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_nonfinite_folded_weight(self, pair, value):
        result = folded(*pair)
        result["w"][2, 1, 0, 0] = value
        ((module, text),) = self.folded_texts(pair, result)
        assert (module, "1 of 108 elements" in text) == ("conv", True)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_nonfinite_folded_offset(self, pair, value):
        result = folded(*pair)
        result["b"][2] = value
        ((module, text),) = self.folded_texts(pair, result)
        assert (module, "offset of bn" in text) == ("bn", True)

    def test_zero_channel_is_no_difference(self, pair):
        with torch.no_grad():
            pair[0].weight[1] = 0
        assert self.folded_texts(pair, folded(*pair)) == []

    @pytest.mark.parametrize(
        ("name", "rounding"), [("float16", torch.Tensor.half), ("bfloat16", torch.Tensor.bfloat16)]
    )
    def test_rounding_before_or_after_folding_is_named(self, pair, name, rounding):
        conv, norm = pair
        after = folded(conv, norm)
        after["w"] = rounding(torch.from_numpy(after["w"])).float().numpy()
        text = f"conv.weight is rounded to {name} in the file"
        assert self.folded_texts(pair, after) == [("conv", f"{text}, after folding")]
        narrow = nn.Conv2d(3, 4, 3)
        narrow.load_state_dict(conv.state_dict())
        with torch.no_grad():
            narrow.weight.copy_(rounding(conv.weight).float())
        assert self.folded_texts(pair, folded(narrow, norm)) == [("conv", text)]

    def test_folding_in_float16_has_no_difference(self, pair):
        """As an exporter folds a model that was made half: every step of it rounds."""
        conv, norm = pair
        half = [module.half() for module in (copy.deepcopy(conv), copy.deepcopy(norm))]
        assert self.folded_texts(pair, folded(*half)) != []
        assert self.folded_texts(pair, folded(*half), format_="float16") == []

    @pytest.mark.parametrize(
        ("change", "named", "text"),
        [
            (lambda conv, norm: conv.weight[1, 2, 0, 0].add_(1.0), "conv", "1 of 108 elements"),
            (lambda conv, norm: norm.running_var.mul_(1.1), "bn", "the folded scale of bn"),
            (lambda conv, norm: norm.bias.add_(0.1), "bn", "the folded offset of bn"),
        ],
    )
    def test_wrong_number_folded_in_float16_is_found(self, pair, change, named, text):
        half = [copy.deepcopy(module) for module in pair]
        with torch.no_grad():
            change(*half)
        ((module, folded_texts),) = self.folded_texts(
            pair, folded(*(item.half() for item in half)), format_="float16"
        )
        assert (module, text in folded_texts) == (named, True)


def test_unfolded_norm_weights_have_no_difference():
    """It computes its statistics itself, as in training: not even its scale is another one."""
    norm = nn.BatchNorm2d(4)
    nn.init.uniform_(norm.weight)
    nn.init.uniform_(norm.bias)
    weight, bias = (tensor.detach().numpy() for tensor in (norm.weight, norm.bias))
    assert affine_differences(norm, "bn", {"weight": weight, "bias": bias}) == []
    (folded_texts,) = affine_differences(norm, "bn", {"scale": weight * 2, "bias": bias})
    assert text_of(folded_texts).startswith("the scale of bn")


def test_norm_in_float16():
    norm = nn.BatchNorm2d(4).eval()
    torch.manual_seed(0)
    for tensor in (norm.weight, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    for tensor in (norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    ones = nn.Conv2d(4, 4, 1, bias=False)
    with torch.no_grad():
        ones.weight.fill_(1.0)
    created = folded(ones.half(), copy.deepcopy(norm).half())
    matches = {"scale": created["w"][:, 0, 0, 0], "offset": created["b"]}
    assert affine_differences(norm, "bn", matches) != []
    assert affine_differences(norm, "bn", matches, format_="float16") == []
    (folded_texts,) = affine_differences(
        norm, "bn", {**matches, "offset": created["b"] * np.float16(1.05)}, format_="float16"
    )
    assert text_of(folded_texts).startswith("the offset of bn")


class Table(nn.Module):
    """A module of its own that adds a table."""

    def __init__(self):
        super().__init__()
        self.table = torch.randn(6, 8)

    def forward(self, x):
        return x + self.table


class Placed(nn.Module):
    """Vectors (n, 6) to (n, 6, 3): a table of positions in code, and one in a module."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.positions = torch.randn(6, 8)
        self.inner = Table()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.inner(torch.tanh(self.embed(x[..., None]) + self.positions)))


@pytest.mark.parametrize(("by", "owner", "name", "how", "cause"), [
    ("direct", "", "positions", lambda t: t.half().float(), "is rounded to float16 in the file"),
    ("dynamo", "inner", "table", lambda t: t + 0.01 * (t > 1.0), "differs from the model's"),
], ids=["rounded", "another"])  # fmt: skip
def test_wrong_table_is_named(tmp_path, by, owner, name, how, cause):
    model = nets.made(Placed)
    wrong = copy.deepcopy(model)
    holder = wrong.get_submodule(owner)
    setattr(holder, name, how(getattr(holder, name)))
    candidate = nets.export(wrong, tmp_path / "model.onnx", nets.VECTORS, by=by)
    folded_texts = nets.found(model, candidate, nets.VECTORS)
    assert folded_texts.first_divergence == owner
    assert f"{f'{owner}.{name}'.lstrip('.')} {cause}" in folded_texts.cause


def test_leftover_tensor_attribute_is_not_a_weight():
    """An array of the weights' shape that has nothing of the constant is not compared with it."""
    module = nn.Linear(4, 3)
    module.last_input = torch.randn(3, 4)
    weight = module.weight.detach().numpy()
    changed = comparison(module, "head", {"w": weight * np.float32(3.0)})
    assert [item.detail["name"] for item in changed.differences] == ["head.weight"]
    same = comparison(module, "head", {"w": weight, "b": module.bias.detach().numpy()})
    assert same.differences == ()
    assert same.same == ("head.weight", "head.bias")
    assert same.unpaired == ()
