"""parity.jobs and parity.engine in params.yaml select the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate import Evidence
from pipelines import parity, paths
from pipelines.override import override
from tests.distributed.test_processes import remove_times
from tests.exhaustive import exhaustive


@exhaustive
@pytest.mark.proof
def test_two_processes_give_the_same_evidence_as_one(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(measured))
    single_process = Evidence.load(paths.EVIDENCE)
    assert single_process.worker_pool is None
    override(["parity.jobs=2"])
    assert parity.main() == 0
    pair = Evidence.load(paths.EVIDENCE)
    assert pair.worker_pool is not None
    assert (pair.worker_pool.engine, pair.worker_pool.workers) == ("processes", 2)
    assert remove_times(pair.to_plain()) == remove_times(single_process.to_plain())
