from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.strangers import STRANGERS, measure


@pytest.mark.proof
def test_strangers_lose_no_delivery_and_fill_no_memory(tmp_path: Path) -> None:
    """The real process, with more connections than it has places for."""
    row = measure(tmp_path, deliveries=1000, concurrent=100)
    assert (row["accepted"], row["lost"], row["tracebacks"]) == (1000, 0, 0)
    assert row["growth_mib"] < row["bound_mib"]
    # The model once, to prove it, and some parts for each who asked; not the model for each.
    assert row["read_mib"] < 64 * 10
    assert sum(STRANGERS.values()) + 100 > 512
