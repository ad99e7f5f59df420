"""Ranges, masks, columns, NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from gate.measure.context import MeasurementContext
from gate.probes.probe import LEAST_RATIO, Probe, SampleProfile
from gate.reference.error_models import bare, error_model_for
from gate.reference.torch_session import DispatchMode
from gate.storage.arrays import Batch, OutputArray

# Other models give no basis for a judgment: NaN goes through PyTorch's relu and max pooling, and a
# runtime may swallow it there. So the model is watched for tests whether a number is finite,
# and judged where its answer to the probe is finite.


_ASKS = {
    "isfinite", "isinf", "isnan", "isneginf", "isposinf", "nan_to_num", "nan_to_num_",
    "nanmean", "nanmedian", "nanquantile", "nansum",
}  # fmt: skip

_WITH_ITSELF = {"eq", "__eq__", "ne", "__ne__", "not_equal"}

_VALUES = {"nan": math.nan, "inf": math.inf, "minus_inf": -math.inf}


class NonfiniteHandling(TorchFunctionMode):
    """Records whether a model's code tests if a number is finite, as `x != x` does, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tests_finiteness = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        itself = name in _WITH_ITSELF and len(args) > 1 and args[0] is args[1]
        # PyTorch's own printing and checks ask as well, but not inside of a forward.
        self.tests_finiteness = (
            self.tests_finiteness or name in _ASKS or (itself and isinstance(args[0], torch.Tensor))
        )
        return func(*args, **(kwargs or {}))


def nonfinite_probes(context: MeasurementContext, observed: SampleProfile) -> Iterator[Probe]:
    """One NaN, one infinity of either sign in each input of floats; none where none is treated."""
    names = [name for name, array in observed.rows.items() if array.dtype.kind == "f"]
    if not names:
        return
    if not context.watch(observed.batch(observed.small), NonfiniteHandling).tests_finiteness:
        return
    for name in names:
        suffix = f"_{name}" if len(names) > 1 else ""
        for title, value in _VALUES.items():
            build = partial(_holding, observed, name, value)
            yield Probe(f"{title}{suffix}", "value", observed.small, build, finite=True)


