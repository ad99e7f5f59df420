"""What a loop, an index or unpacking takes out of a value."""

from __future__ import annotations

from torch import nn

from gate.export.lint.value import (
    NOTHING,
    Kind,
    Value,
    join,
    of_object,
    python,
    tensor,
    unknown,
)


def item(value: Value, position: int | None) -> Value:
    """What unpacking, or `[position]`, takes from a value; None: any of its items."""
    if value.kind is Kind.SHAPE:
        if position is None:
            return Value(Kind.SIZE, axis=value.axis or None, shape=value)
        if position not in value.items:
            axis = None if value.axis is None else position + value.axis
            value.items[position] = Value(Kind.SIZE, axis=axis, shape=value)
        return value.items[position]
    if position is not None and position in value.items:
        return value.items[position]
    if position is None and value.items:
        return join(value.items.values())
    if value.kind in (Kind.TENSOR, Kind.TENSORS):
        constant = isinstance(value.known, list | tuple) and position is not None
        inside = constant and -len(value.known) <= (position or 0) < len(value.known)
        return of_object(value.known[position]) if inside else tensor(fixed=value.constant)
    return _item_of_known(value, position)


def _item_of_known(value: Value, position: int | None) -> Value:
    known = value.known
    if isinstance(known, nn.Module):
        children = list(known.children())
        inside = position is not None and -len(children) <= position < len(children)
        chosen = children[position or 0] if inside else next(iter(children), NOTHING)
        return unknown() if chosen is NOTHING else of_object(chosen)
    if isinstance(known, list | tuple) and known:
        inside = position is not None and -len(known) <= position < len(known)
        if inside:
            return of_object(known[position or 0])
        return join([of_object(one) for one in known[:16]])
    if isinstance(known, range):
        return python()
    return python() if value.kind is Kind.PYTHON and known is not NOTHING else unknown()
