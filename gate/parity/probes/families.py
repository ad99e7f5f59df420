"""Families of inputs with one parameter, along which a search looks for the edge of a branch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gate.parity.probes.observed import Observed
from gate.parity.probes.values import within
from gate.parity.statistics.output import Array
from gate.runtimes.runtime import Batch

_MIXES = 4


@dataclass(frozen=True)
class ProbeFamily:
    """Inputs by a number: all floats scaled by it, or moved by it, or equal to it."""

    name: str
    grid: tuple[float, ...]
    """Where the search starts, ascending."""
    build: Callable[[float], Batch] = field(repr=False)

    def title(self, at: float) -> str:
        """The name of one input: `scale_1e+03`."""
        return f"{self.name}_{at:.4g}"


def families(observed: Observed) -> list[ProbeFamily]:
    """Of all inputs of floats together, then of each alone where there are several."""
    names = [name for name, array in observed.rows.items() if array.dtype.kind == "f"]
    groups = [tuple(names)] if names else []
    if len(names) > 1:
        groups += [(name,) for name in names]
    made: list[ProbeFamily] = []
    for group in groups:
        low = min(float(observed.low[name]) for name in group)
        high = max(float(observed.high[name]) for name in group)
        span = (high - low) or abs(high) or 1.0
        suffix = "" if group == tuple(names) else f"_{group[0]}"
        for title, change, grid in (
            ("scale", _scaled, (-1e3, -10.0, -0.1, 1e-3, 1e-2, 1.0, 1e2, 1e3)),
            ("constant", _constant, _around(low, high, span)),
            ("offset", _moved, tuple(span * k for k in (-100, -10, -1, -0.3, 0.3, 1, 10, 100))),
            ("spike", _spiked, tuple(high + span * k for k in (-101, -11, 1, 10, 100))),
        ):
            build = partial(_of_family, observed, change, group)
            made.append(ProbeFamily(f"{title}{suffix}", grid, build))
    return made


def mixtures(observed: Observed) -> Iterator[tuple[str, Batch]]:
    """Integers that are all the same, other samples, mixes of two with random signs, and integers
    drawn from their range."""
    for title, ends in (("lowest", observed.low), ("highest", observed.high)):
        if observed.integers:
            filled = observed.batch(observed.small)
            for name in observed.integers:
                filled[name][...] = ends[name]
            yield title, filled
    for index in range(1, min(_MIXES + 1, len(next(iter(observed.rows.values()))))):
        yield f"sample_{index}", observed.batch(observed.small, start=index)
    for index in range(_MIXES):
        title = f"mix_{index}"
        pairs = zip(
            observed.batch(observed.small, start=index).items(),
            observed.batch(observed.small, start=index + 1).values(),
            strict=True,
        )
        random = observed.random(title)
        yield title, {name: _mixed(one, other, random) for (name, one), other in pairs}


def _mixed(one: Array, other: Array, random: np.random.Generator) -> Array:
    """Floats: a convex mix with random signs. Others: each element from either of the two, which
    stays in their range."""
    if one.dtype.kind != "f":
        return np.where(random.random(one.shape) < 0.5, one, other)
    share = random.random()
    signs = random.choice([-1.0, 1.0], one.shape)
    mixed = share * one.astype(np.float64) + (1.0 - share) * other.astype(np.float64)
    return within(signs * mixed, one)


def _around(low: float, high: float, span: float) -> tuple[float, ...]:
    inside = [low + span * k / 8 for k in range(1, 8)]
    return (low - 100 * span, low - 10 * span, *inside, high + 10 * span, high + 100 * span)


Floats = NDArray[np.float64]
Change = Callable[[Floats, float], Floats]


def _of_family(observed: Observed, change: Change, group: tuple[str, ...], at: float) -> Batch:
    batch = observed.batch(observed.small)
    for name in group:
        with np.errstate(over="ignore"):  # `within` cuts it off
            batch[name] = within(change(batch[name].astype(np.float64), at), batch[name])
    return batch


def _scaled(array: Floats, at: float) -> Floats:
    return array * at


def _constant(array: Floats, at: float) -> Floats:
    return np.full_like(array, at)


def _moved(array: Floats, at: float) -> Floats:
    return array + at


def _spiked(array: Floats, at: float) -> Floats:
    changed = array.reshape(len(array), -1)
    changed[:, changed.shape[1] // 2] = at
    return changed.reshape(array.shape)
