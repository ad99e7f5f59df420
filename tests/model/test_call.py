from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gate.errors import ModelError
from gate.model.forward_signature import ForwardSignature, is_plain, leaves

T = torch.zeros(2)


class Pair(NamedTuple):
    mean: Any
    spread: Any


@dataclass
class Boxes:
    corners: Any
    scores: Any = None


@pytest.mark.parametrize(
    ("returned", "names", "stated"),
    [
        (T, ["output"], False),
        ((T,), ["output_0"], False),
        ([T, T], ["output_0", "output_1"], False),
        ((T, None, T), ["output_0", "output_2"], False),
        ((T, [T, T]), ["output_0", "output_1.0", "output_1.1"], False),
        ({"foo": T, "bar": T}, ["foo", "bar"], True),
        (OrderedDict([("1", T), ("0", T)]), ["1", "0"], True),
        ({"a": {"b": T}, "c": (T, T)}, ["a.b", "c.0", "c.1"], True),
        ({"two words": T, 3: T}, ["two_words", "3"], True),
        (Pair(T, T), ["mean", "spread"], True),
        (
            [Pair(T, Boxes(T, T))],
            ["output_0.mean", "output_0.spread.corners", "output_0.spread.scores"],
            True,
        ),
        (Boxes(T), ["corners"], True),
        (torch.return_types.max((T, T)), ["output_0", "output_1"], False),
        (None, [], False),
        ({}, [], False),
    ],
)
def test_outputs_are_named_by_their_position(returned: Any, names: list[str], stated: bool):
    result = leaves(returned)
    assert [leaf.name for leaf in result] == names
    assert all(leaf.stated == stated for leaf in result)


def test_only_keys_state_a_name():
    result = leaves((T, [T, {"a": (T, T)}]))
    assert [(leaf.name, leaf.stated) for leaf in result] == [
        ("output_0", False),
        ("output_1.0", False),
        ("output_1.1.a.0", True),
        ("output_1.1.a.1", True),
    ]


@pytest.mark.parametrize("value", [1, 1.0, "text", object(), {1}, Boxes])
def test_output_that_is_not_a_tensor_is_refused(value: Any):
    for returned in (value, (T, value), {"a": T, "b": [value]}):
        with pytest.raises(ModelError, match="among its outputs"):
            leaves(returned)


@pytest.mark.parametrize("returned", [{"a.b": T, "a": {"b": T}}, {"a b": T, "a_b": T}])
def test_duplicate_output_names_are_refused(returned: Any):
    with pytest.raises(ModelError, match="two tensors with the name"):
        leaves(returned)


def nested(least: int) -> Any:
    keys = st.text("abc", min_size=1, max_size=2)
    return st.recursive(
        st.just(T),
        lambda inner: (
            st.dictionaries(keys, inner, min_size=least, max_size=3)
            | st.lists(inner, min_size=least, max_size=3)
            | st.tuples(inner, inner)
        ),
        max_leaves=8,
    )


@given(nested(0))
def test_output_names_are_unique_without_whitespace(returned: Any):
    names = [leaf.name for leaf in leaves(returned)]
    assert len(set(names)) == len(names)
    assert all(name and not any(char.isspace() for char in name) for name in names)


@given(st.dictionaries(st.text("xyz", min_size=1, max_size=3), nested(1), min_size=1, max_size=4))
def test_leaves_and_call_are_inverse(returned: dict[str, Any]):
    tensors = {leaf.name: torch.ones(1) * index for index, leaf in enumerate(leaves(returned))}
    observed = {}
    model = module(lambda **arguments: observed.update(arguments))
    used = {name.partition(".")[0] for name in tensors}
    model.forward.__signature__ = signature(*used)
    ForwardSignature(model, tuple(tensors))(model, list(tensors.values()))
    assert {leaf.name: float(leaf.tensor) for leaf in leaves(observed)} == {
        name: float(tensor) for name, tensor in tensors.items()
    }


def signature(*names: str) -> Any:
    from inspect import Parameter, Signature

    return Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])


def module(function: Any) -> nn.Module:
    model = nn.Module()
    model.forward = function
    return model


A, B, C = (torch.full((1,), float(value)) for value in range(3))


def typed(boxes: Boxes, pair: Pair, several: list[torch.Tensor]) -> Any:
    return boxes, pair, several


