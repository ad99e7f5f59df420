"""The number of worker processes is chosen by a trial, unless it is requested."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from gate.distributed import worker_pool
from gate.distributed.worker_pool import chosen, requested_jobs
from gate.measure.job import MeasurementJob
from gate.policy.policy import Policy
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
