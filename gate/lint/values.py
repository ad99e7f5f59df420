"""Abstract values of tensors, shapes and Python objects, as far as the source determines them."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gate.lint.source import Definition


class Kind(Enum):
    """The kind of a value while the model runs."""

    TENSOR = "tensor"
    TENSORS = "tuple or list of tensors"
    SHAPE = "torch.Size"
    SIZE = "number of a shape"
    DICT = "dict"
    PYTHON = "anything else, the same for every input"
    UNKNOWN = "not known"


class _Nothing(Enum):
    NOTHING = "not known"


NOTHING = _Nothing.NOTHING
"""Stands for an object that is not known (None is an object)."""

_CONDITIONS = (bool, int, float, str, list, tuple, dict, set, frozenset, type(None), nn.Module)
"""Objects whose truth does not depend on the input."""

_MAX_ITEMS = 16
"""Items of a list that are looked at."""


class Rank(NamedTuple):
    """A number of axes: `offset` more than those of an argument (`base`); base 0: than none."""

    base: int
    offset: int

    def below(self, other: Rank | None) -> bool:
        """True if it is known to be smaller."""
        return other is not None and self.base == other.base and self.offset < other.offset


SCALAR = Rank(0, 0)


def shift(rank: Rank | None, axes: int) -> Rank | None:
    """Return the rank with this many axes more; None if unknown."""
    return None if rank is None else Rank(rank.base, rank.offset + axes)


@dataclass(eq=False)
class Value:
    """An abstract value. It is compared by identity, so two names of a size share one."""

    kind: Kind
    object: Any = NOTHING
    """The object itself, for attributes and globals of the model."""
    fixed: bool = False
    """A tensor that is computed from weights alone."""
    rank: Rank | None = None
    """Rank of a tensor."""
    unit: bool = False
    """True for a tensor that was made with an axis of size 1."""
    lowered: bool = False
    """A tensor from which something was subtracted: it may be negative."""
    mask: bool = False
    """A tensor of bools."""
    truth: bool = False
    """True for the bool that `not`, `and`, `or` or `bool` makes of a tensor."""
    read: bool = False
    """A Python value that was read from a tensor."""
    flag: str | None = None
    """Name of the function that returns the value, if it is true only during an export."""
    loop: bool = False
    """An iterable whose length depends on the input's size."""
    axis: int | None = None
    """Axis of a size, or the first axis of a shape."""
    shape: Value | None = None
    """The shape that a size belongs to."""
    items: dict[int, Value] = field(default_factory=dict)
    """Sizes taken from a shape, or items of a tuple, list or dict."""

    @property
    def tensor(self) -> bool:
        """True for a tensor."""
        return self.kind is Kind.TENSOR

    @property
    def sized(self) -> bool:
        """True for a shape, and for a number of one."""
        return self.kind in (Kind.SHAPE, Kind.SIZE)

    @property
    def elements(self) -> torch.Tensor | None:
        """Elements that can be read; None on the meta device."""
        readable = isinstance(self.object, torch.Tensor) and not is_lazy(self.object)
        return self.object if readable and not self.object.is_meta else None

    @property
    def constant(self) -> bool:
        """True for a tensor that is the same for every input: a literal, a weight, what is
        computed from these."""
        return self.fixed or isinstance(self.object, torch.Tensor)

    @property
    def computed(self) -> bool:
        """True for a tensor that depends on the input."""
        return self.tensor and not self.constant

    @property
    def decided(self) -> bool | None:
        """Truth value, if it is the same for every input; else None."""
        if self.object is NOTHING or self.flag:
            return None
        if isinstance(self.object, torch.Tensor):
            elements = self.elements
            return bool(elements) if elements is not None and elements.numel() == 1 else None
        if isinstance(self.object, _CONDITIONS):
            return bool(self.object)
        return True if callable(self.object) else None


PYTHON = Value(Kind.PYTHON)
"""A Python value that does not depend on the input."""

UNKNOWN = Value(Kind.UNKNOWN)
"""A value that no rule applies to."""


def tensor(rank: Rank | None = None, **facts: Any) -> Value:
    """Return a tensor whose elements are not known."""
    return Value(Kind.TENSOR, rank=rank, **facts)


def from_object(obj: Any) -> Value:
    """Return the value of an attribute, a global, a default; NOTHING is unknown."""
    if obj is NOTHING:
        return UNKNOWN
    if isinstance(obj, torch.Tensor):
        if is_lazy(obj):
            return tensor(object=obj)
        return tensor(Rank(0, obj.dim()), object=obj, unit=1 in obj.shape)
    if isinstance(obj, torch.Size):
        return Value(Kind.PYTHON, object=tuple(obj))
    tensors = isinstance(obj, list | tuple) and obj and all(map(torch.is_tensor, obj))
    return Value(Kind.TENSORS if tensors else Kind.PYTHON, object=obj)


