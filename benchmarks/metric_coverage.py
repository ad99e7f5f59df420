"""Measure the coverage of the confidence bounds of metrics on simulated data sets.

    python -m benchmarks.metric_coverage            # 4 000 data sets for each case
    python -m benchmarks.metric_coverage --sets 400 --only F1

Each case draws a reference and a candidate on the same samples from a fixed seed. The expected drop
is known, and the result is the share of data sets whose one-sided upper bound at 95 % is at least
that drop. `scipy_bca` is the share for `scipy.stats.bootstrap` (BCa) on every hundredth data set.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from gate.metrics.builtin import built_in
from gate.metrics.intervals import MAX_BLOCKS
from gate.metrics.metric import Metric, OfSums, PerSample, State, drop_between, sides_of

Floats = NDArray[np.float64]

LEVEL = 0.95


class DataSet(NamedTuple):
    """A metric with its states on the same samples before and after a change."""

    metric: Metric
    reference: State
    candidate: State
    columns: tuple[Floats, ...] = ()
    """Arguments of `Case.drop`, each of shape (samples,)."""


class Case(NamedTuple):
    """A distribution of data sets whose expected drop is known."""

    draw: Callable[[np.random.Generator, int], DataSet]
    true_drop: float
    drop: Callable[..., Floats] | None = None
    """Compute the drop from `DataSet.columns` along `axis`, for scipy."""
    sign: float = 1.0


# Means of one value per sample.


def _mean_case(
    draw: Callable[[np.random.Generator, int], Floats], true_drop: float, *, binary: bool = False
) -> Case:
    metric = PerSample(lambda outputs, _labels: outputs)

    def data_set(rng: np.random.Generator, n: int) -> DataSet:
        drops = draw(rng, n)
        reference = np.where(drops > 0, drops, 0.0) if binary else np.ones(n)
        states = State(reference[:, None]), State((reference - drops)[:, None])
        return DataSet(metric, *states, (drops,))

    return Case(data_set, true_drop, np.mean)


def _draw_rare(share: float, size: float = 1.0) -> Callable[[np.random.Generator, int], Floats]:
    return lambda rng, n: np.where(rng.random(n) < share, size, 0.0)


def _draw_rare_exponential(share: float) -> Callable[[np.random.Generator, int], Floats]:
    return lambda rng, n: np.where(rng.random(n) < share, rng.exponential(0.2, n), 0.0)


def _draw_mixed(worse: float, better: float) -> Callable[[np.random.Generator, int], Floats]:
    def draw(rng: np.random.Generator, n: int) -> Floats:
        chance = rng.random(n)
        return np.where(chance < worse, 1.0, np.where(chance < worse + better, -1.0, 0.0))

    return draw


# Metrics of the whole data set.


def _drop_of_ratio(a: Floats, b: Floats, c: Floats, d: Floats, axis: int = -1) -> Floats:
    return np.asarray(a.sum(axis) / b.sum(axis) - c.sum(axis) / d.sum(axis))


def _f1_case(missed: float) -> Case:
    """Return the case of a binary F1 score.

    30 % of samples are positive and 90 % of predictions are right. The candidate turns a share of
    the positive predictions negative.
    """
    metric = built_in("f1", {"average": "binary"})

    def data_set(rng: np.random.Generator, n: int) -> DataSet:
        labels = rng.random(n) < 0.3
        before = np.where(rng.random(n) < 0.1, ~labels, labels)
        after = before & (rng.random(n) >= missed)
        states = [metric.update(side.astype(np.int64), labels.astype(np.int64))
                  for side in (before, after)]  # fmt: skip
        counts = [part.astype(float) for side in (before, after)
                  for part in (2 * (side & labels), side.astype(int) + labels)]  # fmt: skip
        return DataSet(metric, states[0], states[1], tuple(counts))

    kept_share = 1 - missed
    before, after = (
        2 * 0.27 / (0.27 + 0.07 + 0.3),
        2 * 0.27 * kept_share / (0.34 * kept_share + 0.3),
    )
    return Case(data_set, before - after, _drop_of_ratio)


def _wer_case(error_rate: float) -> Case:
    """Return the case of a word error rate.

    10 % of words are wrong. The candidate makes a share of the correct words wrong.
    """
    metric = OfSums(lambda outputs, _labels: outputs, lambda sums: sums[:, 0] / sums[:, 1],
                    vectorized=True)  # fmt: skip

    def data_set(rng: np.random.Generator, n: int) -> DataSet:
        words = 1 + rng.poisson(7, n)
        edits = rng.binomial(words, 0.1)
        changed = edits + rng.binomial(words - edits, error_rate)
        states = [State(np.column_stack([side, words]).astype(float)) for side in (edits, changed)]
        columns = [side.astype(float) for side in (changed, words, edits, words)]
        return DataSet(metric, states[0], states[1], tuple(columns))

    return Case(data_set, 0.9 * error_rate, _drop_of_ratio, sign=-1.0)


def _auroc_case(moved: float) -> Case:
    """Return the case of an AUROC.

    Scores are normal; those of positives have a mean of 2. The candidate redraws a share of the
    positives' scores from the distribution of the negatives.
    """
    metric = built_in("auroc", {})

    def data_set(rng: np.random.Generator, n: int) -> DataSet:
        labels = rng.random(n) < 0.5
        before = rng.normal(2.0 * labels)
        after = np.where(labels & (rng.random(n) < moved), rng.normal(size=n), before)
        states = [metric.update(side, labels.astype(np.int64)) for side in (before, after * 1.001)]
        return DataSet(metric, states[0], states[1])

    return Case(data_set, moved * (stats.norm.cdf(2.0 / np.sqrt(2.0)) - 0.5))


def _detections(rng: np.random.Generator, n: int, lost: float) -> tuple[State, State]:
    """Draw the detections of both sides for one object per image.

    The reference detects 90 % of objects, and 30 % of images have a false detection. The candidate
    loses a share of the objects.
    """
    hit, false = rng.random(n) < 0.9, rng.random(n) < 0.3
    scores = rng.random((2, n)) + np.array([[0.3], [0.0]])
    states = []
    for detected in (hit, hit & (rng.random(n) >= lost)):
        rows = np.zeros((3, n, 4))  # kind, class, score, matched
        rows[0, :, 2], rows[0, :, 3] = scores[0], 1.0
        rows[1, :, 2] = scores[1]
        rows[2, :, 0] = 1.0
        present = np.stack([detected, false, np.ones(n, dtype=bool)])
        in_order = rows.transpose(1, 0, 2)[present.T]
        states.append(State(in_order, present.sum(axis=0)))
    return states[0], states[1]


def _map_case(lost: float) -> Case:
    metric = built_in("map", {"thresholds": [0.5]})
    before, after = _detections(np.random.default_rng(0), 1_000_000, lost)
    values = [
        float(metric.statistic(state)(np.ones((1, MAX_BLOCKS)))[0]) for state in (before, after)
    ]
    return Case(lambda rng, n: DataSet(metric, *_detections(rng, n, lost)), values[0] - values[1])


CASES: dict[str, Callable[[], Case]] = {
    "0/1, p = 0.002, all worse": lambda: _mean_case(_draw_rare(0.002), 0.002, binary=True),
    "0/1, p = 0.002, as many better": lambda: _mean_case(
        _draw_mixed(0.001, 0.001), 0.0, binary=True
    ),
    "0/1, p = 0.02, 0.012 better": lambda: _mean_case(_draw_mixed(0.02, 0.012), 0.008, binary=True),
    "0/1, p = 0.1, as many better": lambda: _mean_case(_draw_mixed(0.05, 0.05), 0.0, binary=True),
    "half a point, p = 0.002": lambda: _mean_case(_draw_rare(0.002, 0.5), 0.001),
    "half a point, p = 0.05": lambda: _mean_case(_draw_rare(0.05, 0.5), 0.025),
    "normal": lambda: _mean_case(lambda rng, n: rng.normal(0.01, 0.1, n), 0.01),
    "exponential": lambda: _mean_case(lambda rng, n: rng.exponential(0.1, n), 0.1),
    "one in ten changes, exponential": lambda: _mean_case(_draw_rare_exponential(0.1), 0.02),
    "half a point, p = 0.002, and rounding": lambda: _mean_case(
        lambda rng, n: _draw_rare(0.002, 0.5)(rng, n) + rng.normal(0.0, 1e-7, n), 0.001
    ),
    "half a point, p = 0.002, as many better": lambda: _mean_case(
        lambda rng, n: 0.5 * _draw_mixed(0.001, 0.001)(rng, n), 0.0
    ),
    "exponential, p = 0.002": lambda: _mean_case(_draw_rare_exponential(0.002), 0.0004),
    "exponential, p = 0.02": lambda: _mean_case(_draw_rare_exponential(0.02), 0.004),
    "F1, p = 0.02": lambda: _f1_case(0.02),
    "F1, p = 0.002": lambda: _f1_case(0.002),
    "WER, p = 0.005": lambda: _wer_case(0.005),
    "WER, p = 0.0003": lambda: _wer_case(0.0003),
    "AUROC, p = 0.002": lambda: _auroc_case(0.002),
    "AUROC, p = 0.05": lambda: _auroc_case(0.05),
    "mAP, p = 0.02": lambda: _map_case(0.02),
}


def coverage(name: str, *, sets: int, samples: int, seed: int = 51) -> dict[str, float]:
    """Return the shares of data sets whose bound covers the true drop, for the gate and scipy."""
    case = CASES[name]()
    rng = np.random.default_rng([seed, samples, list(CASES).index(name)])
    covered, scipy_covered, scipy_sets = 0, 0, 0
    for index in range(sets):
        data = case.draw(rng, samples)
        sides = sides_of(data.metric, {"before": data.reference, "after": data.candidate})
        drop = drop_between(*sides.values(), sign=case.sign, levels=(LEVEL,))
        covered += drop.bounds[0] >= case.true_drop
        if index % 100 == 0 and case.drop is not None and drop.changed:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                interval = stats.bootstrap(
                    data.columns, case.drop, paired=True, confidence_level=2 * LEVEL - 1,
                    n_resamples=2_000, rng=rng,
                ).confidence_interval  # fmt: skip
            scipy_sets += 1
            scipy_covered += interval.high >= case.true_drop
    return {"coverage": covered / sets, "scipy_bca": scipy_covered / max(scipy_sets, 1)}


def main() -> None:
    """Print one line for each case and number of samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=4_000)
    parser.add_argument("--samples", type=int, nargs="+", default=[500, 2_000])
    parser.add_argument("--only", default="", help="cases whose name has this text")
    options = parser.parse_args()
    for name in [name for name in CASES if options.only in name]:
        for samples in options.samples:
            result = coverage(name, sets=options.sets, samples=samples)
            print(json.dumps({"case": name, "samples": samples, **result}), flush=True)


if __name__ == "__main__":
    main()
