"""Confidence bounds of metrics and of their drops. Imports numpy and scipy only."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr, ndtri, stdtrit

Array = NDArray[np.float64]

Method = Literal["exact", "bca", "rule_of_three", "unpaired"]
"""How a bound was computed; docs/task-metrics.md has the formulas."""

Statistic = Callable[[Array], Array]
"""The statistic of resamples: weights of the blocks, shape (resamples, blocks), to (resamples,)."""

SEED = 51

MAX_BLOCKS = 500
"""More samples are resampled in blocks, because the jackknife of n samples takes n^2 steps.
Blocks of s samples have 1/s of the variance and 1/sqrt(s) of the skewness, so that the variance and
the acceleration of BCa stay those of single samples."""

RESAMPLES = 4_999

OUTPUT_ROUNDING = 1e-5
"""Share of a value up to which a change is the rounding of float32 outputs."""

MIN_CHANGES = 10
"""Least number of changed samples for which BCa alone gives the bound. It resamples only changes
that occurred. A few may all be improvements, so the bound is at least that of the rule of three."""

_MAX_EXPANDED = 10.0
"""Largest factor by which alpha is reduced: the t tails of a few samples are very long."""

_SUM_ROUNDING = 1e-12
"""Share of the largest value below which a difference is rounding of a sum."""


class DropBounds(NamedTuple):
    """Upper confidence bounds of a drop, one for each level."""

    method: Method
    upper: tuple[float, ...]


def holm_levels(confidence: float, family: int) -> tuple[float, ...]:
    """Return the one-sided levels of Holm's procedure: 1 - alpha / r for r = 1 ... `family`."""
    alpha = 1.0 - confidence
    return tuple(1.0 - alpha / rank for rank in range(1, family + 1))


def holds_by_holm(bounds: Sequence[Sequence[float]], limit: float) -> list[bool]:
    """Return for which members of a family it is proven that the drop is at most `limit`.

    `bounds`: of each member its upper bounds at the levels of `holm_levels`. Holm, Scandinavian
    Journal of Statistics 6 (1979): the clearest member has to hold at 1 - alpha / family, the next
    one at 1 - alpha / (family - 1), and so on; the first that does not hold ends it.
    """
    open_ = set(range(len(bounds)))
    while open_:
        level = len(open_) - 1
        proven = {member for member in open_ if bounds[member][level] <= limit}
        if not proven:
            break
        open_ -= proven
    return [member not in open_ for member in range(len(bounds))]


def share_limits(count: int, samples: int, level: float) -> tuple[float, float]:
    """Return the one-sided lower and upper limit of a share, each at `level`.

    The exact binomial limits (Clopper and Pearson, Biometrika 26, 1934): quantiles of Beta
    distributions.
    """
    alpha = 1.0 - level
    lower = float(betaincinv(count, samples - count + 1, alpha)) if count else 0.0
    upper = float(betaincinv(count + 1, samples - count, level)) if count < samples else 1.0
    return lower, upper


def binary_bounds(worse: int, better: int, samples: int, levels: Sequence[float]) -> DropBounds:
    """Return upper bounds of (worse - better) / samples for metrics of 0 and 1 per sample.

    Only the samples that changed count. Their shares have exact binomial limits, and the limits of
    the difference follow from these by squaring and adding (MOVER: Zou and Donner, Statistics in
    Medicine 27, 2008). If all changes go one way this is the Clopper-Pearson bound; without any
    change it is the rule of three.
    """
    drop = (worse - better) / samples
    upper = []
    for level in levels:
        above = share_limits(worse, samples, level)[1] - worse / samples
        below = better / samples - share_limits(better, samples, level)[0]
        upper.append(drop + math.hypot(above, below))
    return DropBounds("exact" if worse + better else "rule_of_three", tuple(upper))


def rare_change_bounds(
    drop: float, samples: int, levels: Sequence[float], *, scale: float
) -> DropBounds:
    """Return upper bounds where no sample or few changed, or all changed by the same `drop`.

    At most a share of 1 - (1 - level)^(1 / samples), about 3 / samples at 95 %, changes
    differently, by `scale` at most.
    """
    room = max(scale - drop, 0.0)
    upper = (drop + room * -math.expm1(math.log1p(-level) / samples) for level in levels)
    return DropBounds("rule_of_three", tuple(upper))


class Distribution(NamedTuple):
    """The values of a statistic that BCa needs."""

    observed: float
    drawn: Array
    """On resamples, shape (resamples,)."""
    jackknife: Array
    """Without each block, shape (blocks,)."""

    def minus(self, subtrahend: Distribution, *, sign: float) -> Distribution:
        """Return the distribution of `sign` times the difference on the same resamples."""
        return Distribution(
            sign * (self.observed - subtrahend.observed),
            sign * (self.drawn - subtrahend.drawn),
            sign * (self.jackknife - subtrahend.jackknife),
        )


