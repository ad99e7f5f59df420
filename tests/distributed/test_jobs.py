"""The number of worker processes is requested, or chosen by a trial."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from gate import EvaluationData, MeasurementJob, Policy, Reference
from gate.distributed import worker_pool
from gate.distributed.worker_pool import CheckedFile, ProcessPool, Workers, chosen, requested_jobs
from gate.errors import PolicyError
from gate.installation import cores
from gate.records.evidence import Source
from tests.measure import tiny


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasurementJob:
    """A job of two hundred batches on a machine with four cores."""
    monkeypatch.setattr(worker_pool, "cores", lambda: 4)
    model = tiny.net()
    file = tiny.export(model, tmp_path / "model.onnx")
    return MeasurementJob(model, file, tiny.samples(200), Policy.default(), batch_size=1)


def set_trial_times(monkeypatch: pytest.MonkeyPatch, *, together: float, alone: float) -> None:
    monkeypatch.setattr(worker_pool, "_trial", lambda _case, _threads: [together, alone])


@pytest.mark.parametrize(
    ("together", "alone", "count", "threads"),
    [
        (1.0, 2.0, 4, 1),
        (1.0, 3.3, 4, 1),
        (1.0, 3.5, 1, None),
        (1.0, 4.0, 1, None),
        (0.09, 0.1, 1, None),
    ],
)
def test_trial_decides_whether_processes_pay_off(
    case: MeasurementJob, monkeypatch: pytest.MonkeyPatch, together: float, alone: float, count: int,
    threads: int | None,
) -> None:  # fmt: skip
    set_trial_times(monkeypatch, together=together, alone=alone)
    decided = chosen(case)
    assert (decided.count, decided.threads) == (count, threads)


def test_few_batches_skip_the_trial(case: MeasurementJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_trial", None)
    assert chosen(dataclasses.replace(case, batch_size=10)).count == 1


@pytest.mark.parametrize(("threads", "count"), [(1, 4), (2, 2), (3, 1), (4, 1), (8, 1)])
def test_policy_threads_are_kept(
    case: MeasurementJob, monkeypatch: pytest.MonkeyPatch, threads: int, count: int
) -> None:
    set_trial_times(monkeypatch, together=1.0, alone=1.0)
    determinism = case.policy.determinism.model_copy(update={"threads": threads})
    policy = case.policy.model_copy(update={"determinism": determinism})
    decided = chosen(dataclasses.replace(case, policy=policy))
    assert (decided.count, decided.threads) == (count, threads)


def test_requested_number_is_used(case: MeasurementJob) -> None:
    assert (requested_jobs(3, case).count, requested_jobs(3, case).threads) == (3, 1)
    assert (requested_jobs(1, case).count, requested_jobs(1, case).threads) == (1, None)


class LargeActivation(nn.Module):
    """A model whose largest activation has 1 MiB per sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)[:, :10] + torch.ones(len(x), 2**18).sum(1, keepdim=True)


@pytest.mark.parametrize(("free", "wide", "narrow"), [(2**33, 2, 8), (2**28, 1, 1)])
def test_large_activations_reduce_the_number(
    case: MeasurementJob, monkeypatch: pytest.MonkeyPatch, free: int, wide: int, narrow: int
) -> None:
    """A batch has 256 samples: 9 tensors of 256 MiB in addition to this process's memory."""
    monkeypatch.setattr(
        worker_pool.psutil, "virtual_memory", lambda: SimpleNamespace(available=free)
    )
    of_this_process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=2**29))
    monkeypatch.setattr(worker_pool.psutil, "Process", lambda: of_this_process)
    large = dataclasses.replace(case, samples=tiny.samples(512), batch_size=256)
    assert requested_jobs(8, large).count == narrow
    assert requested_jobs(8, dataclasses.replace(large, model=LargeActivation())).count == wide


def test_trial_runs_the_reference_and_restores_threads(case: MeasurementJob) -> None:
    before = torch.get_num_threads()
    seconds = worker_pool._trial(case, (1, 1))
    assert len(seconds) == 2
    assert all(np.isfinite(seconds))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("physical", "allowed", "wanted"), [(4, 8, 4), (4, 2, 2), (None, 3, 1), (0, 2, 1)]
)
def test_physical_cores_available_to_this_process(
    physical: int | None, allowed: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    assert cores() == wanted


@pytest.fixture
def checked(tmp_path: Path) -> CheckedFile:
    """A model that exists only in this process."""
    model = tiny.net()
    file = tiny.export(model, tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", tiny.images(20))
    workload = EvaluationData.open(tmp_path / "x.npy")
    return CheckedFile(
        file.path, Reference(model, Source(factory="nobody:knows")), workload, Policy.default()
    )


def test_few_samples_use_one_process(checked: CheckedFile) -> None:
    with checked.by_processes(None) as workload:
        assert workload is checked.data


def test_one_job_uses_one_process(checked: CheckedFile) -> None:
    with checked.by_processes(1) as workload:
        assert workload.workers is None


def test_unshareable_input_is_refused_for_a_pool(checked: CheckedFile) -> None:
    with (
        pytest.raises(PolicyError, match="with one job"),
        checked.by_processes(2),
    ):
        pass


def test_workers_have_equal_threads_in_the_evidence(
    checked: CheckedFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Workers, "__enter__", lambda crew: crew)
    named = replace(checked, reference=replace(checked.reference, loaded=True))
    before, rest = torch.get_num_threads(), set(multiprocessing.active_children())
    with (
        ProcessPool(3) as pool,
        caplog.at_level(logging.DEBUG, "gate.steps"),
        named.by_processes(2, pool=pool) as workload,
    ):
        assert isinstance(workload.workers, Workers)
        assert (workload.workers.pool, pool.count, workload.workers.threads) == (pool, 2, 1)
        ours = set(multiprocessing.active_children()) - rest
        assert len(ours) == 2  # further ones have ended
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    assert "measure in 2 processes: 2 processes were asked for" in caplog.text
