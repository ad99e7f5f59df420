"""A pool of worker processes gives the evidence of one process, or an error."""

from __future__ import annotations

import multiprocessing
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gate import EvaluationData, Evidence, Policy, Reference, collect_evidence
from gate.api import build_job
from gate.distributed.worker import JobSpec
from gate.distributed.worker_pool import ProcessPool, Workers
from gate.errors import DigestMismatch
from gate.measure.work_units import FirstUnitState, WorkUnit
from tests.distributed.tiny import DEATH_VARIABLE, build
from tests.exhaustive import exhaustive

SAMPLES, BATCH = 232, 8
TIMES = {"measured_at", "reference_latency", "reference_cost", "latency", "cost", "memory_bytes",
         "crew", "seconds", "reference_seconds"}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scale")
    example = torch.zeros(2, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            build(), (example,), path / "model.onnx", dynamo=False, input_names=["x"],
            output_names=["logits"], dynamic_axes={"x": {0: "n"}, "logits": {0: "n"}},
        )  # fmt: skip
    rows = np.random.default_rng(0).normal(size=(SAMPLES, 6)).astype(np.float32)
    np.save(path / "x.npy", rows)
    labels = build()(torch.from_numpy(rows)).argmax(1).numpy()
    np.save(path / "labels.npy", labels)
    rows[150, 2] = np.nan
    np.save(path / "nan.npy", rows)
    return path


def evidence(
    folder: Path, *, factory: str = "build", inputs: str = "x.npy", jobs: int = 1
) -> Evidence:
    onnx, policy = folder / "model.onnx", Policy.default()
    reference = Reference.from_factory(f"tests.distributed.tiny:{factory}")
    workload = EvaluationData.open(folder / inputs, labels=folder / "labels.npy", batch_size=BATCH)
    if jobs == 1:
        return collect_evidence(onnx, reference=reference, data=workload, policy=policy)
    case = build_job(onnx, reference=reference, data=workload, policy=policy)
    spec = JobSpec.from_job(case, reference, workload)
    with ProcessPool(jobs) as pool, Workers(pool, spec, 1) as workers:
        shared = replace(workload, workers=workers)
        return collect_evidence(onnx, reference=reference, data=shared, policy=policy)


def remove_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: remove_times(item) for key, item in value.items() if key not in TIMES}
    return [remove_times(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def single_process(folder: Path) -> Evidence:
    return evidence(folder)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.proof
def test_killed_worker_is_replaced_with_the_same_result(
    folder: Path, single_process: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = folder / "mark"
    mark.touch()
    monkeypatch.setenv(DEATH_VARIABLE, str(mark))
    pair = evidence(folder, factory="mortal", jobs=2)
    assert not mark.exists()
    assert pair.worker_pool is not None
    assert (pair.worker_pool.engine, pair.worker_pool.workers) == ("processes", 2)
    assert single_process.worker_pool is None
    source = {"source": None}
    expected, observed = (remove_times(e.to_plain()) | source for e in (single_process, pair))
    assert observed == expected
    measured = [runtime for runtime in pair.runtimes if runtime.measured]
    assert measured
    assert all(runtime.outputs[0].samples == SAMPLES for runtime in measured)


@exhaustive
@pytest.mark.proof
def test_workers_start_each_run_with_the_same_state(folder: Path) -> None:
    first, pair = (evidence(folder, factory="counting", jobs=jobs) for jobs in (1, 2))
    assert pair.worker_pool is not None
    assert remove_times(pair.to_plain()) == remove_times(first.to_plain())
    assert first.state_spread["calls"] > 0.1
    assert all(r.outputs[0].max_abs_diff < 1e-5 for r in first.runtimes if r.measured)


@exhaustive
@pytest.mark.proof
def test_worker_with_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(DigestMismatch, match="for a worker"):
        evidence(folder, factory="another_each_time", jobs=2)


def test_no_process_or_file_is_left(folder: Path) -> None:
    """However the job ends and whatever a worker computes."""
    reference = Reference.from_factory("tests.distributed.tiny:build")
    workload = EvaluationData.open(folder / "x.npy", batch_size=BATCH)
    case = build_job(
        folder / "model.onnx", reference=reference, data=workload, policy=Policy.default()
    )
    spec = JobSpec.from_job(case, reference, workload)
    before = set(multiprocessing.active_children())  # such as readers of samples
    with (
        pytest.raises(KeyboardInterrupt),
        ProcessPool(2) as pool,
        Workers(pool, spec, 1) as workers,
    ):
        workers.begin(FirstUnitState(floors={}), [WorkUnit(1, 32, 64)])
        raise KeyboardInterrupt
    assert set(multiprocessing.active_children()) <= before
