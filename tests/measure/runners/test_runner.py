"""One runtime, fed with samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gate.measure.session_runner import SessionRunner
from gate.runtimes.runtime import Proof, Session
from tests import builders


class Clocked(Session):
    def __init__(self, said: Any) -> None:
        self.seconds = said

    def run(self, batch: Any) -> list[Any]:
        return list(batch.values())

    def proof(self) -> Proof:
        return Proof()


def timed(said: Any) -> float:
    runner = SessionRunner(Clocked(said), builders.evidence().subject, None)
    runner.run({"input": np.zeros((2, 3), np.float32)})
    return runner.seconds


@pytest.mark.parametrize("said", [None, 0.0, -1.0, math.nan, math.inf, "0.1"])
def test_where_its_own_clock_says_no_time_ours_counts(said: Any) -> None:
    assert 0 < timed(said) < 60


def test_its_own_clock_counts() -> None:
    found = timed(np.float32(0.5))
    assert (found, type(found)) == (0.5, float)


class Counted(Session):
    """Says how often it ran."""

    ran = 0

    def run(self, batch: Any) -> list[Any]:
        self.ran += 1
        return [array * 2 for array in batch.values()]

    def proof(self) -> Proof:
        return Proof()


def test_an_answer_to_a_probe_is_not_computed_again() -> None:
    session = Counted()
    runner = SessionRunner(session, builders.evidence().subject, None)
    batch = {"input": np.ones((2, 3), np.float32)}
    probed = runner.run_probe(batch)
    assert np.array_equal(runner.answer({"input": np.ones((2, 3), np.float32)})[0], probed[0])
    assert session.ran == 1
    runner.answer({"input": np.zeros((2, 3), np.float32)})
    assert session.ran == 2


def test_a_run_is_a_run() -> None:
    """Whether a runtime repeats itself is not read off an answer that was kept."""
    session = Counted()
    runner = SessionRunner(session, builders.evidence().subject, None)
    batch = {"input": np.ones((2, 3), np.float32)}
    for compute in (runner.run_probe, runner.run_probe, runner.run, runner.run):
        compute(batch)
    assert session.ran == 4
