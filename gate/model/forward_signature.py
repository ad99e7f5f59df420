"""Map structured inputs and outputs to flat named tensors."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from gate.errors import ModelError

# Outputs of forward are named by their position in its return value:
#
#     tensor                                output
#     (a, b), [a, b]                        output_0, output_1
#     {"foo": a, "bar": b}                  foo, bar          in the order of the dict
#     dataclass, named tuple                its fields, in their order
#     {"foo": (a, {"deep": b})}             foo.0, foo.1.deep
#
# Arguments of forward are built from the same dotted names: `batch.image` and `batch.mask` become
# `forward(batch={"image": ..., "mask": ...})`, and `pair.0`, `pair.1` the tuple `pair`.
_OUTPUT = "output"

_WHITESPACE = re.compile(r"\s+")

Tree = dict[str, Any]
"""Maps keys to indices of tensors or to subtrees."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of the return value of forward."""

    name: str
    """The dotted name; white space in keys becomes `_`."""
    stated: bool
    """True if the name contains a key or field, not only positions."""
    tensor: torch.Tensor


def leaves(returned: Any, *, by: str = "the model's forward") -> list[Leaf]:
    """Return the tensors of nested mappings, dataclasses, named tuples, tuples and lists in order.

    Drops None, as exporters do. Raises ModelError for any other type, and for two tensors with the
    same name. `by`: the caller for the error message.
    """
    try:
        return _leaves(returned)
    except _NoTensor as error:
        raise ModelError(f"{by} returned {error}") from error


class _NoTensor(Exception):
    """Raised for an output that is not a tensor."""


def _leaves(returned: Any) -> list[Leaf]:
    if isinstance(returned, torch.Tensor):
        return [Leaf(_OUTPUT, False, returned)]
    fields = _fields(returned)
    stated = fields is not None
    if fields is None:
        fields = {f"{_OUTPUT}_{index}": item for index, item in enumerate(_items(returned))}
    tensors = [
        leaf for key, value in fields.items() for leaf in _named_leaves(key, value, stated=stated)
    ]
    names = [leaf.name for leaf in tensors]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise _NoTensor(f"two tensors with the name {repeated[0]}. Use different keys.")
    return tensors


def is_plain(returned: Any) -> bool:
    """Return True for values that a traced module can return: tensors in tuples."""
    if type(returned) is tuple:
        return all(is_plain(value) for value in returned)
    return isinstance(returned, torch.Tensor)


def _named_leaves(prefix: str, value: Any, *, stated: bool) -> Iterator[Leaf]:
    if isinstance(value, torch.Tensor):
        yield Leaf(_WHITESPACE.sub("_", prefix), stated, value)
        return
    fields = _fields(value)
    stated = stated or fields is not None
    if fields is None:
        fields = {str(index): item for index, item in enumerate(_items(value))}
    for key, item in fields.items():
        yield from _named_leaves(f"{prefix}.{key}", item, stated=stated)


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the named fields of a value, or None if it has only positions."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _items(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, tuple | list):
        return value
    raise _NoTensor(
        f"{type(value).__name__} among its outputs. Expected tensors, in tuples, lists, dicts or "
        "dataclasses. Return only these, or wrap the model if you can't change its code."
    )


def parameters(model: nn.Module) -> tuple[str, ...] | None:
    """Return the keyword names of forward, in order.

    None if it accepts any number of arguments (`*inputs`, `**inputs`) or if its signature can't be
    read.
    """
    kinds = _kinds(model)
    return None if kinds is None or kinds & _VARIABLE else tuple(_signature(model)[0])


_VARIABLE = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _kinds(model: nn.Module) -> set[Any] | None:
    try:
        return {p.kind for p in inspect.signature(model.forward).parameters.values()}
    except (TypeError, ValueError):
        return None


