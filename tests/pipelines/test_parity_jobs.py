"""parity.jobs and parity.engine in params.yaml select the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.errors import PolicyError
from gate.records.evidence import Evidence
from pipelines import parity, paths
from pipelines.override import override
from pipelines.params import ParityParams
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


@pytest.mark.usefixtures("project")
def test_unknown_engine_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"parity.engine"):
        override(["parity.engine=slurm"])


@pytest.mark.usefixtures("project")
def test_params_without_engine_load() -> None:
    text = paths.PARAMS.read_text().splitlines(keepends=True)
    unchanged_lines = [line for line in text if not line.startswith(("  engine: ", "  jobs: "))]
    paths.PARAMS.write_text("".join(unchanged_lines))
    params = ParityParams.load()
    assert (params.engine, params.jobs) == ("processes", None)
