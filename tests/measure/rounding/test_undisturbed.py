"""What is decided on shapes and numbers alone is no matter of rounding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gate.reference.random_rounding import RandomRounding

SEEDS = range(8)


@pytest.fixture(autouse=True, params=[True, False], ids=["inference", "gradients"])
def inference(request):
    """Composite operators are seen whole without gradients, else in parts."""
    with torch.inference_mode(request.param):
        yield


def buckets(distances):
    """As language models sort distances: 16 is on the edge, so that rounding decides there."""
    near = distances < 8
    far = 8 + (torch.log(distances.float() / 8) / math.log(16) * 8).to(torch.long)
    return torch.where(near, distances, far)


def of_positions():
    """Buckets of the distances between 40 places."""
    places = torch.arange(40)
    return buckets((places[None] - places[:, None]).abs())


def test_buckets_of_distances_between_places_stay():
    want = of_positions()
    for seed in SEEDS:
        with RandomRounding(seed):
            assert torch.equal(of_positions(), want)


def test_what_is_decided_on_an_input_may_come_out_otherwise():
    given = torch.full((64,), 16)
    seen = set()
    for seed in SEEDS:
        with RandomRounding(seed):
            seen.update(buckets(given).tolist())
    assert seen == {9, 10}


@pytest.mark.parametrize(
    "decide",
    [
        lambda x: (x * 8.0).floor(),
        lambda x: (x * 8.0).round(),
        lambda x: torch.div(x, 1 / 8, rounding_mode="floor"),
        lambda x: x * 8.0 >= 2.0,
        lambda x: (x * 8.0 - 2.0).sign(),
    ],
)
def test_steps_and_comparisons_stay(decide):
    def of_numbers():
        quarter = torch.log(torch.full((50,), 2)) / math.log(16)
        return decide(quarter)

    want = of_numbers()
    for seed in SEEDS:
        with RandomRounding(seed):
            assert torch.equal(of_numbers(), want)


def test_tables_that_are_computed_are_moved_as_before():
    def table():
        return torch.sin(torch.arange(1, 65) * 0.37)

    with RandomRounding(0):
        tossed = table()
    assert 0.0 < (tossed - table()).abs().max() < 1e-5


def test_what_is_sorted_of_numbers_of_the_code_stays():
    def order():
        return torch.topk(torch.arange(6).remainder(3) * torch.tensor(0.3), 4)

    with RandomRounding(0):
        first = order()
    for seed in SEEDS:
        with RandomRounding(seed):
            values, places = order()
        assert torch.equal(values, first[0])
        assert torch.equal(places, first[1])


def test_arrays_that_are_given_are_no_numbers_of_the_code():
    seen = set()
    for seed in SEEDS:
        with RandomRounding(seed):
            given = torch.from_numpy(np.full(64, 16))
            seen.update(buckets(given).tolist())
    assert seen == {9, 10}


def test_what_an_input_was_written_into_is_decided_as_it_is():
    """Also by way of a view: the tensor is no more what it was of shapes alone."""
    given = torch.tensor([0.5, 2.5, 3.5])

    def written():
        whole = torch.zeros(4)
        whole[1:].copy_(given)
        return whole, whole > 1.0, (whole * 1.0).floor()

    with RandomRounding(0):
        whole, above, floor = written()
    assert whole.tolist() == [0.0, 0.5, 2.5, 3.5]
    assert above.tolist() == [False, False, True, True]
    assert floor.tolist() == [0.0, 0.0, 2.0, 3.0]


def test_what_is_drawn_is_drawn_once():
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    with RandomRounding(0):
        drawn = torch.rand(3)
        torch.rand(3)
    torch.testing.assert_close(drawn, want)
