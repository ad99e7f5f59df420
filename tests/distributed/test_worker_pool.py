"""A check is measured by one process or by a worker pool."""

from __future__ import annotations

import logging
import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gate.distributed.worker_pool import CheckedFile, ProcessPool, Workers
from gate.errors import PolicyError
from gate.measure.job import EvaluationData, Reference
from gate.policy.policy import Policy
from gate.records.evidence import Source
from tests.measure import tiny


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
