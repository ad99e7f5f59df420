from __future__ import annotations

import pytest

from gate.measure.cost_meter import KEPT, Stopwatch


def watched(*batches):
    stopwatch = Stopwatch()
    for seconds, size in batches:
        stopwatch.add(seconds, batch_size=size)
    return stopwatch.result()


def test_nothing_timed_is_no_latency():
    assert watched() is None


def test_the_only_batch_counts():
    latency = watched((0.5, 3))
    assert (latency.batch_size, latency.batches, latency.median_ms) == (3, 1, 500.0)


def test_the_first_batch_warms_up_and_a_partial_last_one_is_left_out():
    latency = watched((9.0, 8), (0.01, 8), (0.02, 8), (0.03, 8), (5.0, 2))
    assert (latency.batch_size, latency.batches) == (8, 3)
    assert latency.median_ms == pytest.approx(20.0)
    assert latency.p95_ms == pytest.approx(29.0)


def test_times_are_capped():
    assert watched(*[(0.001, 4)] * (KEPT + 50)).batches == KEPT
