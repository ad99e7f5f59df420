"""Several processes where that pays, by a trial; as many as somebody asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from gate.distributed import worker_pool
from gate.distributed.worker_pool import asked_for, chosen
from gate.measure.job import MeasurementJob
from gate.policy.policy import Policy
from tests.parity import tiny


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasurementJob:
    """Of two hundred batches, on a machine of four cores."""
    monkeypatch.setattr(worker_pool, "cores", lambda: 4)
    model = tiny.net()
    file = tiny.export(model, tmp_path / "model.onnx")
    return MeasurementJob(model, file, tiny.samples(200), Policy.default(), batch_size=1)


def timed(monkeypatch: pytest.MonkeyPatch, *, together: float, alone: float) -> None:
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
def test_the_trial_says_whether_it_pays(
    case: MeasurementJob, monkeypatch: pytest.MonkeyPatch, together: float, alone: float, count: int,
    threads: int | None,
) -> None:  # fmt: skip
    timed(monkeypatch, together=together, alone=alone)
    decided = chosen(case)
    assert (decided.count, decided.threads) == (count, threads)


def test_few_batches_are_not_worth_a_trial(
    case: MeasurementJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "_trial", None)
    assert chosen(dataclasses.replace(case, batch_size=10)).count == 1


@pytest.mark.parametrize(("threads", "count"), [(1, 4), (2, 2), (3, 1), (4, 1), (8, 1)])
def test_the_threads_of_the_policy_are_kept(
    case: MeasurementJob, monkeypatch: pytest.MonkeyPatch, threads: int, count: int
) -> None:
    timed(monkeypatch, together=1.0, alone=1.0)
    determinism = case.policy.determinism.model_copy(update={"threads": threads})
    policy = case.policy.model_copy(update={"determinism": determinism})
    decided = chosen(dataclasses.replace(case, policy=policy))
    assert (decided.count, decided.threads) == (count, threads)


def test_who_asks_gets_what_he_asks_for(case: MeasurementJob) -> None:
    assert (asked_for(3, case).count, asked_for(3, case).threads) == (3, 1)
    assert (asked_for(1, case).count, asked_for(1, case).threads) == (1, None)


def test_the_trial_runs_the_reference_and_leaves_the_threads(case: MeasurementJob) -> None:
    import torch

    before = torch.get_num_threads()
    seconds = worker_pool._trial(case, (1, 1))
    assert len(seconds) == 2
    assert all(np.isfinite(seconds))
    assert torch.get_num_threads() == before
