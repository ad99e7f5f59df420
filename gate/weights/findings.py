"""A constant of the file that surely is a tensor of the model, and yet has other values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.parity.graph.formats import rounded_to
from gate.parity.graph.layouts import arrangements, differing, sampled_share
from gate.parity.graph.pool import Stored, Values
from gate.records.instruments import GraphCode, GraphFinding

HALF = 0.5
_HINT = 0.25
"""Share of equal elements among some, below which all are not compared."""
_CLOSE = 0.05
"""Relative difference (rms) up to which other weights may be the same, kept in few bits."""
_GRID = 1024.0
"""Multiples of 1 / 1024 may be anything: masks, grids, counts."""


@dataclass(frozen=True)
class Suspicion:
    """`place` of the file is `name` of the model, but for `wrong` of its `size` elements."""

    place: str
    name: str
    wrong: int
    size: int
    first: tuple[int, ...]
    """Index in the file's tensor of the first one that differs."""
    largest: float
    """Largest difference; infinite or NaN where one of both is."""
    rounded: str | None = None
    """How the whole tensor was rounded."""

    @property
    def whole(self) -> bool:
        """Hardly anything of it is the model's."""
        return self.wrong > HALF * self.size

    def finding(self) -> GraphFinding:
        """What a report says of it."""
        code: GraphCode = "rounded_weights" if self.rounded else "other_weights"
        own = "the model's" if self.place == self.name else f"the model's `{self.name}`"
        first = ", ".join(map(str, self.first))
        if self.rounded:
            detail = f"is {own}, {self.rounded}"
        else:
            does = f"is not {own}:" if self.whole else f"is {own}, but"
            detail = (
                f"{does} {self.wrong} of its {self.size} elements differ, the first at [{first}], "
                f"by {self.largest:.3g} at most"
            )
        return GraphFinding(code=code, place=self.place, detail=detail)


def suspicion(place: str, name: str, values: Values, expected: NDArray[Any]) -> Suspicion:
    """What differs between a constant and what it should be, in the constant's shape."""
    wrong = differing(values, expected)
    return of_mask(place, name, (values, expected), wrong)


def of_mask(
    place: str, name: str, pair: tuple[Values, NDArray[Any]], wrong: NDArray[np.bool_]
) -> Suspicion:
    """The same where the elements that count as wrong are known."""
    values, expected = pair
    first = np.unravel_index(int(wrong.argmax()), wrong.shape)
    with np.errstate(all="ignore"):
        apart = np.abs(values[wrong].astype(np.float64) - expected[wrong])
    whole = wrong.sum() > HALF * wrong.size
    return Suspicion(
        place=place,
        name=name,
        wrong=int(wrong.sum()),
        size=wrong.size,
        first=tuple(int(index) for index in first),
        largest=float(apart.max()) if apart.size else 0.0,
        rounded=_rounding(values, expected) if whole else None,
    )


def nearest(place: str, values: Values, candidates: Iterable[Stored]) -> Suspicion | None:
    """The candidate of which at least half of the elements are bitwise those of the constant, and
    enough of them say something; the one with the fewest differences."""
    found = []
    for stored, arranged in _hopeful(values, candidates):
        wrong = differing(values, arranged)
        if wrong.mean() <= HALF and telling(values[~wrong]):
            found.append(of_mask(place, _owner(stored, wrong), (values, arranged), wrong))
    return min(found, key=lambda each: each.wrong) if found else None


def rounded(place: str, values: Values, candidates: Iterable[Stored]) -> Suspicion | None:
    """The candidate that was rounded to give the constant in every element."""
    if values.dtype.kind != "f" or not _looks_rounded(values) or not telling(values):
        return None
    for stored in candidates:
        for arranged in arrangements(values, stored.values):
            if rounded_to(values, arranged) is not None:
                return suspicion(place, stored.name, values, arranged)
    return None


def named(place: str, values: Values, stored: Stored) -> Suspicion:
    """The constant against the tensor whose name it has, in the orientation that fits best."""
    ways = list(arrangements(values, stored.values))
    with np.errstate(all="ignore"):
        best = min(ways, key=lambda way: int(differing(values, way).sum()))
    return suspicion(place, stored.name if place not in stored.names else place, values, best)


def telling(values: Values) -> bool:
    """True if the values are no accident: two different ones that are no round numbers."""
    if values.dtype.kind != "f":
        return False
    some = values[np.isfinite(values)][: 1 << 16]
    scaled = some.astype(np.float64) * _GRID
    return len(np.unique(some[scaled != np.rint(scaled)])) > 1


def _hopeful(values: Values, candidates: Iterable[Stored]) -> Iterator[tuple[Stored, Values]]:
    for stored in candidates:
        for arranged in arrangements(values, stored.values):
            if sampled_share(values, arranged) >= _HINT:
                yield stored, arranged


def _owner(stored: Stored, wrong: NDArray[np.bool_]) -> str:
    if wrong.shape != stored.shape or not wrong.any():
        return stored.name
    first = np.unravel_index(int(wrong.argmax()), wrong.shape)
    return stored.owner(tuple(int(at) for at in first))


def _looks_rounded(values: Values) -> bool:
    """True if the last twelve bits of every mantissa are zero."""
    words = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    return not bool((words[:64] & 0xFFF).any() or (words & 0xFFF).any())


def _rounding(values: Values, expected: NDArray[Any]) -> str | None:
    if values.dtype.kind != "f":
        return None
    name = rounded_to(values, expected.astype(np.float32))
    if name is not None:
        return f"rounded to {name}"
    with np.errstate(all="ignore"):
        apart = np.sqrt(np.mean((values.astype(np.float64) - expected) ** 2))
        size = np.sqrt(np.mean(expected.astype(np.float64) ** 2))
    if not apart <= _CLOSE * size:
        return None
    return f"all of it moved, by {apart / size:.2g} of its size (rms)"
