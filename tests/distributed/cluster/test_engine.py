"""A Ray cluster gives the same evidence as one process, or an error, and leaves no process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from gate import EvaluationData, Evidence, Policy, Reference, collect_evidence
from gate.distributed.worker_pool import (
    CheckedFile,
    Cluster,
    RayPool,
    WorkerLost,
    Workers,
    require_room,
)
from gate.errors import DataError, PolicyError
from tests.distributed import test_processes
from tests.distributed.test_processes import BATCH, remove_times
from tests.distributed.tiny import DEATH_VARIABLE, rest

folder = test_processes.folder
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _importable() -> Iterator[None]:
    """Let actors import this repository, whatever the current folder is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


def create_file(folder: Path, *, factory: str = "build", inputs: str = "x.npy") -> CheckedFile:
    reference = Reference.from_factory(f"tests.distributed.tiny:{factory}")
    data = EvaluationData.open(folder / inputs, labels=folder / "labels.npy", batch_size=BATCH)
    return CheckedFile(folder / "model.onnx", reference, data, Policy.default())


def evidence(folder: Path, *, theirs: bool = False, **options: str) -> Evidence:
    """Measure with Ray. `theirs`: the caller started the cluster, which may lack the driver's
    files."""
    file = create_file(folder, **options)
    with RayPool.open(Cluster(workers=2)) as pool, file.by_cluster(pool) as data:
        assert isinstance(data.workers, Workers)
        assert (data.workers.delivery is not None) == theirs
        return collect_evidence(file.onnx, reference=file.reference, data=data, policy=file.policy)


def ray_processes() -> list[psutil.Process]:
    """Return actors and servers of Ray below this process.

    Children of multiprocessing are excluded: their command line also contains Ray's folder.
    """
    matches = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            is_child = "multiprocessing" in line or process.status() == psutil.STATUS_ZOMBIE
            if "ray" in line and not is_child:
                matches.append(process)
    return matches


def select_workers(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.cmdline()[0].startswith("ray::rest")]


def assert_no_process_remains() -> None:
    """Wait some seconds: Ray's servers end after they detect that the others have ended."""
    until = time.monotonic() + 60.0
    while ray_processes() and time.monotonic() < until:
        time.sleep(0.2)
    assert not [process.cmdline() for process in ray_processes()]


@pytest.mark.alone
def test_result_equals_one_process_although_a_worker_is_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single_process = test_processes.evidence(folder)
    mark = folder / "mark"
    mark.touch()
    monkeypatch.setenv(DEATH_VARIABLE, str(mark))
    pair = evidence(folder, factory="mortal")
    assert not mark.exists()
    assert pair.worker_pool is not None
    assert (pair.worker_pool.engine, pair.worker_pool.workers) == ("ray", 2)
    source: dict[str, Any] = {"source": None}
    assert (
        remove_times(pair.to_plain()) | source == remove_times(single_process.to_plain()) | source
    )
    assert_no_process_remains()


@pytest.mark.alone
def test_remote_workers_get_samples_from_the_driver(folder: Path) -> None:
    """The caller's cluster continues to run; invalid samples raise the error of one process."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        pair = evidence(folder, theirs=True)
        with pytest.raises(DataError, match="first in sample 150"):
            evidence(folder, theirs=True, inputs="nan.npy")
        assert ray.is_initialized()
    finally:
        ray.shutdown()
    source: dict[str, Any] = {"source": None}
    single_process = test_processes.evidence(folder)
    assert (
        remove_times(pair.to_plain()) | source == remove_times(single_process.to_plain()) | source
    )
    assert_no_process_remains()


@pytest.mark.alone
def test_cluster_listens_locally_and_ends_after_an_interrupt(
    folder: Path,
) -> None:
    with pytest.raises(KeyboardInterrupt), RayPool.open(Cluster(workers=2)) as pool:
        busy = [pool.submit(rest) for _ in range(2)]
        assert pool.submit(rest).cancel()
        until = time.monotonic() + 60
        while len(select_workers(ray_processes())) < 2 and time.monotonic() < until:
            time.sleep(0.2)
        processes = ray_processes()
        workers = select_workers(processes)
        locations = {
            connection.laddr.ip
            for process in processes
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        }
        with pytest.raises(PolicyError, match="no machine of the cluster has 64 CPUs"):
            require_room(Cluster(cpus=64), [{"CPU": 2.0}])
        waiting = {process.nice() for process in workers} - {psutil.Process().nice()}
        raise KeyboardInterrupt
    assert all(isinstance(future.exception(), WorkerLost) for future in busy)
    assert workers
    assert not waiting, "Ray lets them wait for every other process"
    assert locations
    assert locations <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert_no_process_remains()
