"""Worker failures: each part arrives once, or the error of the first unit is raised."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from gate import Digest, SampleSet
from gate.distributed import worker_pool
from gate.distributed.worker import WorkerFailure
from gate.distributed.worker_pool import ProcessPool, WorkerLost, WorkerPool, Workers
from gate.errors import EvidenceError, StorageError
from gate.measure.work_units import FirstUnitState, RuntimeUnitResult, UnitResult, WorkUnit
from gate.records.evidence import Determinism, Environment

LEAD = FirstUnitState(floors={"ort-cpu": 1.0})
UNITS = tuple(WorkUnit(index, 2 * index, 2 * index + 2) for index in range(1, 5))
SWITCHES = Determinism(
    tf32_matmul=False, tf32_cudnn=False, cudnn_deterministic=True, cudnn_benchmark=False,
    grad=False, seed=0, threads=1,
)  # fmt: skip


def part(unit: WorkUnit) -> UnitResult:
    rows = {"x": np.arange(30, dtype=np.float32).reshape(10, 3)}
    return UnitResult(
        index=unit.index,
        start=unit.start,
        stop=unit.stop,
        samples_sha256=SampleSet.from_arrays(rows).slice(unit.start, unit.stop).digest(),
        labels_sha256=None,
        answers_sha256=Digest.from_bytes(b"same"),
        environment=Environment(versions={"torch": "2"}, cpu="one", determinism=SWITCHES),
        runtimes={"ort-cpu": RuntimeUnitResult(compared={"n": unit.index})},
    )


class Spec:
    def to_json(self) -> str:
        return "{}"


class InProcessPool(WorkerPool):
    """A pool that measures in this process; some units end the worker."""

    name = "processes"

    def __init__(
        self, *, deadly: Sequence[int] = (), wrong: Sequence[int] = (), opening: str = ""
    ) -> None:
        super().__init__(2)
        self.deadly, self.wrong, self.opening = dict.fromkeys(deadly, 9), wrong, opening
        self.given: list[int] = []

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if function.__name__ == "open_job":
            if self.opening == "dies":
                raise WorkerLost("code 1")
            error = EvidenceError("another model")
            return failure(error) if self.opening else b""
        unit = arguments[-1]
        assert FirstUnitState.from_json(arguments[-2]) == LEAD
        self.given.append(unit.index)
        if self.deadly.get(unit.index, 0):
            self.deadly[unit.index] -= 1
            raise WorkerLost("code -9")
        if unit.index in self.wrong:
            return failure(EvidenceError(f"wrong {unit.index}"))
        return b"P" + part(unit).to_json().encode()

    def _end_workers(self) -> None:
        pass


def failure(error: Exception) -> bytes:
    return b"F" + WorkerFailure.from_error(error).to_json().encode()


def collect_parts(pool: WorkerPool) -> list[int]:
    with pool, Workers(pool, Spec(), 1) as workers:  # type: ignore[arg-type]
        assert workers.begin(LEAD, UNITS) == LEAD
        return sorted(used.index for used in workers.parts())


def test_each_unit_arrives_once() -> None:
    pool = InProcessPool()
    assert collect_parts(pool) == [1, 2, 3, 4]
    assert sorted(pool.given) == [1, 2, 3, 4]


def test_only_a_lost_unit_is_repeated() -> None:
    pool = InProcessPool()
    pool.deadly = {3: 2, 4: 1}
    assert collect_parts(pool) == [1, 2, 3, 4]
    assert sorted(pool.given) == [1, 2, 3, 3, 3, 4, 4]


def test_unit_that_kills_every_worker_is_named() -> None:
    with pytest.raises(EvidenceError, match=r"unit 3 .* ended 3 workers, the last with code -9"):
        collect_parts(InProcessPool(deadly=(3,)))


def test_error_of_the_first_unit_is_raised() -> None:
    with pytest.raises(EvidenceError, match="wrong 2"):
        collect_parts(InProcessPool(wrong=(4, 2)))


def test_open_error_of_a_worker_is_raised() -> None:
    with pytest.raises(EvidenceError, match="another model"):
        collect_parts(InProcessPool(wrong=(1,), opening="fails"))


def test_worker_that_dies_while_opening_is_replaced() -> None:
    assert collect_parts(InProcessPool(opening="dies")) == [1, 2, 3, 4]


def test_invalid_answer_is_an_error() -> None:
    pool = InProcessPool()
    pool._call = lambda function, *_: b"" if function.__name__ == "open_job" else b"P{}"  # type: ignore[method-assign]
    with pytest.raises(EvidenceError):
        collect_parts(pool)


@pytest.fixture
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes without imports at their start."""
    monkeypatch.setattr("gate.distributed.worker_pool.import_libraries", os.getpid)


@pytest.mark.further
@pytest.mark.usefixtures("_light")
def test_killed_process_is_replaced_without_losing_calls() -> None:
    with ProcessPool(2) as pool:
        slow, dead = pool.submit(time.sleep, 3), pool.submit(os.abort)
        with pytest.raises(WorkerLost, match=f"code -{int(signal.SIGABRT)}"):
            dead.result()
        assert slow.result() is None
        first, second = pool.submit(os.getpid), pool.submit(os.getpid)
        assert psutil.pid_exists(first.result())
        assert psutil.pid_exists(second.result())


@pytest.mark.usefixtures("_light")
def test_start_failure_ends_the_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = worker_pool._Process.__init__, []

    def broken(process: Any) -> None:
        if len(started) == 2:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(process)
        start(process)

    monkeypatch.setattr(worker_pool._Process, "__init__", broken)
    before = set(multiprocessing.active_children())  # such as readers of samples
    with pytest.raises(StorageError, match="process 3 of 4: Resource temporarily"):
        ProcessPool(4)
    assert set(multiprocessing.active_children()) <= before
    started.clear()
    with ProcessPool(2) as pool:  # nor can a lost one be replaced; its call raises an error
        for _ in range(3):
            with pytest.raises(WorkerLost):
                pool.submit(os.abort).result()


@pytest.mark.usefixtures("_light")
def test_processes_can_be_ended_while_computing() -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), ProcessPool(1) as pool:
        running, waiting = pool.submit(time.sleep, 300), pool.submit(time.sleep, 300)
        time.sleep(1.0)
        raise KeyboardInterrupt
    assert waiting.cancelled()
    assert isinstance(running.exception(), WorkerLost)
    assert time.monotonic() - began < 60


@pytest.mark.usefixtures("_light")
def test_worker_ignores_ctrl_c() -> None:
    """A terminal sends SIGINT to the whole process group. Workers must ignore it even during their
    imports, as must Python's resource tracker."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with ProcessPool(1) as pool:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
        status = Path(f"/proc/{pool.submit(os.getpid).result()}/status").read_text()
    blocked = int(next(line for line in status.splitlines() if "SigBlk" in line).split()[1], 16)
    assert blocked & 1 << (signal.SIGINT - 1)


ORPHANS = """
import os, time
from gate.distributed.worker_pool import ProcessPool
if __name__ == "__main__":
    pool = ProcessPool(1)
    print(pool.submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.further
def test_worker_ends_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "orphans.py").write_text(ORPHANS)
    completed = subprocess.run(
        [sys.executable, "orphans.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert completed.returncode == -signal.SIGKILL
    until = time.monotonic() + 20
    while psutil.pid_exists(int(completed.stdout)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not psutil.pid_exists(int(completed.stdout))


def test_starting_workers_imports_nothing_heavy() -> None:
    code = "import sys, gate.distributed.worker_pool; print({'torch', 'ray', 'numpy'} & set(sys.modules))"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "set()"