def _holding(observed: SampleProfile, name: str, value: float) -> Batch:
    batch = observed.batch(observed.small)
    flat = batch[name].reshape(len(batch[name]), -1)
    flat[:, flat.shape[1] // 2] = np.asarray(value, flat.dtype)
    return batch


# Floats may take any value. Integers stay within the range of the samples here, because they may be
# indices (`integers` goes beyond), and words are never all the same, because among equal ones none
# is the largest; bools are all false, all true, turned round or random.


_ALONE = ("zeros", "max", "negated", "scaled_10")
"""Probes that are also made of one input alone where there are several, so that a branch on one
of them flips."""

_FACTORS = (1.0, 3.0, 10.0, 30.0, 100.0, -10.0, 0.01, 0.1)
"""By which the samples of one probe are scaled: what is of the order of one crosses 6 (relu6), 20
(softplus) and 88 (where exp overflows)."""


class ValueRange(NamedTuple):
    """The range of an input's values in the samples."""

    low: OutputArray
    high: OutputArray
    random: np.random.Generator


_OF_MASKS = ("zeros", "ones", "min", "max", "mirrored")
"""What a mask of floats may be; it is no half, and not negative."""


Change = Callable[[OutputArray, ValueRange], OutputArray]
"""From an input's array to another one of its shape and dtype."""


def value_probes(observed: SampleProfile) -> Iterator[Probe]:
    """Yield all probes, cheapest and most telling first; each changes every input of its kind."""
    names = list(observed.rows)
    for title in _CHANGES:
        if any(_applies(title, observed.rows[name]) for name in names):
            yield _changing(observed, title, title, tuple(names))
    if len(names) > 1:
        for name in names:
            for title in _ALONE:
                if _applies(title, observed.rows[name]):
                    yield _changing(observed, f"{title}_{name}", title, (name,))
    if any(array.dtype.kind == "f" for array in observed.rows.values()):
        size = observed.small if observed.fixed else len(_FACTORS)
        for part in range(math.ceil(len(_FACTORS) / size)):
            factors = np.resize(np.roll(_FACTORS, -part * size), size)
            suffix = f"_{part + 1}" if part else ""
            build = partial(_at_magnitudes, observed, factors)
            yield Probe(
                f"magnitudes{suffix}",
                "value",
                size,
                build,
                apart=True,
                factors=tuple(map(float, factors)),
            )
    if observed.fixed and observed.small > 1:
        yield Probe("reversed", "value", observed.small, partial(_reversed, observed))


def _changing(observed: SampleProfile, name: str, title: str, inputs: tuple[str, ...]) -> Probe:
    size = observed.small
    build = partial(_changed, observed, title, inputs)
    factors = (10.0,) * size if title == "scaled_10" else ()
    return Probe(name, "value", size, build, factors=factors)


_NEARER = 9.5
"""Times the samples, just below the factor from which on a file may overflow."""

NEARER_SUFFIX = "_nearer"


def nearer_probe(observed: SampleProfile, probe: Probe) -> Probe:
    """Return the probe scaled back to 9.5 times the samples at most.

    It finds a file that overflows between the factors of the other probes.
    """
    build = partial(_nearer, observed, probe)
    return Probe(f"{probe.name}{NEARER_SUFFIX}", probe.kind, probe.size, build, apart=True)


def _nearer(observed: SampleProfile, probe: Probe) -> Batch:
    reach = observed.reach(probe)
    shrink = _NEARER / np.maximum(reach, _NEARER)
    batch = dict(probe.batch)
    for name, array in batch.items():
        if array.dtype.kind == "f" and len(array) == probe.size:
            outside = observed.ratios(name, array) >= LEAST_RATIO
            factors = np.where(outside, shrink, 1.0).reshape(-1, *[1] * (array.ndim - 1))
            batch[name] = within(array.astype(np.float64) * factors, array)
    return batch


def within(values: NDArray[np.float64], like: OutputArray) -> OutputArray:
    """`values` in the float dtype of `like`, cut off at its largest finite numbers."""
    limits: Any = np.finfo(like.dtype)
    with np.errstate(over="ignore"):
        return np.clip(values, float(limits.min), float(limits.max)).astype(like.dtype)


def _changed(observed: SampleProfile, title: str, names: tuple[str, ...]) -> Batch:
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


def _at_magnitudes(observed: SampleProfile, scales: NDArray[np.float64]) -> Batch:
    """Samples from everywhere, each scaled by another factor; masks of floats stay as they are."""
    size = len(scales)
    batch: dict[str, OutputArray] = {}
    masks = _masks(observed)
    for name, array in observed.spread.items():
        rows = array[np.arange(size) % len(array)]
        if array.dtype.kind == "f" and name not in masks:
            factors = scales.reshape(-1, *[1] * (rows.ndim - 1))
            with np.errstate(over="ignore"):  # `within` cuts it off
                rows = within(rows.astype(np.float64) * factors, rows)
        batch[name] = np.ascontiguousarray(rows)
    return batch


def _masks(observed: SampleProfile) -> set[str]:
    """Return the inputs of floats that contain only zeros and ones, if others do not."""
    floats = {name for name, array in observed.rows.items() if array.dtype.kind == "f"}
    masks = {name for name in floats if _is_mask(observed, name)}
    return masks if masks < floats else set()


def _is_mask(observed: SampleProfile, name: str) -> bool:
    return (
        float(observed.low[name]) >= 0.0
        and float(observed.high[name]) == 1.0
        and bool(np.isin(observed.rows[name], (0.0, 1.0)).all())
    )


def _reversed(observed: SampleProfile) -> Batch:
    whole = observed.batch(observed.small)
    return {name: np.ascontiguousarray(array[::-1]) for name, array in whole.items()}


def _applies(title: str, array: OutputArray) -> bool:
    return array.dtype.kind in _CHANGES[title] and (title != "mirrored" or array.ndim > 1)


def _filled(value: float) -> Change:
    return lambda array, _: np.full_like(array, value)


def _lowest(array: OutputArray, values: ValueRange) -> OutputArray:
    return np.full_like(array, values.low)


def _highest(array: OutputArray, values: ValueRange) -> OutputArray:
    return np.full_like(array, values.high)


def _uniform(array: OutputArray, values: ValueRange) -> OutputArray:
    drawn = values.random.uniform(0.0, 1.0, array.shape)
    return within(float(values.low) * (1.0 - drawn) + float(values.high) * drawn, array)


def _drawn(array: OutputArray, values: ValueRange) -> OutputArray:
    low, high = int(values.low), int(values.high)
    drawn = values.random.integers(low, high, array.shape, dtype=array.dtype.type, endpoint=True)
    return _with_first(drawn, array) if low >= 0 and high <= 1 else drawn


def _random_values(array: OutputArray, values: ValueRange) -> OutputArray:
    return _with_first(values.random.random(array.shape) < 0.5, array)


def _with_first(drawn: OutputArray, array: OutputArray) -> OutputArray:
    """A mask keeps its first place: a causal query that sees no key has no answer."""
    if array.ndim > 1:
        drawn[..., 0] = array[..., 0]
    return drawn


def _mirrored(array: OutputArray, values: ValueRange) -> OutputArray:
    if array.dtype.kind in "iub" and int(values.low) >= 0 and int(values.high) <= 1:
        return array  # a mask that is padded in front leaves the first queries without a key
    return np.ascontiguousarray(np.flip(array, axis=-1))


def _scaled(factor: float) -> Change:
    return lambda array, _: within(array.astype(np.float64) * factor, array)


def _turned(array: OutputArray, _: ValueRange) -> OutputArray:
    return np.logical_not(array)


def _bright(array: OutputArray, values: ValueRange) -> OutputArray:
    """One element of each sample ten times the largest magnitude."""
    if not array.size:
        return array
    peak = max(abs(float(values.low)), abs(float(values.high))) or 1.0
    changed = array.astype(np.float64).reshape(len(array), -1)
    changed[:, changed.shape[1] // 2] = 10.0 * peak
    return within(changed.reshape(array.shape), array)


_CHANGES: dict[str, dict[str, Change]] = {
    "zeros": {"f": _filled(0.0), "b": _filled(0.0)},
    "ones": {"f": _filled(1.0), "b": _filled(1.0)},
    "min": {"f": _lowest, "u": _lowest},
    "max": {"f": _highest, "u": _highest},
    "noise": {"f": _uniform, "i": _drawn, "u": _drawn, "b": _random_values},
    "negated": {"f": _scaled(-1.0), "b": _turned},
    "mirrored": {"f": _mirrored, "i": _mirrored, "u": _mirrored, "b": _mirrored},
    "scaled_10": {"f": _scaled(10.0)},
    "scaled_0.1": {"f": _scaled(0.1)},
    "bright": {"f": _bright},
}
"""By name of the probe, then by kind of dtype; a kind that is missing stays as it is."""


# A long sum of terms that repeat is rounded by as much as a variance changes that divides by n in
# the place of n - 1. Of numbers of one magnitude and both signs it is exact, whatever its order.


_MANY = 10_000
"""Terms of a long sum."""

_SUMS = ("reduced", "squares")
"""`ErrorModel.terms` of means, variances and norms."""


class LongSums(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether a model reduces many numbers to one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_used = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        model = error_model_for(bare(func._schema.name))
        if model is not None and model.terms in _SUMS and isinstance(args[0], torch.Tensor):
            result = returned[0] if isinstance(returned, tuple) else returned
            self.is_used = self.is_used or args[0].numel() >= _MANY * max(result.numel(), 1)
        return returned


def sum_probes(context: MeasurementContext, observed: SampleProfile) -> Iterator[Probe]:
    """Yield a probe of powers of two with alternating signs, if the model has a long sum."""
    names = [name for name, array in observed.rows.items() if array.dtype.kind == "f"]
    if names and context.watch(observed.batch(observed.small), LongSums).is_used:
        build = partial(_alternating, observed, names)
        yield Probe("alternating", "value", observed.small, build)


def _alternating(observed: SampleProfile, names: Sequence[str]) -> Batch:
    batch = observed.batch(observed.small)
    for name in names:
        peak = max(abs(float(observed.low[name])), abs(float(observed.high[name]))) or 1.0
        places = np.indices(batch[name].shape[1:]).sum(axis=0)
        signs = np.where(places % 2, -1.0, 1.0) * np.ones(batch[name].shape)
        batch[name] = within(signs * 2.0 ** np.floor(np.log2(peak)), batch[name])
    return batch


# A model of rows (recommender, fraud, forecaster) treats single columns: a threshold, a category
# that is stored as a float, -1 or -999 for what is missing. Probes that change all columns at once
# rarely meet such a value.


_MOST = 64
"""Columns of a table."""

_SPECIAL = (0.0, 1.0, -1.0, -999.0)


def column_probes(observed: SampleProfile) -> Iterator[Probe]:
    """Yield probes of the columns of each input of floats that is a table.

    Every column alone is set below and above its range, and to values that often have a special
    meaning. All are in one batch, in which each sample is judged in its own scale.
    """
    if observed.fixed:
        return
    for name, rows in observed.rows.items():
        if rows.dtype.kind == "f" and rows.ndim == 2 and 1 <= rows.shape[1] <= _MOST:
            size = rows.shape[1] * (len(_SPECIAL) + 2)
            build = partial(_columns, observed, name)
            yield Probe(f"columns_{name}", "value", size, build, apart=True)


def _columns(observed: SampleProfile, name: str) -> Batch:
    material = np.concatenate([observed.rows[name], observed.spread[name]]).astype(np.float64)
    material = np.nan_to_num(material, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = material.min(axis=0), material.max(axis=0)
    reach = np.maximum(high - low, np.abs(high))
    values = [*(np.full_like(low, value) for value in _SPECIAL), low - reach, high + reach]
    width = len(low)
    batch = observed.batch(width * len(values))
    changed = batch[name].astype(np.float64)
    places = np.arange(len(changed))
    changed[places, places % width] = np.concatenate(values)
    return {**batch, name: within(changed, batch[name])}
