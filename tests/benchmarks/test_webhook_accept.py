from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.webhook_accept import measure


@pytest.mark.further
def test_a_small_run_takes_and_finishes_all(tmp_path: Path) -> None:
    row = measure(tmp_path, deliveries=200, concurrent=10)
    assert (row["accepted"], row["forged"], row["refused"]) == (200, 2, 2)
    assert row["looks"] >= 1
    assert 0 < row["p50_ms"] <= row["p99_ms"]
