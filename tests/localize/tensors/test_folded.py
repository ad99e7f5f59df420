"""Weights that a BatchNorm was folded into: which of the two is another one in the file."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from gate.localize.layer_weights import affine_differences, folded_differences
from tests.localize.nets import text_of


@pytest.fixture
def pair() -> tuple[nn.Conv2d, nn.BatchNorm2d]:
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
    def told(self, pair, found, **settings) -> list[tuple[str, str]]:
        named = folded_differences(pair, ("conv", "bn"), found, **settings)
        return [(one.module, text_of(one)) for one in named]

    def test_what_is_folded_as_it_should_be_is_none(self, pair):
        assert self.told(pair, folded(*pair)) == []

    @pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3, bias=False), nn.Linear(6, 4)])
    def test_of_other_layers_too(self, pair, layer):
        assert self.told((layer, pair[1]), folded(layer, pair[1])) == []
        norm = nn.BatchNorm2d(4, affine=False).eval()
        norm.weight_, norm.bias_ = torch.ones(4), torch.zeros(4)
        found = {"w": layer.weight.detach().numpy() / np.sqrt(np.float32(1 + norm.eps))}
        assert self.told((layer, norm), found) == []

    @pytest.mark.parametrize("found", [{}, {"w": np.ones((2, 2), np.float32)}])
    def test_without_a_counterpart_nothing_is_said(self, pair, found):
        assert self.told(pair, found) == []

    def test_a_transposed_convolution_says_nothing(self, pair):
        layer = nn.ConvTranspose2d(4, 4, 3)
        assert self.told((layer, pair[1]), {"w": np.ones((4, 4, 3, 3), np.float32)}) == []

    def test_eps(self, pair):
        (difference,) = folded_differences(pair, ("conv", "bn"), folded(*pair, eps=1e-2))
        text = "the folded eps of bn is 0.01; the model has 1e-05"
        assert (difference.module, text_of(difference), difference.by_code) == ("bn", text, True)

    def test_the_scale(self, pair):
        found = folded(*pair)
        with torch.no_grad():
            pair[1].running_var.mul_(torch.tensor([1.2, 0.9, 1.1, 1.0]))
        assert self.told(pair, found) == [
            ("bn", "the folded scale of bn (weight, running_var, eps) differs from the model's")
        ]

    def test_the_offset(self, pair):
        found = folded(*pair)
        found["b"] = found["b"] + np.float32(0.1)
        assert self.told(pair, found) == [
            ("bn", "the folded offset of bn (bias, running_mean) differs from the model's")
        ]

    def test_the_layer_of_which_all_weights_are_larger(self, pair):
        """The offset is right: it was not the scale."""
        found = folded(*pair)
        found["w"] = found["w"] * np.float32(1.5)
        ((module, text),) = self.told(pair, found)
        assert (module, "108 of 108 elements" in text) == ("conv", True)

    def test_one_channel(self, pair):
        found = folded(*pair)
        found["w"][2] *= 3
        ((module, text),) = self.told(pair, found)
        assert (module, "27 of 108 elements" in text) == ("conv", True)

    def test_one_weight(self, pair):
        found = folded(*pair)
        found["w"][2, 1, 0, 0] += 1
        ((module, text),) = self.told(pair, found)
        assert (module, "1 of 108 elements" in text) == ("conv", True)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_a_weight_that_is_not_finite(self, pair, value):
        found = folded(*pair)
        found["w"][2, 1, 0, 0] = value
        ((module, text),) = self.told(pair, found)
        assert (module, "1 of 108 elements" in text) == ("conv", True)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_an_offset_that_is_not_finite(self, pair, value):
        found = folded(*pair)
        found["b"][2] = value
        ((module, text),) = self.told(pair, found)
        assert (module, "offset of bn" in text) == ("bn", True)

    def test_a_channel_of_zeros_is_no_difference(self, pair):
        with torch.no_grad():
            pair[0].weight[1] = 0
        assert self.told(pair, folded(*pair)) == []

    @pytest.mark.parametrize(
        ("name", "rounding"), [("float16", torch.Tensor.half), ("bfloat16", torch.Tensor.bfloat16)]
    )
    def test_rounded_before_or_after_folding(self, pair, name, rounding):
        conv, norm = pair
        after = folded(conv, norm)
        after["w"] = rounding(torch.from_numpy(after["w"])).float().numpy()
        text = f"conv.weight is rounded to {name} in the file"
        assert self.told(pair, after) == [("conv", f"{text}, after folding")]
        narrow = nn.Conv2d(3, 4, 3)
        narrow.load_state_dict(conv.state_dict())
        with torch.no_grad():
            narrow.weight.copy_(rounding(conv.weight).float())
        assert self.told(pair, folded(narrow, norm)) == [("conv", text)]

    def test_folded_in_float16(self, pair):
        """As an exporter folds a model that was made half: every step of it rounds."""
        conv, norm = pair
        half = [module.half() for module in (copy.deepcopy(conv), copy.deepcopy(norm))]
        assert self.told(pair, folded(*half)) != []
        assert self.told(pair, folded(*half), format_="float16") == []

    @pytest.mark.parametrize(
        ("change", "named", "text"),
        [
            (lambda conv, norm: conv.weight[1, 2, 0, 0].add_(1.0), "conv", "1 of 108 elements"),
            (lambda conv, norm: norm.running_var.mul_(1.1), "bn", "the folded scale of bn"),
            (lambda conv, norm: norm.bias.add_(0.1), "bn", "the folded offset of bn"),
        ],
    )
    def test_another_number_is_told_in_float16_too(self, pair, change, named, text):
        half = [copy.deepcopy(module) for module in pair]
        with torch.no_grad():
            change(*half)
        ((module, told),) = self.told(
            pair, folded(*(one.half() for one in half)), format_="float16"
        )
        assert (module, text in told) == (named, True)


def test_a_norm_whose_own_weight_and_bias_are_read_has_no_other_scale():
    """It computes its statistics itself, as in training: not even its scale is another one."""
    norm = nn.BatchNorm2d(4)
    nn.init.uniform_(norm.weight)
    nn.init.uniform_(norm.bias)
    weight, bias = (tensor.detach().numpy() for tensor in (norm.weight, norm.bias))
    assert affine_differences(norm, "bn", {"weight": weight, "bias": bias}) == []
    (told,) = affine_differences(norm, "bn", {"scale": weight * 2, "bias": bias})
    assert text_of(told).startswith("the scale of bn")


def test_a_norm_in_float16():
    norm = nn.BatchNorm2d(4).eval()
    torch.manual_seed(0)
    for tensor in (norm.weight, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    for tensor in (norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    ones = nn.Conv2d(4, 4, 1, bias=False)
    with torch.no_grad():
        ones.weight.fill_(1.0)
    made = folded(ones.half(), copy.deepcopy(norm).half())
    found = {"scale": made["w"][:, 0, 0, 0], "offset": made["b"]}
    assert affine_differences(norm, "bn", found) != []
    assert affine_differences(norm, "bn", found, format_="float16") == []
    (told,) = affine_differences(
        norm, "bn", {**found, "offset": made["b"] * np.float16(1.05)}, format_="float16"
    )
    assert text_of(told).startswith("the offset of bn")
