"""Arguments of a part are matched to the inputs of its file, and outputs keep their structure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from gate.model.forward_signature import leaves
from gate.multi_file.chain_model import Parameters, match_inputs, restore_structure

A, B = torch.zeros(2), torch.ones(2)


class ImageModule(nn.Module):
    def forward(self, image: torch.Tensor, mask: Any, *more: torch.Tensor, bias: Any = None) -> Any:
        return image


@pytest.mark.parametrize(
    ("given", "named", "names"),
    [
        ((A, B), {}, ["image", "mask"]),
        ((), {"mask": B, "image": A}, ["image", "mask"]),
        ((A,), {"bias": A, "mask": B}, ["image", "mask", "bias"]),
        ((A, None, B), {"bias": A}, ["image", "input_2", "bias"]),
        ((A, {"one": B, "two": (A, B)}), {}, ["image", "mask.one", "mask.two.0", "mask.two.1"]),
        ((A,), {"unheard": A, "mask": B}, ["image", "mask", "unheard"]),
    ],
)
def test_tensors_follow_the_order_of_forward(
    given: tuple[Any, ...], named: dict[str, Any], names: list[str]
) -> None:
    result = Parameters.from_module(ImageModule()).tensors(given, named, part="one")
    assert [leaf.name for leaf in result] == names


@pytest.mark.parametrize(
    ("names", "wanted", "places"),
    [
        (("image", "mask"), ("mask", "image"), [1, 0]),
        (("image", "mask"), ("image",), [0]),
        (("image", "mask"), ("x", "y"), [0, 1]),
        (("image", "mask"), ("x", "image"), [0, 1]),
        (("image", "mask"), ("x",), [0, 1]),
        (("image",), (), [0]),
    ],
)
def test_arguments_are_matched_by_name(
    names: tuple[str, ...], wanted: tuple[str, ...], places: list[int]
) -> None:
    assert match_inputs(names, wanted) == places


class Named(NamedTuple):
    feat: Any
    mask: Any = None


@dataclass(frozen=True)
class Fields:
    feat: Any
    mask: Any = None


@pytest.mark.parametrize(
    "form",
    [
        A,
        (A, B),
        [A, B],
        (A, None, B),
        (A, (B, A)),
        [A, (B, [A, None])],
        {"x": A, "y": None},
        {"x": (A, B)},
        {"x": {"y": A}},
        OrderedDict(x=A, y=[B]),
        Named(A, B),
        Named(A),
        Fields(A, B),
        Fields((A, {"deep": B})),
        (Named(A), Fields(B)),
    ],
    ids=repr,
)
def test_output_structure_is_kept(form: Any) -> None:
    outputs = [leaf.tensor + 5 for leaf in leaves(form)]
    created = restore_structure(form, outputs, part="p")
    assert _shape(created) == _shape(form)
    assert all(leaf.tensor is output for leaf, output in zip(leaves(created), outputs, strict=True))


def _shape(form: Any) -> Any:
    if form is None or isinstance(form, torch.Tensor):
        return type(form)
    values = form.values() if isinstance(form, dict) else form
    values = vars(form).values() if isinstance(form, Fields) else values
    return type(form), [*map(_shape, values)], list(form) if isinstance(form, dict) else None
