"""Memory of one runtime."""

from __future__ import annotations

import numpy as np
import pytest

from gate.runtimes.footprint import Footprint

SIZE = 64 * 2**20


def test_growth_adds_up_and_shrinking_counts_as_nothing() -> None:
    memory = Footprint()
    assert memory.grown is None
    with memory.watched():
        first = np.ones(SIZE, np.uint8)
    grown = memory.grown
    assert grown is not None
    assert grown >= 0.9 * SIZE
    with memory.watched():
        del first
    assert memory.grown is not None
    assert memory.grown >= grown
    with memory.watched():
        second = np.ones(SIZE, np.uint8)
    assert memory.grown >= grown + 0.5 * SIZE
    assert second.any()


def test_what_fails_is_not_counted() -> None:
    memory = Footprint()
    with pytest.raises(ValueError, match="broken"), memory.watched():
        raise ValueError("broken")
    assert memory.grown is None
