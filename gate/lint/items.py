"""Items: what a loop, an index or unpacking takes out of a value, and what is made of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from gate.lint.value import NOTHING, Kind, StaticValue, join, of_object, python, tensor, unknown

_FEW = 16
"""Items of a list that are looked at."""


def item(value: StaticValue, position: int | None) -> StaticValue:
    """What unpacking, or `[position]`, takes from a value; None: any of its items."""
    if value.kind is Kind.SHAPE:
        return _size(value, position)
    if position is not None and position in value.items:
        return value.items[position]
    if position is None and value.items:
        return join(value.items.values())
    if value.object is not NOTHING and not value.tensor:
        return _item_of_object(value.object, position)
    if value.kind in (Kind.TENSOR, Kind.TENSORS):
        return tensor(fixed=value.constant)
    return unknown()


def has_items(value: StaticValue) -> bool:
    """True for what Python takes items from, not torch."""
    listed = isinstance(value.object, list | tuple | dict | nn.ModuleList | nn.ModuleDict)
    return listed or bool(value.items) or value.kind is Kind.TENSORS


def known_items(value: StaticValue) -> list[StaticValue]:
    """All of them, where their number is known; else none."""
    own = value.object if isinstance(value.object, list | tuple) else ()
    return [item(value, place) for place in range(len(value.items) or len(own))]


def sequence(values: Sequence[StaticValue], made: type[list[Any] | tuple[Any, ...]]) -> StaticValue:
    """The list or tuple of these values."""
    items = dict(enumerate(values))
    if values and all(value.tensor for value in values):
        return StaticValue(Kind.TENSORS, items=items)
    objects: Any = NOTHING
    if all(value.object is not NOTHING for value in values):
        objects = made(value.object for value in values)
    return StaticValue(Kind.PYTHON, object=objects, items=items)


def keyed(owner: StaticValue, key: StaticValue) -> StaticValue:
    """What `owner[key]` takes from anything but a tensor."""
    if isinstance(owner.object, dict | nn.ModuleDict) and isinstance(key.object, str):
        return of_object(owner.object[key.object]) if key.object in owner.object else unknown()
    return item(owner, key.object if isinstance(key.object, int) else None)


def sliced(owner: StaticValue, bounds: Sequence[Any]) -> StaticValue:
    """What `owner[start:stop:step]` takes from anything but a tensor; None: a bound left out."""
    if owner.kind is Kind.SHAPE:
        start = bounds[0] if isinstance(bounds[0], int) else 0
        return StaticValue(Kind.SHAPE, axis=start)
    plain = all(bound is None or isinstance(bound, int) for bound in bounds)
    if plain and isinstance(owner.object, list | tuple | str):
        return of_object(owner.object[slice(*bounds)])
    return StaticValue(owner.kind)


def _size(shape: StaticValue, position: int | None) -> StaticValue:
    """One and the same value for one axis, so that its names are known to share it."""
    if position is None:
        return StaticValue(Kind.SIZE, axis=shape.axis, shape=shape)
    if position not in shape.items:
        axis = None if shape.axis is None else position + shape.axis
        shape.items[position] = StaticValue(Kind.SIZE, axis=axis, shape=shape)
    return shape.items[position]


def _item_of_object(container: Any, position: int | None) -> StaticValue:
    if isinstance(container, nn.Module):
        container = list(container.children())
        position = position or 0  # each child is read by itself, too
    if isinstance(container, list | tuple) and container:
        if position is not None and -len(container) <= position < len(container):
            return of_object(container[position])
        return join([of_object(one) for one in container[:_FEW]])
    return unknown() if isinstance(container, list | tuple) else python()
