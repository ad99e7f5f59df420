"""Which constants of the file stand for which parameters and buffers of the model.

By name, by equal values in whatever order or shape, and where none is equal, by nearness. Exporters
reshape, transpose, gather, slice and pack (LSTM, GRU) the tensors of a model: then most of their
values are still there.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gate.parity.statistics.output import Array

Floats = NDArray[np.float64]
_MOST = 0.5
"""Share of equal elements from which a constant is a tensor of the model with changes."""
_NEAR = 0.5
"""Relative difference (L1) up to which a constant of another place can be a changed tensor."""
_ROUNDING = 2.0**-20
"""Of the largest element: what a constant that was computed beforehand may be off by."""
_DISTINCT = 4
"""Distinct values that a tensor needs to be known by them."""


@dataclass(frozen=True)
class Pair:
    """A tensor of the model beside the constant of the file that stands for it."""

    name: str
    want: Floats
    got: Floats
    """In the shape of `want`, or the constant as it is where elements were picked or packed."""
    changed: int
    """Elements of the tensor, or of what was picked of it, that the file has otherwise."""
    of: int
    named: bool = False
    """True if the constant has the tensor's name."""


@dataclass
class Counterparts:
    """What was compared, by the names of the model's tensors."""

    differing: list[Pair] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    unfound: list[str] = field(default_factory=list)
    """No constant that was read stands for it: nothing is known."""


def counterparts(
    tensors: Mapping[str, Floats],
    found: Mapping[str, Array],
    *,
    others: Container[str] = (),
    loose: Container[str] = (),
    reordered: bool = False,
) -> Counterparts:
    """Pair `tensors` with the constants `found`.

    `others`: names of tensors of the model that are none of these. `loose`: names of those among
    `tensors` that may belong elsewhere: they need evidence, where others only need the shape.
    `reordered`: the operators want rows in an order of their own, as LSTM and GRU their gates.
    """
    constants = {
        name: array.astype(np.float64)
        for name, array in found.items()
        if array.dtype.kind == "f" and array.size and name not in others
    }
    result = Counterparts()
    left = _equal(tensors, constants, result, loose)
    if reordered:
        left = _by_values(left, constants, result, reordered=True)
    cut = {key: got for key, got in constants.items() if _is_cut(key, got, tensors)}
    whole = {key: got for key, got in constants.items() if key not in cut}
    left = _alike(left, whole, result, loose)
    constants = {**whole, **cut}
    left = _by_values(left, constants, result, reordered=reordered)
    result.unfound.extend(left)
    return result


def _equal(
    tensors: Mapping[str, Floats],
    constants: dict[str, Floats],
    result: Counterparts,
    loose: Container[str],
) -> dict[str, Floats]:
    """Take what equals a constant; of equal tensors all. What may belong elsewhere may have been
    computed anew, and then it is rounded anew."""
    left, used = {}, set()
    for name, want in tensors.items():
        allowed = _ROUNDING if name in loose else 0.0
        same = [key for key, got in constants.items() if _is_same(want, got, allowed)]
        if not same or (name in constants and name not in same):
            left[name] = want
            continue
        result.same.append(name)
        used.update(same)
    for key in used:
        del constants[key]
    return left


def _is_same(want: Floats, got: Floats, allowed: float) -> bool:
    if want.size != got.size:
        return False
    bound = allowed * float(np.abs(want).max(initial=0.0))
    return any(bool((np.abs(one.ravel() - got.ravel()) <= bound).all()) for one in (want, want.T))


def _alike(
    tensors: Mapping[str, Floats],
    constants: dict[str, Floats],
    result: Counterparts,
    loose: Container[str],
) -> dict[str, Floats]:
    """Take pairs of one shape, those with the same name first, then the nearest ones."""
    pairs = sorted(
        (name != key, _apart(want, got), name, key)
        for name, want in tensors.items()
        for key, got in constants.items()
        if _fits(want, got)
    )
    left = dict(tensors)
    for foreign, apart, name, key in pairs:
        if name not in left or key not in constants:
            continue
        got = _oriented(constants[key], left[name])
        wrong = int((got != left[name]).sum())
        evident = wrong <= _MOST * got.size or (apart <= _NEAR and _is_telling(got))
        if name in loose and foreign and not evident:
            continue
        result.differing.append(Pair(name, left.pop(name), got, wrong, got.size, not foreign))
        del constants[key]
    return left


def _is_cut(key: str, got: Floats, tensors: Mapping[str, Floats]) -> bool:
    """Whether a constant without a tensor's name is a part of a larger tensor: then it is no other
    one of its own shape."""
    larger = (want for want in tensors.values() if want.size > got.size)
    return key not in tensors and _is_telling(got) and any(np.isin(got, w).all() for w in larger)


def _by_values(
    tensors: Mapping[str, Floats],
    constants: Mapping[str, Floats],
    result: Counterparts,
    *,
    reordered: bool,
) -> dict[str, Floats]:
    """Take what holds most values of a constant, or is held by one."""
    left = {}
    for name, want in tensors.items():
        held = _held(want, constants.values(), reordered=reordered)
        best = min(held, default=None, key=lambda one: one[0] / one[1])
        if best is None or best[0] > _MOST * best[1]:
            left[name] = want
        elif best[0] == 0:
            result.same.append(name)
        else:
            result.differing.append(Pair(name, want, best[2].ravel(), best[0], best[1]))
    return left


def _held(
    want: Floats, constants: Iterable[Floats], *, reordered: bool
) -> Iterator[tuple[int, int, Floats]]:
    """(elements that are not held, of how many, the constant) for each constant; for one of the
    same size only if its rows may be in another order."""
    if not _is_telling(want):
        return
    for got in constants:
        small, large = (want, got) if want.size < got.size else (got, want)
        if _is_telling(small) and (reordered or want.size != got.size):
            yield int((~np.isin(small, large)).sum()), small.size, got


def _is_telling(array: Floats) -> bool:
    return len(np.unique(array)) >= _DISTINCT


def _fits(want: Floats, got: Floats) -> bool:
    bare, other = _bare(want), _bare(got)
    return bare in (other, other[::-1])


def _bare(array: Floats) -> tuple[int, ...]:
    """The shape without axes of one element, which exporters add and drop."""
    return tuple(size for size in array.shape if size != 1)


def _oriented(got: Floats, want: Floats) -> Floats:
    """The constant in the tensor's shape; of a square one the nearer orientation."""
    turned = got.T.reshape(want.shape) if _bare(got)[::-1] == _bare(want) else None
    if _bare(got) != _bare(want):
        assert turned is not None
        return turned
    straight = got.reshape(want.shape)
    if turned is None or _sum_apart(straight, want) <= _sum_apart(turned, want):
        return straight
    return turned


def _apart(want: Floats, got: Floats) -> float:
    """Relative difference in the nearer orientation; infinite for NaN."""
    apart = _sum_apart(_oriented(got, want), want)
    size = float(np.abs(want).sum())
    return apart / size if size > 0.0 and math.isfinite(apart) else math.inf


def _sum_apart(one: Floats, other: Floats) -> float:
    finite = np.nan_to_num(one, nan=0.0, posinf=0.0, neginf=0.0)
    return float(np.abs(finite - other).sum())
