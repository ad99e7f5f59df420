"""What a loop, an index or unpacking takes out of a value."""

from __future__ import annotations

from typing import Any

from torch import nn

from gate.lint.value import (
    NOTHING,
    Kind,
    StaticValue,
    join,
    of_object,
    python,
    tensor,
    unknown,
)

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