def resample(statistic: Statistic, blocks: int, *, resamples: int = RESAMPLES) -> Distribution:
    """Return a statistic on all blocks, on resamples with a fixed seed, and without each block."""
    return Distribution(
        float(statistic(np.ones((1, blocks)))[0]),
        statistic(_weights(blocks, resamples)),
        statistic(1.0 - np.eye(blocks)),
    )


def bca_limits(
    values: Distribution, levels: Sequence[float], *, rounding: float = 0.0
) -> tuple[Array, Array] | None:
    """Return one-sided lower and upper limits by the BCa bootstrap, shape (levels,) each.

    Efron, Journal of the American Statistical Association 82 (1987); equal to
    `scipy.stats.bootstrap` but for the resamples, without its n x n jackknife per level. None: the
    statistic is the same in all resamples, or leaving out any one block changes it by at most
    `rounding` divided by their number, so there is no interval. NaN where the statistic has no
    finite value on one of them.
    """
    observed, drawn, jackknife = values.observed, np.sort(values.drawn), values.jackknife
    resamples = len(drawn)
    if not (np.isfinite(drawn).all() and np.isfinite(jackknife).all() and math.isfinite(observed)):
        return np.full(len(levels), np.nan), np.full(len(levels), np.nan)
    influence = jackknife.mean() - jackknife
    tiny = _SUM_ROUNDING * max(abs(observed), float(np.abs(drawn).max()))
    effect = len(influence) * float(np.abs(influence).max())
    if drawn[-1] - drawn[0] <= tiny or effect <= max(rounding, tiny):
        return None
    acceleration = float((influence**3).sum()) / (6.0 * float((influence**2).sum()) ** 1.5)
    below = np.searchsorted(drawn, observed) + np.searchsorted(drawn, observed, side="right")
    bias = float(ndtri(np.clip(below / 2.0 / resamples, 0.5 / resamples, 1 - 0.5 / resamples)))

    def limit(quantiles: Array) -> Array:
        shifted = bias + ndtri(quantiles)
        # Beyond its pole the formula turns back: the farthest resample is the limit there.
        room = np.maximum(1.0 - acceleration * shifted, 1e-9)
        return np.asarray(np.quantile(drawn, ndtr(bias + shifted / room)))

    upper = np.asarray(levels)
    return limit(1.0 - upper), limit(upper)


def influential_blocks(difference: Distribution) -> int:
    """Return the number of blocks that a drop depends on.

    Leaving out any other block only rescales the drop, which moves it by about drop / blocks.
    """
    jackknife = difference.jackknife
    rescaling = abs(difference.observed) / len(jackknife)
    return int((np.abs(jackknife - jackknife.mean()) > 3.0 * rescaling + 1e-15).sum())


def expanded_level(level: float, samples: int) -> float:
    """Return the level at which a percentile interval of few samples covers `level`.

    The bootstrap's distribution is too narrow by sqrt((n - 1) / n), and has normal instead of t
    tails (Hesterberg, The American Statistician 69, 2015). `samples`: those that changed.
    """
    if samples < 2:
        return level
    quantile = stdtrit(samples - 1, level)
    expanded = float(ndtr(math.sqrt(samples / (samples - 1)) * quantile))
    return min(expanded, 1.0 - (1.0 - level) / _MAX_EXPANDED)


@functools.lru_cache(maxsize=4)
def _weights(blocks: int, resamples: int) -> Array:
    """Return how often each block is drawn: shape (resamples, blocks)."""
    rng = np.random.default_rng([SEED, blocks, resamples])
    drawn = rng.integers(blocks, size=(resamples, blocks))
    cells = drawn + blocks * np.arange(resamples)[:, None]
    counts = np.bincount(cells.ravel(), minlength=resamples * blocks)
    return counts.reshape(resamples, blocks).astype(np.float64)


def assign_blocks(samples: int) -> NDArray[np.int64]:
    """Return the block of each sample, at random but always the same: shape (samples,)."""
    if samples <= MAX_BLOCKS:
        return np.arange(samples)
    rng = np.random.default_rng([SEED, samples])
    return rng.permutation(np.arange(samples) % MAX_BLOCKS)


def block_sums(values: Array) -> Array:
    """Return sums over the blocks of samples: shape (samples, k) to (blocks, k)."""
    if len(values) <= MAX_BLOCKS:
        return values
    blocks = assign_blocks(len(values))
    return np.stack([np.bincount(blocks, weights=column) for column in values.T], axis=1)


def unpaired_bounds(
    left: tuple[float, float], right: tuple[float, float], levels: Sequence[float]
) -> DropBounds:
    """Return upper bounds of `left` - `right`, measured on different samples.

    `left`: value and upper limit; `right`: value and lower limit; both limits at the first level.
    The limits are combined by squaring and adding (MOVER), and widened for higher levels as those
    of a normal distribution.
    """
    drop = left[0] - right[0]
    width = math.hypot(left[1] - left[0], right[0] - right[1])
    first = float(ndtri(levels[0]))
    return DropBounds("unpaired", tuple(drop + width * float(ndtri(v)) / first for v in levels))