def common_axis(sizes: Iterable[Value]) -> int | None:
    """Return the axis of sizes: the batch axis if one is of it; None if unknown."""
    axes = {size.axis for size in sizes}
    if 0 in axes:
        return 0
    return axes.pop() if len(axes) == 1 else None


def ranks_differ(left: Value, right: Value) -> bool:
    """True for two tensors that are known to have different numbers of axes."""
    if left.rank is None or right.rank is None:
        return False
    return left.rank.base == right.rank.base and left.rank != right.rank


def join(values: Iterable[Value]) -> Value:
    """Return the properties that all values share, for example after two branches or a loop."""
    return functools.reduce(_join, values)


def _join(left: Value, right: Value) -> Value:
    if left is right:
        return left
    kinds = {left.kind, right.kind}
    if kinds == {Kind.TENSOR}:
        return tensor(
            left.rank if left.rank == right.rank else None,
            unit=left.unit and right.unit,
            mask=left.mask and right.mask,
            lowered=left.lowered or right.lowered,
            fixed=left.constant and right.constant,
        )
    if kinds == {Kind.PYTHON}:
        same = left.object is right.object and left.object is not NOTHING
        return left if same else Value(Kind.PYTHON, read=left.read or right.read)
    if len(kinds) == 1:
        return Value(left.kind, axis=left.axis if left.axis == right.axis else None)
    plain, rest = (left, right) if left.kind is Kind.PYTHON else (right, left)
    number = plain.object is None or isinstance(plain.object, int | float)
    if plain.kind is Kind.PYTHON and number:
        # `mask = None` or `total = 0` before it becomes a tensor.
        return replace(rest, object=NOTHING, rank=None)
    return UNKNOWN


def item(value: Value, position: int | None) -> Value:
    """Return the item at a position, as `[position]` or unpacking does; None: any item.

    Each access of an axis of a shape returns the same value.
    """
    if value.kind is Kind.SHAPE:
        if position is None:
            return Value(Kind.SIZE, axis=value.axis, shape=value)
        axis = None if value.axis is None else position + value.axis
        return value.items.setdefault(position, Value(Kind.SIZE, axis=axis, shape=value))
    if position in value.items:
        return value.items[position]
    if position is None and value.items:
        return join(value.items.values())
    if value.kind is Kind.TENSOR or (value.kind is Kind.TENSORS and value.object is NOTHING):
        return tensor(fixed=value.constant)
    return UNKNOWN if value.object is NOTHING else _item_of_object(value.object, position)


