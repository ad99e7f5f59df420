"""The file's weights against a module's: what says nothing, what is another, what explains it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import helper
from torch import nn

from gate.localize.layer_weights import WeightDifference, comparison, moved, transposed
from gate.weights.layouts import match_packed_rnn
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
    own = {name: tensor.detach().numpy().copy() for name, tensor in module.state_dict().items()}
    return {f"of the file: {name}": array for name, array in {**own, **changed}.items()}


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
    def test_what_is_no_counterpart_says_nothing(self, found):
        assert differences(linear(), "head", found) == []

    def test_equal_weights_are_none_also_transposed(self):
        module = linear()
        weight = module.weight.detach().numpy()
        assert differences(module, "head", arrays(module)) == []
        assert differences(module, "head", arrays(module, weight=weight.T)) == []

    def test_elements_are_counted_and_the_largest_difference_is_told(self):
        module = linear()
        weight = module.weight.detach().numpy().copy()
        weight[1, 2] += 0.25
        weight[0, 0] -= 0.5
        (told,) = differences(module, "head", arrays(module, weight=weight.T))
        assert told.module == "head"
        assert text_of(told) == (
            "head.weight differs from the model's in 2 of 12 elements, by at most 0.5"
        )
        assert told.rounded_to is None

    def test_of_several_constants_the_nearest_is_meant(self):
        module = linear()
        weight = module.weight.detach().numpy()
        far, near = weight + 10, weight + np.float32(0.125)
        (told,) = differences(module, "head", {"a": far, "b": near})
        assert "by at most 0.125" in text_of(told)

    def test_a_constant_of_the_parameters_name_comes_before_equal_ones(self):
        module = linear()
        weight = module.weight.detach().numpy()
        found = {"head.weight": weight * 2, "another module's, by chance equal": weight}
        (told,) = differences(module, "head", found)
        assert "head.weight differs from the model's in 12 of 12" in text_of(told)

    def test_children_count_unless_only_its_own_are_asked_for(self):
        module = nn.Sequential(linear())
        found = arrays(module[0], weight=np.zeros((3, 4), np.float32))
        (told,) = differences(module, "", found)
        assert (told.module, text_of(told)[:10]) == ("0", "0.weight d")
        assert differences(module, "", found, loose={}) == []

    def test_a_buffer_counts_and_a_counter_does_not(self):
        module = nn.BatchNorm2d(3)
        found = arrays(module, running_var=np.full(3, 2, np.float32))
        del found["of the file: weight"], found["of the file: num_batches_tracked"]
        assert [one.detail["name"] for one in differences(module, "bn", found)] == [
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
    def test_rounding_is_named(self, name, rounding, scale):
        module = linear(scale=scale)
        found = arrays(module, weight=rounding(module.weight.detach()).numpy())
        (told,) = differences(module, "head", found)
        assert told.rounded_to == name
        assert text_of(told) == f"head.weight is rounded to {name} in the file"

    def test_weights_that_are_round_already_are_not_called_rounded(self):
        module = linear()
        with torch.no_grad():
            module.weight.copy_(module.weight.half().float())
        weight = module.weight.detach().numpy().copy()
        weight[0, 0] *= 2
        (told,) = differences(module, "head", arrays(module, weight=weight))
        assert told.rounded_to is None

    @pytest.mark.parametrize("outputs", [3, 4])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("turned", [False, True])
    def test_a_weight_that_is_not_finite_is_told(self, outputs, value, turned):
        module = linear(4, outputs)
        weight = module.weight.detach().numpy().copy()
        weight[0, 1] = value
        (told,) = differences(module, "head", arrays(module, weight=weight.T if turned else weight))
        assert (told.detail["code"], told.detail["changed"]) == ("differs_in", 1)


class TestTransposed:
    @pytest.mark.parametrize(
        ("op", "turns", "right"),
        [("Gemm", 1, True), ("Gemm", 0, False), ("MatMul", None, False)],
    )
    def test_by_how_the_product_reads(self, op, turns, right):
        """`right`: whether the parameter as it is is right there."""
        module = linear(4, 4)
        weight = module.weight.detach().numpy()
        node = helper.make_node(
            op, ["x", "w"], ["y"], **({} if turns is None else {"transB": turns})
        )
        for array, wrong in ((weight, not right), (weight.T, right)):
            told = transposed(module, "head", [node], {"w": array})
            assert (told is not None) == wrong
            if told:
                assert text_of(told) == "head.weight is transposed in the file"

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
    def test_says_nothing_elsewhere(self, module, node, found):
        made = helper.make_node(node[0], ["x", node[1]], ["y"])
        assert transposed(module, "head", [made], {"w": found.detach().numpy()}) is None

    def test_the_model_itself(self):
        module = linear(4, 4)
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        told = transposed(module, "", [node], {"w": module.weight.detach().numpy()})
        assert text_of(told) == "weight is transposed in the file"


class Standardised(nn.Module):
    """Its code computes the weight that is used, which an exporter may store."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(6, 4))


@pytest.mark.parametrize(
    ("name", "change", "by_code", "said"),
    [
        ("stored", lambda w: w * 1.1 + 0.1, True, "neither w there nor what the model's code"),
        ("stored", lambda w: w.half().float(), False, "w is rounded"),
        ("stored", lambda w: torch.cat([w[:1] + 1.0, w[1:]]), False, "4 of 24 elements"),
        ("w", lambda w: w * 1.1 + 0.1, False, "24 of 24 elements"),
    ],
)
def test_what_code_may_have_computed_of_a_tensor_is_not_called_the_tensor(
    name, change, by_code, said
):
    module = Standardised()
    found = {name: change(module.w.detach()).numpy()}
    (difference,) = differences(module, "", found, loose={})
    assert difference.by_code is by_code
    assert said in text_of(difference)


def test_the_directions_of_an_lstm_that_are_exchanged():
    torch.manual_seed(0)
    module = nn.LSTM(3, 2, bidirectional=True)
    right = {one.name: one.values for one in match_packed_rnn(module)}
    assert not [*moved(module, "memory", right)]
    turned = {name: values[::-1].copy() for name, values in right.items()}
    (difference,) = moved(module, "memory", turned)
    assert difference.module == "memory"
    assert "the two directions are swapped in weight_ih_l0" in text_of(difference)
    assert not [*moved(nn.Linear(3, 2), "memory", turned)]
