"""What a chain takes from a file has the form of what it takes from the module."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from gate.errors import OutputMismatch
from gate.model.forward_signature import leaves
from gate.multi_file.chain_model import restore_structure


class Named(NamedTuple):
    feat: Any
    mask: Any = None


@dataclass(frozen=True)
class Fields:
    feat: Any
    mask: Any = None


A, B = torch.zeros(2), torch.ones(3)


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
def test_only_the_tensors_are_others(form: Any) -> None:
    outputs = [leaf.tensor + 5 for leaf in leaves(form)]
    made = restore_structure(form, outputs, part="p")
    assert _shape(made) == _shape(form)
    assert all(leaf.tensor is output for leaf, output in zip(leaves(made), outputs, strict=True))


def _shape(form: Any) -> Any:
    if form is None or isinstance(form, torch.Tensor):
        return type(form)
    values = form.values() if isinstance(form, dict) else form
    values = vars(form).values() if isinstance(form, Fields) else values
    return type(form), [*map(_shape, values)], list(form) if isinstance(form, dict) else None


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_tensors_is_a_mismatch(count: int) -> None:
    with pytest.raises(OutputMismatch, match=f"gives {count} outputs, the module 2: x, y"):
        restore_structure({"x": A, "y": B}, [A] * count, part="p")
