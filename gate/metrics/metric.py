"""Metrics with a state per sample, and their values and drops by group."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError, PolicyError, describe_error
from gate.metrics import intervals
from gate.metrics.intervals import Array, Distribution, DropBounds, Statistic
from gate.policy.metrics import MetricPolicy
from gate.records.metrics import MetricDrop, MetricGroup, MetricSide, MetricValue

# Runs in the process of the metrics (`gate.metrics.process`). Resampling never calls the function
# of a metric: it weights the stored states of the samples.


class State(NamedTuple):
    """The states of all samples on one side."""

    rows: Array
    """float64, shape (rows, k)."""
    lengths: NDArray[np.int64] | None = None
    """Number of rows of each sample, shape (samples,). None: one row per sample."""

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.rows if self.lengths is None else self.lengths)

    def take(self, mask: NDArray[np.bool_]) -> State:
        """Return the state of the samples where `mask` is true."""
        if self.lengths is None:
            return State(self.rows[mask])
        return State(self.rows[np.repeat(mask, self.lengths)], self.lengths[mask])

    def differs(self, other: State, *, rounding: float = 0.0) -> NDArray[np.bool_]:
        """Return a mask of samples whose state differs in `other`, shape (samples,).

        `rounding`: share of a value, or of the mean of its column if that is larger, up to which
        changes are ignored.
        """
        sizes = np.abs(self.rows)
        allowed = rounding * np.maximum(sizes, sizes.sum(axis=0) / max(len(sizes), 1))
        if self.lengths is None or other.lengths is None:
            return np.asarray((np.abs(self.rows - other.rows) > allowed).any(axis=1))
        changed = self.lengths != other.lengths
        starts, other_starts = (np.cumsum(n) - n for n in (self.lengths, other.lengths))
        for i in np.flatnonzero(~changed):
            start, size = starts[i], self.lengths[i]
            rows = self.rows[start : start + size]
            other_rows = other.rows[other_starts[i] : other_starts[i] + size]
            changed[i] = bool((np.abs(rows - other_rows) > allowed[start : start + size]).any())
        return np.asarray(changed)

    @classmethod
    def joined(cls, parts: Sequence[State]) -> State:
        """Concatenate the states of consecutive ranges of samples."""
        rows = np.concatenate([part.rows for part in parts])
        if parts[0].lengths is None:
            return cls(rows)
        return cls(
            rows, np.concatenate([part.lengths for part in parts if part.lengths is not None])
        )


class Metric(Protocol):
    """A metric with a state per sample."""

    resamples: int
    """Number of bootstrap resamples."""
    columns: slice = slice(None)
    """Columns of the state that determine the value."""
    ranks: bool = False
    """True if only the order of scores counts, so that most changed scores have no effect."""

    def update(self, outputs: Any, labels: Any) -> State:
        """Return the state of each sample of a batch."""

    def statistic(self, state: State) -> Statistic:
        """Return the function that maps weights of blocks, shape (resamples, blocks), to values,
        shape (resamples,)."""

    def check_reference(self, state: State) -> None:
        """Raise DataError if the states of the reference over all samples show that outputs or
        labels have the wrong kind, so that no drop would be visible."""
        del state  # the default accepts any states

    def differing(self, left: State, right: State, *, rounding: float = 0.0) -> NDArray[np.bool_]:
        """Return a mask of samples with different states (`State.differs`), shape (samples,)."""
        a, b = (State(s.rows[:, self.columns], s.lengths) for s in (left, right))
        return a.differs(b, rounding=rounding)


class PerSample(Metric):
    """The mean or sum of one value per sample."""

    resamples = intervals.RESAMPLES

    def __init__(self, function: Callable[..., Any], *, total: bool = False) -> None:
        self._function = function
        self.total = total

    def update(self, outputs: Any, labels: Any) -> State:
        """Call the function. Raises DataError unless it returns a finite value per sample."""
        values = np.asarray(_plain(self._function(outputs, labels)), dtype=np.float64)
        if values.ndim != 1:
            raise DataError(
                f"it returned shape {values.shape}, expected (samples,): one value for "
                "each sample. Set aggregate: dataset for one value of all samples"
            )
        return State(values[:, None])

    def statistic(self, state: State) -> Statistic:
        """Return the metric as a function of block weights, from sums over blocks."""
        sums = intervals.block_sums(np.column_stack([state.rows[:, 0], np.ones(state.samples)]))

        def value(weights: Array) -> Array:
            totals = weights @ sums
            return totals[:, 0] if self.total else totals[:, 0] / totals[:, 1]

        return value


class OfSums(Metric):
    """A function of sums of per-sample states: F1 of counts, WER of edits and words."""

    def __init__(
        self,
        update: Callable[..., Any],
        compute: Callable[[Array], Any],
        *,
        vectorized: bool = False,
    ) -> None:
        """`update(outputs, labels)` returns shape (samples, k); `compute(sums)` takes shape (k,),
        or (n, k) if `vectorized`."""
        self._update, self._compute, self._vectorized = update, compute, vectorized
        self.resamples = intervals.RESAMPLES if vectorized else 999

    def update(self, outputs: Any, labels: Any) -> State:
        """Call `update`. Raises DataError unless it returns one row per sample."""
        rows = np.asarray(_plain(self._update(outputs, labels)), dtype=np.float64)
        if rows.ndim != 2:
            raise DataError(
                f"update returned shape {rows.shape}, expected (samples, k): one row for each "
                "sample"
            )
        return State(rows)

    def statistic(self, state: State) -> Statistic:
        """Return the metric as a function of block weights, from sums over blocks."""
        sums = intervals.block_sums(state.rows)

        def value(weights: Array) -> Array:
            totals = weights @ sums
            if self._vectorized:
                return np.asarray(self._compute(totals), dtype=np.float64)
            return np.array([float(self._compute(each)) for each in totals])

        return value


def _plain(value: Any) -> Any:
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def open_metric(policy: MetricPolicy) -> Metric:
    """Return the metric of a policy. Raises PolicyError if it can't be used."""
    if policy.is_builtin:
        from gate.metrics.builtin import built_in

        return built_in(policy.function, policy.options)
    target = _import_function(policy.function)
    dataset, total = policy.aggregation == "dataset", policy.aggregation == "sum"
    if isinstance(target, type) or _is_factory(target):
        target = target(**policy.options)
    elif policy.options:
        target = _with_options(target, policy.options)
    if _is_torchmetric(target):
        if policy.aggregate is None:
            raise PolicyError(
                f"{policy.function} is a torchmetrics.Metric, which can compute one value over all "
                "samples or one per sample. Set aggregate: dataset, or aggregate: mean for the "
                "mean of the values per sample"
            )
        return _of_torchmetric(target, dataset=dataset, total=total)
    if dataset and hasattr(target, "update") and hasattr(target, "compute"):
        return OfSums(target.update, target.compute)
    if dataset or not callable(target):
        raise PolicyError(
            f"{policy.function} is {type(target).__name__}, expected "
            + (
                "a torchmetrics.Metric, or an object with update(outputs, labels) that returns a "
                "row of counts per sample and compute(sums): the interval of a data set's value "
                "needs a state per sample"
                if dataset
                else "a function (outputs, labels)"
            )
        )
    return PerSample(target, total=total)


