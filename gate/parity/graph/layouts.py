"""The ways in which a tensor of the model may lie in a file: exact copies, in another order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations

import numpy as np
from numpy.typing import NDArray

from gate.parity.graph.pool import Values

_AXES = 5
"""Tensors of more axes are only compared as they are and reshaped."""
_SAMPLE = 61


def same(values: Values, stored: Values) -> str | None:
    """The way in which `values` holds exactly the elements of `stored`; None: in none of these.

    `as it is`, `reshaped`, `transposed` (any order of the axes, also before or after a reshape)
    or `flipped` along the last axes, as kernels are.
    """
    for way, arranged in (*_orders(values, stored), *_merged(values, stored)):
        if equal(values, arranged):
            return way
    return "flipped" if any(equal(values, one) for one in _flips(values, stored)) else None


def arrangements(values: Values, stored: Values) -> Iterator[Values]:
    """`stored` in every order of its axes that has the shape of `values` up to axes of one."""
    return (arranged for _, arranged in _orders(values, stored))


def equal(one: Values, other: Values) -> bool:
    """Equal shapes and elements; NaN equals NaN."""
    if one.shape != other.shape or not (_sample(one) == _sample(other)).all():
        return False
    if np.array_equal(one, other):
        return True
    return one.dtype.kind == "f" and bool(np.array_equal(one, other, equal_nan=True))


def differing(one: Values, other: Values) -> NDArray[np.bool_]:
    """Where two arrays of one shape differ; NaN equals NaN."""
    wrong: NDArray[np.bool_] = one != other
    if one.dtype.kind == "f":
        wrong &= ~(np.isnan(one) & np.isnan(other))
    return wrong


def sampled_share(values: Values, arranged: Values) -> float:
    """The share of some elements in which both are bitwise equal."""
    return float((_sample(values) == _sample(arranged)).mean())


def _orders(values: Values, stored: Values) -> Iterator[tuple[str, Values]]:
    if values.size != stored.size:
        return
    if stored.shape == values.shape:
        yield "as it is", stored
    else:
        yield "reshaped", stored.reshape(values.shape)
    if stored.ndim > _AXES:
        return
    wanted = _squeezed(values.shape)
    for order in permutations(range(stored.ndim)):
        shape = tuple(stored.shape[axis] for axis in order)
        if _squeezed(shape) == wanted and not _keeps(order, stored.shape):
            yield "transposed", stored.transpose(order).reshape(values.shape)


def _merged(values: Values, stored: Values) -> Iterator[tuple[str, Values]]:
    """Transposed before or after a reshape that joins or splits axes."""
    if stored.ndim <= _AXES:
        for order in permutations(range(stored.ndim)):
            if not _keeps(order, stored.shape):
                yield "transposed", stored.transpose(order).reshape(values.shape)
    if values.ndim <= _AXES:
        for order in permutations(range(values.ndim)):
            if not _keeps(order, values.shape):
                shape = tuple(values.shape[axis] for axis in order)
                back = tuple(int(axis) for axis in np.argsort(order))
                yield "transposed", stored.reshape(shape).transpose(back)


def _flips(values: Values, stored: Values) -> Iterator[Values]:
    for arranged in arrangements(values, stored):
        axes = [axis for axis in range(2, values.ndim) if values.shape[axis] > 1]
        for count in range(1, len(axes) + 1):
            for chosen in combinations(axes, count):
                yield np.flip(arranged, chosen)


def _keeps(order: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """True if the order only moves axes of one."""
    moved = [axis for axis in order if shape[axis] != 1]
    return moved == sorted(moved)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim for dim in shape if dim != 1)


def _sample(values: Values) -> Values:
    """The bits of some elements, spread over the array."""
    where = np.linspace(0, values.size - 1, min(_SAMPLE, values.size)).astype(np.int64)
    rows = np.atleast_1d(values)  # a scalar has no places to choose
    chosen = np.ascontiguousarray(rows[np.unravel_index(where, rows.shape)])
    return chosen.view(np.uint32 if chosen.itemsize == 4 else np.uint64)
