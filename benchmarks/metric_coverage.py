"""Coverage of the confidence bounds of metrics, on simulated data sets with a fixed seed.

    python -m benchmarks.metric_coverage            # 4 000 data sets for each case
    python -m benchmarks.metric_coverage --sets 400

Each case draws paired differences per sample whose true mean drop is known, and counts how often
the one-sided upper bound at 95 % is at least the true drop. `scipy` is `scipy.stats.bootstrap`
(BCa) on every hundredth data set.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from gate.metrics.metric import PerSample, State, drop_between
from gate.records.metrics import MetricDrop

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
"""The drops of n samples."""

LEVEL = 0.95


def paired_drop(
    reference: NDArray[np.float64], values: NDArray[np.float64], *, levels: tuple[float, ...]
) -> MetricDrop:
    """Return the mean drop of values per sample, shape (samples,) each, with its bounds."""
    metric = PerSample(lambda outputs, _labels: outputs)
    before, after = State(reference[:, None]), State(values[:, None])
    return drop_between(metric, before, after, sign=1.0, levels=levels)


def _rare(share: float, size: float = 1.0) -> Draw:
    return lambda rng, n: np.where(rng.random(n) < share, size, 0.0)


def _rounded(draw: Draw) -> Draw:
    return lambda rng, n: draw(rng, n) + rng.normal(0.0, 1e-7, n)


def _mixed(worse: float, better: float) -> Draw:
    def draw(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        chance = rng.random(n)
        return np.where(chance < worse, 1.0, np.where(chance < worse + better, -1.0, 0.0))

    return draw


CASES: dict[str, tuple[Draw, float, bool]] = {
    "0/1, p = 0.002, all worse": (_rare(0.002), 0.002, True),
    "0/1, p = 0.002, as many better": (_mixed(0.001, 0.001), 0.0, True),
    "0/1, p = 0.02, 0.012 better": (_mixed(0.02, 0.012), 0.008, True),
    "0/1, p = 0.1, as many better": (_mixed(0.05, 0.05), 0.0, True),
    "half a point, p = 0.002": (_rare(0.002, 0.5), 0.001, False),
    "half a point, p = 0.05": (_rare(0.05, 0.5), 0.025, False),
    "normal": (lambda rng, n: rng.normal(0.01, 0.1, n), 0.01, False),
    "exponential": (lambda rng, n: rng.exponential(0.1, n), 0.1, False),
    "one in ten changes, exponential": (
        lambda rng, n: np.where(rng.random(n) < 0.1, rng.exponential(0.2, n), 0.0), 0.02, False,
    ),
    "half a point, p = 0.002, and rounding": (_rounded(_rare(0.002, 0.5)), 0.001, False),
}  # fmt: skip
"""Drops, their true mean, and whether the metric is 0 or 1 per sample."""


def coverage(name: str, *, sets: int, samples: int, seed: int = 51) -> dict[str, float]:
    """Return shares of data sets whose bound covers the true drop: ours and scipy's BCa."""
    draw, true, binary = CASES[name]
    rng = np.random.default_rng([seed, samples, list(CASES).index(name)])
    ours, peer, peers = 0, 0, 0
    for index in range(sets):
        drops = draw(rng, samples)
        reference = np.where(drops > 0, drops, 0.0) if binary else np.ones(samples)
        found = paired_drop(reference, reference - drops, levels=(LEVEL,))
        ours += found.bounds[0] >= true
        if index % 100 == 0 and drops.any():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                interval = stats.bootstrap(
                    (drops,), np.mean, confidence_level=2 * LEVEL - 1, n_resamples=2_000, rng=rng
                ).confidence_interval
            peers += 1
            peer += interval.high >= true
    return {"coverage": ours / sets, "scipy_bca": peer / max(peers, 1)}


def main() -> None:
    """Print one line for each case and number of samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=4_000)
    parser.add_argument("--samples", type=int, nargs="+", default=[500, 2_000])
    parser.add_argument("--only", default="", help="cases whose name has this text")
    given = parser.parse_args()
    for name in [name for name in CASES if given.only in name]:
        for samples in given.samples:
            found = coverage(name, sets=given.sets, samples=samples)
            print(json.dumps({"case": name, "samples": samples, **found}), flush=True)


if __name__ == "__main__":
    main()
