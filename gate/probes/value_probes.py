"""Probes of value ranges, masks, table columns, NaN and infinity."""

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
from gate.probes.probe import MIN_RATIO, Probe, SampleProfile
from gate.reference.error_models import bare, error_model_for
from gate.reference.torch_session import DispatchMode
from gate.storage.arrays import Batch, OutputArray

# NaN and infinity are judged only for models that handle them: PyTorch's relu and max pooling
# propagate NaN, while a runtime may drop it. Therefore the model's code is watched for tests of
# finiteness, and judged where its outputs for the probe are finite.


_FINITENESS_TESTS = {
    "isfinite", "isinf", "isnan", "isneginf", "isposinf", "nan_to_num", "nan_to_num_",
    "nanmean", "nanmedian", "nanquantile", "nansum",
}  # fmt: skip

_EQUALITY = {"eq", "__eq__", "ne", "__ne__", "not_equal"}

_VALUES = {"nan": math.nan, "inf": math.inf, "minus_inf": -math.inf}


class NonfiniteHandling(TorchFunctionMode):
    """Records whether a model's code tests numbers for finiteness, including `x != x`."""

    def __init__(self) -> None:
        super().__init__()
        self.tests_finiteness = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        is_self_comparison = name in _EQUALITY and len(args) > 1 and args[0] is args[1]
        # PyTorch's own printing and checks also test this, but not inside a forward pass.
        self.tests_finiteness = (
            self.tests_finiteness
            or name in _FINITENESS_TESTS
            or (is_self_comparison and isinstance(args[0], torch.Tensor))
        )
        return func(*args, **(kwargs or {}))


def nonfinite_probes(context: MeasurementContext, profile: SampleProfile) -> Iterator[Probe]:
    """Yield one NaN and infinity of either sign per float input, if the model tests for
    finiteness."""
    names = [name for name, array in profile.rows.items() if array.dtype.kind == "f"]
    if not names:
        return
    if not context.watch(profile.batch(profile.small), NonfiniteHandling).tests_finiteness:
        return
    for name in names:
        suffix = f"_{name}" if len(names) > 1 else ""
        for title, value in _VALUES.items():
            build = partial(_with_value, profile, name, value)
            yield Probe(f"{title}{suffix}", "value", profile.small, build, finite=True)
        if _is_table(profile, name):  # missing values are often replaced by a value per column
            width = profile.rows[name].shape[1]
            build = partial(_with_missing_columns, profile, name)
            yield Probe(f"nan_columns{suffix}", "value", width, build, finite=True)


def _with_missing_columns(profile: SampleProfile, name: str) -> Batch:
    batch = profile.batch(profile.rows[name].shape[1])
    np.fill_diagonal(batch[name], math.nan)
    return batch