def _is_factory(target: Any) -> bool:
    """Return whether a function takes no arguments, so that it returns the metric."""
    return inspect.isfunction(target) and not inspect.signature(target).parameters


def _with_options(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    return lambda outputs, labels: function(outputs, labels, **options)


def _import_function(function: str) -> Any:
    module, _, path = function.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        target: Any = importlib.import_module(module)
        for name in path.split("."):
            target = getattr(target, name)
    except (Exception, SystemExit) as error:
        raise PolicyError(f"{function} cannot be imported: {describe_error(error)}") from error
    return target


def _is_torchmetric(target: Any) -> bool:
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(target, module.Metric)


def _of_torchmetric(metric: Any, *, dataset: bool, total: bool) -> Metric:
    """Return a metric with the states of single samples. Raises PolicyError unless they are
    sums."""
    import torch

    def each(outputs: Any, labels: Any) -> Any:
        for sample in range(len(outputs)):
            metric.reset()
            metric.update(
                torch.as_tensor(np.asarray(outputs[sample : sample + 1])),
                torch.as_tensor(np.asarray(labels[sample : sample + 1])),
            )
            yield metric

    if not dataset:

        def values(outputs: Any, labels: Any) -> Any:
            return [float(updated.compute()) for updated in each(outputs, labels)]

        return PerSample(values, total=total)
    names = [
        name
        for name, reduce in metric._reductions.items()
        if getattr(reduce, "__name__", "") in ("sum", "dim_zero_sum")
    ]
    unsupported = [name for name in metric._reductions if name not in names]
    if unsupported:
        raise PolicyError(
            f"the state {unsupported[0]!r} of {type(metric).__name__} is not a sum over samples, "
            "so it has no interval without computing the whole metric again and again. Use "
            "thresholds= (binned states), a built-in metric, or aggregate: mean"
        )
    defaults = [metric._defaults[name] for name in names]
    ends = np.cumsum([default.numel() for default in defaults])

    def update(outputs: Any, labels: Any) -> Any:
        rows = []
        for updated in each(outputs, labels):
            states = [np.asarray(getattr(updated, name).cpu(), dtype=np.float64) for name in names]
            rows.append(np.concatenate([state.ravel() for state in states]))
        return np.stack(rows)

    def compute(sums: Array) -> float:
        metric.reset()
        for name, default, values in zip(names, defaults, np.split(sums, ends[:-1]), strict=True):
            state = torch.as_tensor(values.reshape(tuple(default.shape)))
            setattr(metric, name, state.to(default.dtype))
        metric._update_count = 1
        return float(metric.compute())

    return OfSums(update, compute)


# Values and drops.


@dataclass(frozen=True)
class Slice:
    """The samples with one value in a column, or all samples."""

    column: str | None
    label: str | None
    mask: NDArray[np.bool_]


class Side:
    """A metric on the samples of one side. The bootstrap is computed once, on demand."""

    def __init__(self, metric: Metric, state: State) -> None:
        self.metric, self.state = metric, state

    @cached_property
    def distribution(self) -> Distribution:
        """The metric on all samples, on resamples and without each block."""
        blocks = min(self.state.samples, intervals.MAX_BLOCKS)
        statistic = self.metric.statistic(self.state)
        return intervals.resample(statistic, blocks, resamples=self.metric.resamples)

    @property
    def is_binary_mean(self) -> bool:
        """Return whether it is the mean of values of 0 and 1."""
        if not isinstance(self.metric, PerSample) or self.metric.total:
            return False
        return bool(((self.state.rows == 0.0) | (self.state.rows == 1.0)).all())

    @property
    def value(self) -> float:
        """The value on all samples."""
        if self.is_binary_mean:
            return float(self.state.rows.mean())
        return self.distribution.observed


def sides_of(metric: Metric, states: Mapping[str, State]) -> dict[str, Side]:
    """Return the side of each state. States without a differing sample share one bootstrap."""
    sides: dict[str, Side] = {}
    for name, state in states.items():
        equal = (each for each in sides.values() if not metric.differing(each.state, state).any())
        sides[name] = next(equal, None) or Side(metric, state)
    return sides


def drop_between(
    reference: Side, side: Side, *, sign: float, levels: Sequence[float]
) -> MetricDrop:
    """Return how much worse `side` is than `reference` on the same samples.

    `sign`: 1.0 if higher is better, else -1.0. `levels`: confidence levels of the bounds.
    """
    samples = side.state.samples
    drop = sign * (reference.value - side.value)
    differing = side.metric.differing(
        reference.state, side.state, rounding=intervals.OUTPUT_ROUNDING
    )
    changed, scale = int(differing.sum()), _scale(reference, side)
    if reference.is_binary_mean and side.is_binary_mean:
        drops = sign * (reference.state.rows[:, 0] - side.state.rows[:, 0])
        worse, better = int((drops > 0).sum()), int((drops < 0).sum())
        bounds: DropBounds = intervals.binary_bounds(worse, better, samples, levels)
    else:
        limits = None
        if side is not reference:
            expanded = [intervals.expanded_level(level, changed) for level in levels]
            difference = reference.distribution.minus(side.distribution, sign=sign)
            limits = intervals.bca_limits(
                difference, expanded, rounding=intervals.OUTPUT_ROUNDING * scale
            )
        bounds = intervals.rare_change_bounds(drop, samples, levels, scale=scale)
        if limits is not None:
            upper = tuple(map(float, limits[1]))
            effects = changed
            if side.metric.ranks:
                effects = min(changed, intervals.influential_blocks(difference))
            if effects >= intervals.MIN_CHANGES or not bounds.upper[0] > upper[0]:
                bounds = DropBounds("bca", upper)
    return MetricDrop(
        drop=drop, changed=changed, method=bounds.method, bounds=bounds.upper, scale=scale
    )


def _scale(*sides: Side) -> float:
    """Return the largest possible drop of a sample, as estimated from the samples.

    For a mean, the range of its values. For other metrics, the effect of leaving out one sample
    times their number. At least the largest value, and 1 if all values are 0.
    """
    metric = sides[0].metric
    if isinstance(metric, PerSample):
        rows = np.concatenate([side.state.rows for side in sides])
        scale = float(max(np.ptp(rows), np.abs(rows).max()))
        samples = sides[0].state.samples if metric.total else 1
        return (scale or 1.0) * samples
    scales = [1e-300]
    for side in sides:
        value, _, without = side.distribution
        scales += [abs(value)]
        if len(without) > 1:
            scales += [len(without) * float(np.nanmax(np.abs(without - value), initial=0.0))]
    return max(scales) if max(scales) > 1e-300 else 1.0


def _value(side: Side, *, level: float) -> MetricValue:
    """Return the value on all samples, with one-sided limits at `level`."""
    rows, samples = side.state.rows, side.state.samples
    if side.is_binary_mean:
        low, high = intervals.share_limits(int(rows.sum()), samples, level)
        return MetricValue(value=side.value, low=low, high=high)
    limits = intervals.bca_limits(side.distribution, [level])
    if limits is None:  # all samples are equal: at most a share of about 3 / n differs
        room = _scale(side) * -np.expm1(np.log1p(-level) / samples)
        return MetricValue(value=side.value, low=side.value - room, high=side.value + room)
    return MetricValue(value=side.value, low=float(limits[0][0]), high=float(limits[1][0]))


def compute_groups(
    metric: Metric,
    policy: MetricPolicy,
    states: Mapping[str, State],
    slices: Sequence[Slice],
    *,
    reference: str,
) -> tuple[MetricGroup, ...]:
    """Return the group of all samples, then those of the slices, with values and drops.

    Raises DataError if the metric has no finite value on a group, or can't drop.
    """
    sign = 1.0 if policy.is_higher_better else -1.0
    all_samples = Slice(None, None, np.ones(states[reference].samples, dtype=bool))
    family = intervals.holm_levels(policy.confidence, len(slices))
    metric.check_reference(states[reference])
    groups = []
    for part in (all_samples, *slices):
        sides = sides_of(metric, {name: state.take(part.mask) for name, state in states.items()})
        levels = family if part.column is not None else (policy.confidence,)
        runtimes = {}
        values = {name: _value(side, level=policy.confidence) for name, side in sides.items()}
        _check_values(policy, values, part, reference=reference)
        for side, value in values.items():
            if side == reference:
                continue
            change = drop_between(sides[reference], sides[side], sign=sign, levels=levels)
            runtimes[side] = MetricSide(**value.model_dump(), change=change)
        groups.append(
            MetricGroup(
                column=part.column,
                label=part.label,
                samples=int(part.mask.sum()),
                reference=values[reference],
                runtimes=runtimes,
            )
        )
    return tuple(groups)


def _check_values(
    policy: MetricPolicy, values: Mapping[str, MetricValue], part: Slice, *, reference: str
) -> None:
    where = "all samples" if part.column is None else f"{part.column}={part.label}"
    for side, value in values.items():
        if not np.isfinite(value.value):
            raise DataError(
                f"the value of {side} on {where} ({part.mask.sum()}) is {value.value}, expected a "
                "number. Each group needs samples that the metric counts, for auroc of both classes"
            )
    worst = policy.is_higher_better and values[reference].value == 0.0
    is_suspicious = policy.is_builtin or not any(value.value for value in values.values())
    if worst and is_suspicious and part.column is None:
        raise DataError(
            f"the value of {reference} is 0, so that no drop is possible. Check the labels; for a "
            "count of errors, set higher_is_better: false"
        )
