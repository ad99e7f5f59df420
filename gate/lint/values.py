"""What is known of a value without computing it: tensor or number, and a little of its shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch.nn.parameter import is_lazy


class Kind(Enum):
    """What a value is while the model runs."""

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

_ids = itertools.count(1)


@dataclass(frozen=True)
class Rank:
    """A number of axes: `offset` more than those of an argument (`base`); base 0: than none."""

    base: int
    offset: int

    @classmethod
    def new(cls) -> Rank:
        """The rank of an argument: not known, but equal to itself."""
        return cls(next(_ids), 0)

    def plus(self, axes: int) -> Rank:
        """With so many axes more."""
        return Rank(self.base, self.offset + axes)

    def below(self, other: Rank | None) -> bool:
        """True if it is known to be smaller."""
        return other is not None and self.base == other.base and self.offset < other.offset


@dataclass(eq=False)
class StaticValue:
    """Compared by identity: two names of one size are one value."""

    kind: Kind
    object: Any = NOTHING
    """The object itself, where the model's own attributes and globals tell it."""
    fixed: bool = False
    """A tensor that is computed from weights alone."""
    rank: Rank | None = None
    """Of a tensor."""
    unit: bool = False
    """A tensor that has an axis of size 1 by the way it was made."""
    lowered: bool = False
    """A tensor from which something was subtracted: it may be negative."""
    mask: bool = False
    """A tensor of bools."""
    truth: bool = False
    """What Python made of a tensor, by `not`, `and`, `or`, `bool`: no tensor, but True or False."""
    read: bool = False
    """A Python value that was read from a tensor."""
    flag: str | None = None
    """True only while the model is exported: the name of the function that tells."""
    loop: bool = False
    """Something to loop over whose length depends on the input's size."""
    axis: int | None = None
    """Of a size; of a shape: its first axis."""
    shape: StaticValue | None = None
    """The shape that a size belongs to."""
    items: dict[int, StaticValue] = field(default_factory=dict)
    """What was taken from a shape by index, or the items of a tuple, list or dict."""

    @property
    def tensor(self) -> bool:
        """True for a tensor."""
        return self.kind is Kind.TENSOR

    @property
    def elements(self) -> torch.Tensor | None:
        """The elements, where they can be read: not of a tensor on the meta device."""
        thing = self.object
        readable = isinstance(thing, torch.Tensor) and not (is_lazy(thing) or thing.is_meta)
        return thing if readable else None

    @property
    def constant(self) -> bool:
        """True for a tensor that is the same for every input: a literal, a weight, what is
        computed from these."""
        return self.fixed or isinstance(self.object, torch.Tensor)

    def with_rank(self, rank: Rank | None, *, unit: bool | None = None) -> StaticValue:
        """The same tensor in another rank."""
        unit = self.unit if unit is None else unit
        return replace(self, object=NOTHING, rank=rank, unit=unit, items={})


def tensor(rank: Rank | None = None, **facts: Any) -> StaticValue:
    """A tensor whose elements are not known."""
    return StaticValue(Kind.TENSOR, rank=rank, **facts)


def python() -> StaticValue:
    """A Python value that does not depend on the input."""
    return StaticValue(Kind.PYTHON)


def unknown() -> StaticValue:
    """Nothing is known, so nothing is said about it."""
    return StaticValue(Kind.UNKNOWN)


def of_object(thing: Any) -> StaticValue:
    """The value of an attribute, a global, a default."""
    if isinstance(thing, torch.Tensor) and is_lazy(thing):
        return StaticValue(Kind.TENSOR, object=thing)
    if isinstance(thing, torch.Tensor):
        return StaticValue(
            Kind.TENSOR, object=thing, rank=Rank(0, thing.dim()), unit=1 in thing.shape
        )
    if isinstance(thing, torch.Size):
        return StaticValue(Kind.PYTHON, object=tuple(thing))
    if isinstance(thing, list | tuple) and thing and all(map(torch.is_tensor, thing)):
        return StaticValue(Kind.TENSORS, object=thing)
    return StaticValue(Kind.PYTHON, object=thing)


def common_axis(sizes: Iterable[StaticValue]) -> int | None:
    """The axis that numbers of shapes come from: the batch if one of them does; None: unknown."""
    axes = {size.axis for size in sizes}
    if 0 in axes:
        return 0
    return axes.pop() if len(axes) == 1 else None


def ranks_differ(one: StaticValue, other: StaticValue) -> bool:
    """True for two tensors that are known to have different numbers of axes."""
    if one.rank is None or other.rank is None:
        return False
    return one.rank.below(other.rank) or other.rank.below(one.rank)


def join(values: Iterable[StaticValue]) -> StaticValue:
    """What holds for all of them: after two branches, after a loop."""
    first, *others = values
    for other in others:
        first = _join(first, other)
    return first


def _join(one: StaticValue, other: StaticValue) -> StaticValue:
    if one is other:
        return one
    kinds = {one.kind, other.kind}
    if kinds == {Kind.TENSOR}:
        rank = one.rank if one.rank == other.rank else None
        return tensor(rank, unit=one.unit and other.unit, mask=one.mask and other.mask,
                      lowered=one.lowered or other.lowered,
                      fixed=one.constant and other.constant)  # fmt: skip
    if len(kinds) == 1:
        same = one.object is other.object
        if one.kind is Kind.PYTHON:
            return one if same and one.object is not NOTHING else StaticValue(
                Kind.PYTHON, read=one.read or other.read
            )  # fmt: skip
        return StaticValue(one.kind, axis=one.axis if one.axis == other.axis else None)
    plain = one if one.kind is Kind.PYTHON else other if other.kind is Kind.PYTHON else None
    if plain is not None and (plain.object is None or isinstance(plain.object, int | float)):
        # `mask = None` or `total = 0` before it becomes a tensor.
        rest = other if plain is one else one
        return replace(rest, object=NOTHING, rank=None)
    return unknown()
