from __future__ import annotations

from pathlib import Path

from benchmarks.webhook_accept import measure


def test_a_small_run_takes_and_finishes_all(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/inbox.db"
    row = measure(tmp_path, url, deliveries=40, concurrent=10)
    assert row["good"]
    assert row["accepted"] == 40
    assert row["left"] == 0
    assert row["looks"] >= 1
    assert 0 < row["p50_ms"] <= row["p99_ms"]
