"""One runtime, fed with samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gate.parity.runners.runner import Runner
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
    runner = Runner(Clocked(said), builders.evidence().subject, None)
    runner.run({"input": np.zeros((2, 3), np.float32)})
    return runner.seconds


@pytest.mark.parametrize("said", [None, 0.0, -1.0, math.nan, math.inf, "0.1"])
def test_where_its_own_clock_says_no_time_ours_counts(said: Any) -> None:
    assert 0 < timed(said) < 60


def test_its_own_clock_counts() -> None:
    found = timed(np.float32(0.5))
    assert (found, type(found)) == (0.5, float)
