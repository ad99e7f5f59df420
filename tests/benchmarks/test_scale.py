"""The benchmark of several processes, on few samples: its numbers are those of one process."""

from __future__ import annotations

import json

import pytest

from benchmarks import scale
from tests.exhaustive import exhaustive


@exhaustive
@pytest.mark.proof
def test_two_jobs_give_the_numbers_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["--samples", "320", "--size", "32"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["same_numbers"] is True
    assert record["ratio"] > 0.0


def test_what_a_unit_costs_is_measured_on_both_sides() -> None:
    assert all(milliseconds > 0.0 for milliseconds in scale._unit_ms())


def test_a_number_that_differs_is_told_apart_from_times() -> None:
    first = {"latency": 1.0, "outputs": [{"max_abs_diff": 1e-7}], "crew": None}
    same = {"latency": 2.0, "outputs": [{"max_abs_diff": 1e-7}]}
    second = {"latency": 1.0, "outputs": [{"max_abs_diff": 2e-7}]}
    assert scale._untimed(first) == scale._untimed(same) != scale._untimed(second)