class ForwardSignature:
    """How tensors in a fixed order become the arguments of a model's forward.

    By keyword if the first parts of all names are parameters of forward, else by position. With
    `**kwargs` all other names count as parameters, too, if at least one parameter matches or
    forward has no others.
    """

    def __init__(self, model: nn.Module, *candidates: Sequence[str]) -> None:
        """`candidates`: lists of tensor names in order. The first list that matches is used."""
        self._parameters, self._hints = _signature(model)
        self._tree: Tree | None = None
        any_name = (_kinds(model) or set()) & _VARIABLE == {inspect.Parameter.VAR_KEYWORD}
        for names in candidates:
            tree = _tree(names)
            if tree is not None and self._accepts(tree.keys(), any_name=any_name):
                self._tree = tree
                self._parameters |= {n: False for n in tree if n not in self._parameters}
                break

    def _accepts(self, names: Set[str], *, any_name: bool) -> bool:
        stated = self._parameters.keys()
        return stated >= names or (any_name and (not stated or bool(stated & names)))

    @property
    def plain(self) -> bool:
        """Return whether the tensors in order are the first positional arguments of forward."""
        if self._tree is None:
            return True
        is_flat = all(isinstance(subtree, int) for subtree in self._tree.values())
        first = [name for name, positional in self._parameters.items() if positional]
        return is_flat and list(self._tree) == first[: len(self._tree)]

    @property
    def structured(self) -> dict[str, Any]:
        """Return the arguments that consist of several tensors, with annotation or None."""
        tree = self._tree or {}
        return {n: self._hints.get(n) for n, item in tree.items() if not isinstance(item, int)}

    @property
    def keyword_only(self) -> tuple[str, ...]:
        """Return the keyword-only arguments of forward."""
        return tuple(name for name in self._tree or {} if not self._parameters[name])

    @property
    def takes_none(self) -> bool:
        """Return True if the annotation of an argument allows None."""
        return any(_without_none(self._hints.get(n)) is not self._hints.get(n)
                   for n in self._parameters)  # fmt: skip

    def sorted(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return `names` in the order of forward's parameters; unchanged for positional
        arguments."""
        if self._tree is None:
            return tuple(names)
        order = list(self._parameters)
        return tuple(sorted(names, key=lambda name: order.index(name.partition(".")[0])))

    def __call__(self, model: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Return the outputs of `model` for `tensors`. Raises whatever it raises."""
        if self._tree is None:
            return model(*tensors)
        keywords = {
            name: _argument(subtree, tensors, self._hints.get(name))
            for name, subtree in self._tree.items()
        }
        # By position as far as possible: hooks of the model do not see keywords.
        first = takewhile(lambda n: n in keywords and self._parameters[n], self._parameters)
        return model(*[keywords.pop(name) for name in first], **keywords)


def _tree(names: Sequence[str]) -> Tree | None:
    """Return dotted names as nested dicts. None if a name is also a prefix of another, or if
    numbers do not count from 0 (exporters invent names such as `input.1`)."""
    tree: Tree = {}
    for index, name in enumerate(names):
        *path, last = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
            if not isinstance(branch, dict):
                return None
        if last in branch:
            return None
        branch[last] = index
    return tree if _has_consecutive_numbers(tree) else None


def _has_consecutive_numbers(tree: Tree) -> bool:
    branches = [branch for branch in tree.values() if isinstance(branch, dict)]
    for branch in branches:
        numbers = [key for key in branch if key.isdecimal()]
        if numbers and set(branch) != {str(number) for number in range(len(branch))}:
            return False
    return all(map(_has_consecutive_numbers, branches))


def _argument(subtree: int | Tree, tensors: Sequence[torch.Tensor], hint: Any) -> Any:
    """Return a tensor or the structure of the tree, recursively: a list if the annotation is a
    list, else a tuple; the annotated dataclass or named tuple, else a dict."""
    if isinstance(subtree, int):
        return tensors[subtree]
    hint = _without_none(hint)
    if all(key.isdecimal() for key in subtree):
        items = [
            _argument(subtree[str(number)], tensors, _item_hint(hint, number))
            for number in range(len(subtree))
        ]
        return items if typing.get_origin(hint) is list or hint is list else tuple(items)
    fields = {key: _argument(item, tensors, _item_hint(hint, key)) for key, item in subtree.items()}
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")):
        return hint(**fields)
    return fields


def _without_none(hint: Any) -> Any:
    """Return `X` for `Optional[X]`; other annotations are unchanged."""
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    optional = typing.get_origin(hint) in (typing.Union, types.UnionType) and len(members) == 1
    return members[0] if optional else hint


def _item_hint(hint: Any, key: int | str) -> Any:
    """Return the annotation of an item of a list, tuple or mapping, or of a field, or None."""
    inner = typing.get_args(hint)
    if isinstance(key, int):
        if typing.get_origin(hint) is tuple and inner[-1:] != (...,):
            return inner[key] if key < len(inner) else None
        return inner[0] if inner else None
    if inner:
        return inner[-1]  # for a mapping: after the type of its keys
    try:
        return typing.get_type_hints(hint).get(key)
    except Exception:  # not a class, or annotations with unknown names
        return None


def _signature(model: nn.Module) -> tuple[dict[str, bool], dict[str, Any]]:
    """Return keyword names of forward, whether they are also positional, and their annotations."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return {}, {}
    named = {
        p.name: p.kind is p.POSITIONAL_OR_KEYWORD
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    try:
        return named, typing.get_type_hints(model.forward)
    except Exception:  # annotations may use names that are imported for type checkers only
        return named, {}


class PositionalModel(nn.Module):
    """A model with positional tensors as inputs and a tuple of tensors as output."""

    def __init__(self, model: nn.Module, call: ForwardSignature) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the model."""
        return tuple(leaf.tensor for leaf in leaves(self._call(self.model, tensors)))
