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
    if value.known is not NOTHING and not value.tensor:
        return _item_of_known(value.known, position)
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


def _item_of_known(known: Any, position: int | None) -> StaticValue:
    if isinstance(known, nn.Module):
        known = list(known.children())
        position = position or 0  # each child is read by itself, too
    if isinstance(known, list | tuple) and known:
        if position is not None and -len(known) <= position < len(known):
            return of_object(known[position])
        return join([of_object(one) for one in known[:_FEW]])
    return unknown() if isinstance(known, list | tuple) else python()
