"""Value probes: what else could be in the samples.

Floats may take any value. Integers stay within the range of the samples here, because they may be
indices (`integers` goes beyond), and words are never all the same, because among equal ones none is
the largest; bools are all false, all true, turned round or random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gate.parity.probes.observed import Observed, Probe
from gate.parity.statistics.output import Array
from gate.runtimes.runtime import Batch

_ALONE = ("zeros", "max", "negated", "scaled_10")
"""Probes that are also made of one input alone where there are several, so that a branch on one
of them flips."""
_FACTORS = (1.0, 3.0, 10.0, 30.0, 100.0, -10.0, 0.01, 0.1)
"""By which the samples of one probe are scaled: what is of the order of one crosses 6 (relu6), 20
(softplus) and 88 (where exp overflows)."""


class ValueRange(NamedTuple):
    """What is known of an input's values."""

    low: Array
    high: Array
    random: np.random.Generator


_OF_MASKS = ("zeros", "ones", "min", "max", "mirrored")
"""What a mask of floats may be; it is no half, and not negative."""

Change = Callable[[Array, ValueRange], Array]
"""From an input's array to another one of its shape and dtype."""


def value_probes(observed: Observed) -> Iterator[Probe]:
    """All of them, cheapest and most telling first; each leaves no input of its kind as it is."""
    names = list(observed.rows)
    for title in _CHANGES:
        if any(_applies(title, observed.rows[name]) for name in names):
            yield Probe(
                title, "value", observed.small, partial(_changed, observed, title, tuple(names))
            )
    if len(names) > 1:
        for name in names:
            for title in _ALONE:
                if _applies(title, observed.rows[name]):
                    build = partial(_changed, observed, title, (name,))
                    yield Probe(f"{title}_{name}", "value", observed.small, build)
    if any(array.dtype.kind == "f" for array in observed.rows.values()):
        size = observed.small if observed.fixed else len(_FACTORS)
        build = partial(_at_magnitudes, observed, size)
        yield Probe("magnitudes", "value", size, build, apart=True)
    if observed.fixed and observed.small > 1:
        yield Probe("reversed", "value", observed.small, partial(_reversed, observed))


def within(values: NDArray[np.float64], like: Array) -> Array:
    """`values` in the float dtype of `like`, cut off at its largest finite numbers."""
    limits: Any = np.finfo(like.dtype)
    with np.errstate(over="ignore"):
        return np.clip(values, float(limits.min), float(limits.max)).astype(like.dtype)


def _changed(observed: Observed, title: str, names: tuple[str, ...]) -> Batch:
    batch = observed.batch(observed.small)
    if title not in _OF_MASKS:
        names = tuple(name for name in names if name not in _masks(observed))
    for name, array in batch.items():
        if name in names and _applies(title, array):
            values = ValueRange(
                observed.low[name], observed.high[name], observed.random(f"{title} {name}")
            )
            with np.errstate(over="ignore"):  # `within` cuts it off
                batch[name] = _CHANGES[title][array.dtype.kind](array, values)
    return batch


def _at_magnitudes(observed: Observed, size: int) -> Batch:
    """Samples from everywhere, each scaled by another factor; masks of floats stay as they are."""
    batch: dict[str, Array] = {}
    masks = _masks(observed)
    for name, array in observed.spread.items():
        rows = array[np.arange(size) % len(array)]
        if array.dtype.kind == "f" and name not in masks:
            factors = np.resize(_FACTORS, size).reshape(-1, *[1] * (rows.ndim - 1))
            with np.errstate(over="ignore"):  # `within` cuts it off
                rows = within(rows.astype(np.float64) * factors, rows)
        batch[name] = np.ascontiguousarray(rows)
    return batch


def _masks(observed: Observed) -> set[str]:
    """Inputs of floats that are nothing but zeros and ones, beside others that are not."""
    floats = {name for name, array in observed.rows.items() if array.dtype.kind == "f"}
    masks = {name for name in floats if _is_mask(observed, name)}
    return masks if masks < floats else set()


def _is_mask(observed: Observed, name: str) -> bool:
    return (
        float(observed.low[name]) >= 0.0
        and float(observed.high[name]) == 1.0
        and bool(np.isin(observed.rows[name], (0.0, 1.0)).all())
    )


def _reversed(observed: Observed) -> Batch:
    whole = observed.batch(observed.small)
    return {name: np.ascontiguousarray(array[::-1]) for name, array in whole.items()}


def _applies(title: str, array: Array) -> bool:
    return array.dtype.kind in _CHANGES[title] and (title != "mirrored" or array.ndim > 1)


def _filled(value: float) -> Change:
    return lambda array, _: np.full_like(array, value)


def _lowest(array: Array, values: ValueRange) -> Array:
    return np.full_like(array, values.low)


def _highest(array: Array, values: ValueRange) -> Array:
    return np.full_like(array, values.high)


def _uniform(array: Array, values: ValueRange) -> Array:
    drawn = values.random.uniform(0.0, 1.0, array.shape)
    return within(float(values.low) * (1.0 - drawn) + float(values.high) * drawn, array)


def _drawn(array: Array, values: ValueRange) -> Array:
    low, high = int(values.low), int(values.high)
    drawn = values.random.integers(low, high, array.shape, dtype=array.dtype.type, endpoint=True)
    return _with_first(drawn, array) if low >= 0 and high <= 1 else drawn


def _tossed(array: Array, values: ValueRange) -> Array:
    return _with_first(values.random.random(array.shape) < 0.5, array)


def _with_first(drawn: Array, array: Array) -> Array:
    """A mask keeps its first place: a causal query that sees no key has no answer."""
    if array.ndim > 1:
        drawn[..., 0] = array[..., 0]
    return drawn


def _mirrored(array: Array, values: ValueRange) -> Array:
    if array.dtype.kind in "iub" and int(values.low) >= 0 and int(values.high) <= 1:
        return array  # a mask that is padded in front leaves the first queries without a key
    return np.ascontiguousarray(np.flip(array, axis=-1))


def _scaled(factor: float) -> Change:
    return lambda array, _: within(array.astype(np.float64) * factor, array)


def _turned(array: Array, _: ValueRange) -> Array:
    return np.logical_not(array)


def _bright(array: Array, values: ValueRange) -> Array:
    """One element of each sample ten times the largest magnitude."""
    peak = max(abs(float(values.low)), abs(float(values.high))) or 1.0
    changed = array.astype(np.float64).reshape(len(array), -1)
    changed[:, changed.shape[1] // 2] = 10.0 * peak
    return within(changed.reshape(array.shape), array)


_CHANGES: dict[str, dict[str, Change]] = {
    "zeros": {"f": _filled(0.0), "b": _filled(0.0)},
    "ones": {"f": _filled(1.0), "b": _filled(1.0)},
    "min": {"f": _lowest, "u": _lowest},
    "max": {"f": _highest, "u": _highest},
    "noise": {"f": _uniform, "i": _drawn, "u": _drawn, "b": _tossed},
    "negated": {"f": _scaled(-1.0), "b": _turned},
    "mirrored": {"f": _mirrored, "i": _mirrored, "u": _mirrored, "b": _mirrored},
    "scaled_10": {"f": _scaled(10.0)},
    "scaled_0.1": {"f": _scaled(0.1)},
    "bright": {"f": _bright},
}
"""By name of the probe, then by kind of dtype; a kind that is missing stays as it is."""
