from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from tests.probes import benches


@pytest.mark.parametrize("count", [80, 256])
def test_the_range_is_that_of_256_samples(count):
    x = np.zeros((count, 2), np.float32)
    x[10, 0], x[-1, 0] = -3.0, 100.0
    seen = benches.observed(nn.Identity(), {"x": x})
    assert (seen.low["x"], seen.high["x"]) == (-3.0, 100.0)
    assert seen.low["x"].dtype == np.float32


def test_of_more_it_is_that_of_samples_from_everywhere():
    x = np.arange(4000, dtype=np.float32).reshape(2000, 2)
    seen = benches.observed(nn.Identity(), {"x": x})
    assert (seen.low["x"], seen.high["x"]) == (0.0, 3999.0)
    assert len(seen.spread["x"]) == len(seen.rows["x"]) == 8
    assert np.array_equal(seen.spread["x"][[0, -1]], x[[0, -1]])


def test_of_large_samples_fewer_are_looked_at():
    x = np.zeros((200, 1, 300, 300), np.float16)
    x[1], x[-1] = 1.0, 2.0
    seen = benches.observed(nn.Identity(), {"x": x})
    assert (seen.low["x"], seen.high["x"]) == (0.0, 2.0)


@pytest.mark.parametrize(
    ("count", "options", "rows", "small"),
    [
        (20, {}, 8, 1),
        (3, {}, 3, 1),
        (20, {"probe_batch_sizes": (1, 16)}, 8, 1),
        (12, {"fixed": 4}, 4, 4),
    ],
)
def test_material(count, options, rows, small):
    x = benches.vectors(count)
    seen = benches.observed(nn.Identity(), {"x": x}, **options)
    assert (len(seen.rows["x"]), seen.small) == (rows, small)


def test_a_batch_goes_round_and_belongs_to_the_caller():
    x = benches.vectors(3)
    seen = benches.observed(nn.Identity(), {"x": x})
    batch = seen.batch(5, start=1)["x"]
    assert np.array_equal(batch, x[[1, 2, 0, 1, 2]])
    batch[:] = 0.0
    assert np.array_equal(seen.batch(3)["x"], x)


@pytest.mark.parametrize("seed", [-1, 0, 2**70])
def test_any_seed_of_a_policy_will_do(seed):
    seen = benches.observed(nn.Identity(), {"x": benches.vectors()})
    assert 0.0 <= replace(seen, seed=seed).random("a").random() < 1.0


def test_randomness_depends_on_seed_and_name_alone():
    seen = benches.observed(nn.Identity(), {"x": benches.vectors()})
    first = seen.random("a").random()
    assert seen.random("b").random() != first
    assert seen.random("a").random() == first
