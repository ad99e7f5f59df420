"""However a chain writes a call, its tensors go to the same inputs of the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gate.errors import ModelError
from gate.multi_file.chain_model import Parameters, bound

A, B = torch.zeros(2), torch.ones(2)


class Takes(nn.Module):
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
def test_tensors_come_in_the_order_of_forward(
    given: tuple[Any, ...], named: dict[str, Any], names: list[str]
) -> None:
    found = Parameters.from_module(Takes()).tensors(given, named, part="one")
    assert [leaf.name for leaf in found] == names


def test_a_signature_that_nobody_can_read() -> None:
    module = nn.Module()
    module.forward = torch.add
    found = Parameters.from_module(module).tensors((A,), {"other": B}, part="one")
    assert [leaf.name for leaf in found] == ["input_0", "other"]


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (3, "int 3 as 'mask'"),
        (np.zeros(2), "ndarray array.* as 'mask'"),
        ("mean", "str 'mean' as 'mask'"),
        ({"a": (A, True)}, "dict .*as 'mask'"),
        (np.zeros((9, 9)), "ndarray as 'mask'"),
    ],
    ids=str,
)
def test_what_is_no_tensor_is_named(given: Any, seen: str) -> None:
    with pytest.raises(ModelError, match=f"the part one {seen}: a file takes tensors alone"):
        Parameters.from_module(Takes()).tensors((A, given), {}, part="one")


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
def test_by_name_where_all_are_there(
    names: tuple[str, ...], wanted: tuple[str, ...], places: list[int]
) -> None:
    assert bound(names, wanted) == places