def _item_of_object(container: Any, position: int | None) -> Value:
    if isinstance(container, nn.Module):
        container = list(container.children())
        position = position or 0  # each child is read by itself, too
    if not isinstance(container, list | tuple):
        return PYTHON
    if position is not None and -len(container) <= position < len(container):
        return from_object(container[position])
    return join(map(from_object, container[:_MAX_ITEMS])) if container else UNKNOWN


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call.

    `spread`: `*items` or `**items` are among them, so positions are unsure.
    """

    positional: tuple[Value, ...] = ()
    keywords: dict[str, Value] = field(default_factory=dict)
    spread: bool = False

    @property
    def all(self) -> tuple[Value, ...]:
        """Positional ones, then keywords."""
        return (*self.positional, *self.keywords.values())

    @property
    def first(self) -> Value:
        """The first positional argument; without one, an empty list."""
        return self.positional[0] if self.positional else from_object([])

    @property
    def signature(self) -> tuple[Any, ...]:
        """Return a key: calls of equal keys have the same findings."""
        key: list[Any] = [self.spread]
        for name, value in [*enumerate(self.positional), *sorted(self.keywords.items())]:
            plain = isinstance(value.object, bool | int | float | str | type(None))
            kinds = tuple(part.kind for part in value.items.values())
            obj = value.object if plain else id(value.object)
            key.append((name, value.kind, obj, value.rank, kinds))
        return tuple(key)

    def after(self, *values: Value) -> Arguments:
        """Return the arguments with these in front."""
        return replace(self, positional=(*values, *self.positional))

    def get(self, position: int | None, name: str) -> Value | None:
        """Return an argument by name or position; None if it was not passed, or may not be."""
        if name in self.keywords:
            return self.keywords[name]
        if position is None or self.spread or position >= len(self.positional):
            return None
        return self.positional[position]


@dataclass(frozen=True)
class Method:
    """`x.sum` of a tensor, or `x.shape.numel` of a shape, before it is called."""

    owner: Value
    name: str


# --- parameters -----------------------------------------------------------------------------------


def parameters(definition: Definition) -> list[ast.arg]:
    """Return the parameters that may be passed by position."""
    return [*definition.args.posonlyargs, *definition.args.args]


def bind(
    definition: Definition,
    function: FunctionType | None,
    arguments: Arguments | None,
    owner: Value | None = None,
) -> dict[str, Value]:
    """Return the values of a function's parameters by name: as passed, else the defaults.

    arguments: None if no call of the function was read; then annotations and defaults determine the
    values, and the first parameter is `owner`.
    """
    defaults, hints = default_values(function), type_hints(function)
    positional = parameters(definition)
    names = {}
    for position, parameter in enumerate([*positional, *definition.args.kwonlyargs]):
        name = parameter.arg
        default, declared = defaults.get(name, NOTHING), annotated(hints.get(name))
        if arguments is None:
            first = owner if position == 0 else None
            names[name] = first or declared or _undeclared(default)
            continue
        passed = arguments.get(position if position < len(positional) else None, name)
        if passed is None and (arguments.spread or default is NOTHING):
            passed = declared or UNKNOWN
        names[name] = passed or from_object(default)
    if definition.args.vararg:
        rest = () if arguments is None else arguments.positional[len(positional) :]
        tensors = arguments is None or (rest and all(value.tensor for value in rest))
        kind = Kind.TENSORS if tensors else Kind.UNKNOWN
        names[definition.args.vararg.arg] = Value(kind, items=dict(enumerate(rest)))
    if definition.args.kwarg:
        names[definition.args.kwarg.arg] = UNKNOWN
    return names


def default_values(function: FunctionType | None) -> dict[str, Any]:
    """Return the defaults of a function's parameters by name."""
    if function is None:
        return {}
    signature = inspect.signature(function, follow_wrapped=False).parameters.values()
    return {each.name: each.default for each in signature if each.default is not each.empty}


def _undeclared(default: Any) -> Value:
    """Return the value of a parameter without a usable annotation."""
    if default is NOTHING:
        return _argument()
    # A default of None may stand for a tensor or for a number: nothing is known.
    return UNKNOWN if default is None else Value(from_object(default).kind)


_ids = itertools.count(1)


def _argument() -> Value:
    """Return a tensor whose unknown rank is equal only to itself."""
    return tensor(Rank(next(_ids), 0))


def type_hints(function: FunctionType | None) -> dict[str, Any]:
    """Return the types that a function's annotations name, those in quotes too."""
    hints: dict[str, Any] = {}
    for name, written in getattr(function, "__annotations__", {}).items():
        holder = types.SimpleNamespace(__annotations__={name: written})
        try:
            hints |= typing.get_type_hints(holder, getattr(function, "__globals__", {}))
        except SyntaxError:
            continue
        except Exception:  # mostly a name that is imported for type checkers alone
            hints[name] = torch.Tensor if str(written).endswith("Tensor") else object
    return hints


_KINDS: tuple[tuple[Any, Kind], ...] = (
    (torch.Tensor, Kind.TENSOR),
    (torch.Size, Kind.SHAPE),
    (int | float | str, Kind.PYTHON),
    (Mapping, Kind.DICT),
    (Sequence, Kind.TENSORS),
)


def annotated(hint: Any) -> Value | None:
    """Return the value that an annotation describes; None if it is not usable."""
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is type(None) or origin is typing.Literal:
        return from_object(None) if hint is type(None) else PYTHON
    if _is_union(origin):
        present = [value for part in parts if part is not type(None) and (value := annotated(part))]
        if not present:
            return None
        joined = join(present)
        return UNKNOWN if type(None) in parts and not joined.tensor else joined
    if hint is typing.Any or not isinstance(origin, type):
        return None
    origin = Sequence if origin is Iterable else origin
    kind = next((kind for cls, kind in _KINDS if issubclass(origin, cls)), Kind.UNKNOWN)
    inside = map(annotated, parts)
    if kind is Kind.TENSORS and not any(value and value.tensor for value in inside):
        kind = Kind.PYTHON
    return _argument() if kind is Kind.TENSOR else Value(kind)


def _is_union(origin: Any) -> bool:
    return origin is typing.Union or origin is types.UnionType


def is_text(hint: Any) -> bool:
    """True for an annotation that is `str`, or a choice of texts."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return isinstance(parts[0], str)
    return hint is str or (_is_union(origin) and parts[0] is str)