@pytest.mark.parametrize(
    ("function", "names", "expected"),
    [
        (lambda a, b: (a, b), ("a", "b"), (A, B)),
        (lambda b, a, extra=None: (a, b), ("a", "b"), (A, B)),
        (lambda *, a, b: (a, b), ("a", "b"), (A, B)),
        (lambda y, x: (y, x), ("a", "b"), (A, B)),
        (lambda a, other: (a, other), ("a", "b"), (A, B)),
        (lambda a, b, /: (a, b), ("b", "a"), (A, B)),
        (lambda *arguments: arguments, ("a", "b"), (A, B)),
        (lambda batch: batch, ("batch.image", "batch.mask"), {"image": A, "mask": B}),
        (lambda x, batch: (x, batch), ("batch.image", "x"), (B, {"image": A})),
        (lambda pair: pair, ("pair.0", "pair.1"), (A, B)),
        (lambda deep: deep, ("deep.a.b", "deep.c"), {"a": {"b": A}, "c": B}),
        (lambda input: input, ("input.1",), A),
        (lambda input, b: (input, b), ("input.1", "b"), (A, B)),
        (lambda a: a, ("a",), A),
    ],
)
def test_names_are_bound_to_arguments(function: Any, names: tuple[str, ...], expected: Any):
    model = module(function)
    assert ForwardSignature(model, names)(model, [A, B][: len(names)]) == expected


def test_annotated_structures_are_built():
    model = module(typed)
    names = ("boxes.corners", "pair.mean", "pair.spread", "several.0")
    boxes, pair, several = ForwardSignature(model, names)(model, [A, B, C, A])
    assert (boxes, pair, several) == (Boxes(A), Pair(B, C), [A])


def test_hooks_of_the_model_get_its_arguments_by_position():
    model = module(lambda a, b=0, *, c: (a, b, c))
    model.register_forward_pre_hook(lambda _, args: (args[0] + 1, *args[1:]))
    assert ForwardSignature(model, ("c", "b", "a"))(model, [A, B, C]) == (C + 1, B, A)
    assert ForwardSignature(model, ("a", "c"))(model, [A, C]) == (A + 1, 0, C)


def test_first_matching_names_are_used():
    model = module(lambda p, q: (p, q))
    assert ForwardSignature(model, ("a", "b"), ("q", "p"))(model, [A, B]) == (B, A)


def test_forward_without_signature_is_called_by_position():
    model = module(dict)
    assert ForwardSignature(model, ("x",))(model, [[("a", 1)]]) == {"a": 1}


@pytest.mark.parametrize(
    ("function", "names", "plain"),
    [
        (lambda a, b: None, ("a", "b"), True),
        (lambda a, b=None: None, ("a",), True),
        (lambda a, b: None, ("b", "a"), False),
        (lambda a, *, b: None, ("a", "b"), False),
        (lambda a, b=None, c=None: None, ("a", "c"), False),
        (lambda a: None, ("a.x", "a.y"), False),
        (lambda *a: None, ("x", "y"), True),
    ],
)
def test_plain_call_is_positional(function: Any, names: tuple[str, ...], plain: bool):
    assert ForwardSignature(module(function), names).plain == plain


def test_names_are_sorted_like_forward():
    call = ForwardSignature(module(lambda a, b, *, c: None), ("c", "b.y", "a", "b.x"))
    assert call.sorted(("c", "b.y", "a", "b.x")) == ("a", "b.y", "b.x", "c")
    assert ForwardSignature(module(lambda *x: None), ("c", "a")).sorted(("c", "a")) == ("c", "a")


@pytest.mark.parametrize(
    ("returned", "plain"),
    [
        (T, True),
        ((T, (T,)), True),
        ([T], False),
        ({"a": T}, False),
        (Pair(T, T), False),
        (None, False),
    ],
)
def test_plain_outputs_are_tensors_or_tuples(returned: Any, plain: bool):
    assert is_plain(returned) == plain


class NestedArguments(nn.Module):
    """Return the arguments."""

    def forward(
        self,
        boxes: list[Pair],
        levels: dict[str, list[torch.Tensor]],
        both: tuple[Boxes, list[torch.Tensor]] | None = None,
    ) -> Any:
        return boxes, levels, both


def test_nested_annotations_are_used():
    names = ["boxes.0.mean", "boxes.0.spread", "levels.low.0", "both.0.corners", "both.0.scores",
             "both.1.0"]  # fmt: skip
    boxes, levels, pair = ForwardSignature(NestedArguments(), names)(
        NestedArguments(), [T] * len(names)
    )
    assert boxes == [Pair(T, T)]
    assert type(levels["low"]) is list
    assert type(pair) is tuple
    assert isinstance(pair[0], Boxes)
    assert type(pair[1]) is list


def test_structured_and_keyword_only_arguments():
    class Some(nn.Module):
        def forward(self, x, parts, *, last: torch.Tensor | None = None):
            return x

    call = ForwardSignature(Some(), ["x", "parts.0", "last"])
    assert call.structured == {"parts": None}
    assert call.keyword_only == ("last",)
    assert call.takes_none
    plain = ForwardSignature(nn.Linear(2, 2), ["input"])
    assert (plain.structured, plain.keyword_only, plain.takes_none) == ({}, (), False)
