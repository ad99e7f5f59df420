"""How the samples of a case become batches."""

from __future__ import annotations

import pytest

from gate.measure.job import MeasurementJob
from tests.measure import tiny


@pytest.mark.parametrize(
    ("count", "batch_size", "taken"),
    [(2, 32, 2), (15, 32, 15), (16, 32, 8), (17, 32, 9), (32, 32, 16), (33, 32, 32), (16, 8, 8)],
)
def test_what_would_be_one_batch_is_cut_into_two(model, good, count, batch_size, taken) -> None:
    case = MeasurementJob(
        model, good, tiny.samples(count), tiny.policy("ort-cpu"), batch_size=batch_size
    )
    assert case.bind().batch_size == taken


def test_whoever_computes_a_few_says_how_many(model, good) -> None:
    case = MeasurementJob(model, good, tiny.samples(16), tiny.policy("ort-cpu"))
    assert case.bind(batch_size=16).batch_size == 16