def _with_value(profile: SampleProfile, name: str, value: float) -> Batch:
    batch = profile.batch(profile.small)
    flat = batch[name].reshape(len(batch[name]), -1)
    flat[:, flat.shape[1] // 2] = np.asarray(value, flat.dtype)
    return batch


# Floats may take any value. Integers stay within the samples' range here, because they may be
# indices (`integer_probes` goes beyond), and are never all equal, because then none is the largest.
# Bools are all false, all true, inverted or random.


_PER_INPUT = ("zeros", "max", "negated", "scaled_10")
"""Probes that are repeated for each input alone if there are several, so that a branch on one of
them flips."""

_FACTORS = (1.0, 3.0, 10.0, 30.0, 100.0, -10.0, 0.01, 0.1)
"""Scale factors of the samples of one probe: values near one then cross 6 (relu6), 20 (softplus)
and 88 (where exp overflows)."""


class ValueRange(NamedTuple):
    """The range of an input's values in the samples."""

    low: OutputArray
    high: OutputArray
    random: np.random.Generator


_MASK_CHANGES = ("zeros", "ones", "min", "max", "mirrored")
"""Changes that suit a float mask, which contains only 0 and 1."""


Change = Callable[[OutputArray, ValueRange], OutputArray]
"""Maps an input array to another one of its shape and dtype."""


def value_probes(profile: SampleProfile) -> Iterator[Probe]:
    """Yield all value probes, cheapest and most revealing first; each changes all inputs it applies
    to."""
    names = list(profile.rows)
    for title in _CHANGES:
        if any(_applies(title, profile.rows[name]) for name in names):
            yield _value_probe(profile, title, title, tuple(names))
    if len(names) > 1:
        for name in names:
            for title in _PER_INPUT:
                if _applies(title, profile.rows[name]):
                    yield _value_probe(profile, f"{title}_{name}", title, (name,))
    if any(array.dtype.kind == "f" for array in profile.rows.values()):
        size = profile.small if profile.fixed else len(_FACTORS)
        for part in range(math.ceil(len(_FACTORS) / size)):
            factors = np.resize(np.roll(_FACTORS, -part * size), size)
            suffix = f"_{part + 1}" if part else ""
            build = partial(_scale_samples, profile, factors)
            yield Probe(
                f"magnitudes{suffix}",
                "value",
                size,
                build,
                scaled_by_sample=True,
                factors=tuple(map(float, factors)),
            )
    if profile.fixed and profile.small > 1:
        yield Probe("reversed", "value", profile.small, partial(_reverse_rows, profile))


def _value_probe(profile: SampleProfile, name: str, title: str, inputs: tuple[str, ...]) -> Probe:
    size = profile.small
    build = partial(_change_inputs, profile, title, inputs)
    factors = (10.0,) * size if title == "scaled_10" else ()
    return Probe(name, "value", size, build, factors=factors)


_NEARER_FACTOR = 9.5
"""Multiple of the samples' range, just below the one from which a file may overflow."""

NEARER_SUFFIX = "_nearer"


def nearer_probe(profile: SampleProfile, probe: Probe) -> Probe:
    """Return the probe scaled back to 9.5 times the samples at most.

    It finds a file that overflows between the factors of the other probes.
    """
    build = partial(_scale_back, profile, probe)
    return Probe(
        f"{probe.name}{NEARER_SUFFIX}", probe.kind, probe.size, build, scaled_by_sample=True
    )


def _scale_back(profile: SampleProfile, probe: Probe) -> Batch:
    factors_beyond = profile.reach(probe)
    shrink = _NEARER_FACTOR / np.maximum(factors_beyond, _NEARER_FACTOR)
    batch = dict(probe.batch)
    for name, array in batch.items():
        if array.dtype.kind == "f" and len(array) == probe.size:
            outside = profile.ratios(name, array) >= MIN_RATIO
            factors = np.where(outside, shrink, 1.0).reshape(-1, *[1] * (array.ndim - 1))
            batch[name] = within(array.astype(np.float64) * factors, array)
    return batch


def within(values: NDArray[np.float64], like: OutputArray) -> OutputArray:
    """Return `values` in the float dtype of `like`, clipped to its finite range."""
    limits: Any = np.finfo(like.dtype)
    with np.errstate(over="ignore"):
        return np.clip(values, float(limits.min), float(limits.max)).astype(like.dtype)


def _change_inputs(profile: SampleProfile, title: str, names: tuple[str, ...]) -> Batch:
    batch = profile.batch(profile.small)
    if title not in _MASK_CHANGES:
        names = tuple(name for name in names if name not in _find_masks(profile))
    for name, array in batch.items():
        if name in names and _applies(title, array):
            values = ValueRange(
                profile.low[name], profile.high[name], profile.random(f"{title} {name}")
            )
            with np.errstate(over="ignore"):  # `within` clips it
                batch[name] = _CHANGES[title][array.dtype.kind](array, values)
    return batch


def _scale_samples(profile: SampleProfile, scales: NDArray[np.float64]) -> Batch:
    """Return samples from the whole set, each scaled by its own factor; float masks are
    unchanged."""
    size = len(scales)
    batch: dict[str, OutputArray] = {}
    masks = _find_masks(profile)
    for name, array in profile.spread.items():
        rows = array[np.arange(size) % len(array)]
        if array.dtype.kind == "f" and name not in masks:
            factors = scales.reshape(-1, *[1] * (rows.ndim - 1))
            with np.errstate(over="ignore"):  # `within` clips it
                rows = within(rows.astype(np.float64) * factors, rows)
        batch[name] = np.ascontiguousarray(rows)
    return batch


def _find_masks(profile: SampleProfile) -> set[str]:
    """Return the float inputs that contain only zeros and ones, if other float inputs do not."""
    floats = {name for name, array in profile.rows.items() if array.dtype.kind == "f"}
    masks = {name for name in floats if _is_mask(profile, name)}
    return masks if masks < floats else set()


def _is_mask(profile: SampleProfile, name: str) -> bool:
    return (
        float(profile.low[name]) >= 0.0
        and float(profile.high[name]) == 1.0
        and bool(np.isin(profile.rows[name], (0.0, 1.0)).all())
    )


def _reverse_rows(profile: SampleProfile) -> Batch:
    batch = profile.batch(profile.small)
    return {name: np.ascontiguousarray(array[::-1]) for name, array in batch.items()}


def _applies(title: str, array: OutputArray) -> bool:
    return array.dtype.kind in _CHANGES[title] and (title != "mirrored" or array.ndim > 1)


def _fill_with(value: float) -> Change:
    return lambda array, _: np.full_like(array, value)


def _lowest(array: OutputArray, values: ValueRange) -> OutputArray:
    return np.full_like(array, values.low)


def _highest(array: OutputArray, values: ValueRange) -> OutputArray:
    return np.full_like(array, values.high)


def _uniform(array: OutputArray, values: ValueRange) -> OutputArray:
    random_values = values.random.uniform(0.0, 1.0, array.shape)
    return within(
        float(values.low) * (1.0 - random_values) + float(values.high) * random_values, array
    )


def _random_integers(array: OutputArray, values: ValueRange) -> OutputArray:
    low, high = int(values.low), int(values.high)
    random_values = values.random.integers(
        low, high, array.shape, dtype=array.dtype.type, endpoint=True
    )
    return _with_first(random_values, array) if low >= 0 and high <= 1 else random_values


def _random_values(array: OutputArray, values: ValueRange) -> OutputArray:
    return _with_first(values.random.random(array.shape) < 0.5, array)


def _with_first(random_values: OutputArray, array: OutputArray) -> OutputArray:
    """Keep the first position of a mask: a causal query without a valid key has no defined
    result."""
    if array.ndim > 1:
        random_values[..., 0] = array[..., 0]
    return random_values


def _mirror(array: OutputArray, values: ValueRange) -> OutputArray:
    if array.dtype.kind in "iub" and int(values.low) >= 0 and int(values.high) <= 1:
        return array  # with padding in front, the first queries would have no key
    return np.ascontiguousarray(np.flip(array, axis=-1))


def _scale_by(factor: float) -> Change:
    return lambda array, _: within(array.astype(np.float64) * factor, array)


def _with_peak(array: OutputArray, values: ValueRange) -> OutputArray:
    """Set one element of each sample to ten times the largest magnitude."""
    if not array.size:
        return array
    peak = max(abs(float(values.low)), abs(float(values.high))) or 1.0
    changed = array.astype(np.float64).reshape(len(array), -1)
    changed[:, changed.shape[1] // 2] = 10.0 * peak
    return within(changed.reshape(array.shape), array)


_CHANGES: dict[str, dict[str, Change]] = {
    "zeros": {"f": _fill_with(0.0), "b": _fill_with(0.0)},
    "ones": {"f": _fill_with(1.0), "b": _fill_with(1.0)},
    "min": {"f": _lowest, "u": _lowest},
    "max": {"f": _highest, "u": _highest},
    "noise": {"f": _uniform, "i": _random_integers, "u": _random_integers, "b": _random_values},
    "negated": {"f": _scale_by(-1.0), "b": lambda array, _: np.logical_not(array)},
    "mirrored": {"f": _mirror, "i": _mirror, "u": _mirror, "b": _mirror},
    "scaled_10": {"f": _scale_by(10.0)},
    "scaled_0.1": {"f": _scale_by(0.1)},
    "bright": {"f": _with_peak},
}
"""Changes by probe name, then by dtype kind. A missing kind is left unchanged."""


# In a long sum of repeated terms, rounding is as large as the difference between dividing a
# variance by n and by n - 1. A sum of equal magnitudes with both signs is exact in any order.


_LONG_SUM = 10_000
"""Number of terms of a long sum."""

_SUMS = ("reduced", "squares")
"""`ErrorModel.terms` of means, variances and norms."""


class LongSums(DispatchMode):
    """Records whether a model reduces many numbers to one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_used = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        model = error_model_for(bare(func._schema.name))
        if model is not None and model.terms in _SUMS and isinstance(args[0], torch.Tensor):
            result = returned[0] if isinstance(returned, tuple) else returned
            self.is_used = self.is_used or args[0].numel() >= _LONG_SUM * max(result.numel(), 1)
        return returned


def sum_probes(context: MeasurementContext, profile: SampleProfile) -> Iterator[Probe]:
    """Yield a probe of powers of two with alternating signs, if the model has a long sum."""
    names = [name for name, array in profile.rows.items() if array.dtype.kind == "f"]
    if names and context.watch(profile.batch(profile.small), LongSums).is_used:
        build = partial(_alternate_signs, profile, names)
        yield Probe("alternating", "value", profile.small, build)


def _alternate_signs(profile: SampleProfile, names: Sequence[str]) -> Batch:
    batch = profile.batch(profile.small)
    for name in names:
        peak = max(abs(float(profile.low[name])), abs(float(profile.high[name]))) or 1.0
        positions = np.indices(batch[name].shape[1:]).sum(axis=0)
        signs = np.where(positions % 2, -1.0, 1.0) * np.ones(batch[name].shape)
        batch[name] = within(signs * 2.0 ** np.floor(np.log2(peak)), batch[name])
    return batch


# A model of tables (recommender, fraud detection, forecasting) may treat single columns specially:
# a threshold, a category stored as a float, -1 or -999 for a missing value. Probes that change all
# columns at once rarely reach such a branch.


_MAX_COLUMNS = 64
"""Largest number of columns of a table."""

_SPECIAL_VALUES = (0.0, 1.0, -1.0, -999.0)


def _is_table(profile: SampleProfile, name: str) -> bool:
    """Return whether a float input has few columns, and its samples form batches of any size."""
    rows = profile.rows[name]
    is_flat = rows.dtype.kind == "f" and rows.ndim == 2
    return not profile.fixed and is_flat and 1 <= rows.shape[1] <= _MAX_COLUMNS


def column_probes(profile: SampleProfile) -> Iterator[Probe]:
    """Yield a probe of the columns of each float input that is a table.

    Each column alone is set below and above its range, and to values that often have a special
    meaning. All changes are in one batch, in which each sample is judged in its own scale.
    """
    for name, rows in profile.rows.items():
        if _is_table(profile, name):
            size = rows.shape[1] * (len(_SPECIAL_VALUES) + 2)
            build = partial(_change_columns, profile, name)
            yield Probe(f"columns_{name}", "value", size, build, scaled_by_sample=True)


def _change_columns(profile: SampleProfile, name: str) -> Batch:
    sampled = np.concatenate([profile.rows[name], profile.spread[name]]).astype(np.float64)
    sampled = np.nan_to_num(sampled, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = sampled.min(axis=0), sampled.max(axis=0)
    distance = np.maximum(high - low, np.abs(high))
    special = (np.full_like(low, value) for value in _SPECIAL_VALUES)
    values = [*special, low - distance, high + distance]
    width = len(low)
    batch = profile.batch(width * len(values))
    changed = batch[name].astype(np.float64)
    rows = np.arange(len(changed))
    changed[rows, rows % width] = np.concatenate(values)
    return {**batch, name: within(changed, batch[name])}
