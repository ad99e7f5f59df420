"""The cost meter records times and memory of one runtime."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gate.measure.cost_meter import CostMeter, Stopwatch
from gate.runtimes import peak_memory
from gate.runtimes.runtime import Proof, Session


class FakeSession(Session):
    def run(self, batch: Any) -> list[Any]:
        return list(batch.values())

    def proof(self) -> Proof:
        return Proof()


def test_first_run_batches_and_single_samples_are_separate():
    meter = CostMeter()
    meter.open(FakeSession, cuda=False)
    meter.first(0.5, batch_size=2)
    for seconds in (0.9, 0.2, 0.4):
        meter.batches.add(seconds, batch_size=8)
    for seconds in (0.9, 0.01, 0.03):
        meter.singles.add(seconds, batch_size=1)
    cost, batch = meter.cost(Proof()), meter.batches.result()
    assert batch is not None
    assert (batch.batch_size, batch.batches, batch.median_ms) == (8, 2, pytest.approx(300.0))
    assert (cost.first_ms, cost.first_batch_size) == (500.0, 2)
    assert cost.single is not None
    assert (cost.single.batch_size, cost.single.batches) == (1, 2)
    assert cost.single.median_ms == pytest.approx(20.0)
    assert not cost.single.cold
    assert cost.open_ms is not None
    assert cost.cuda_bytes is None


def test_memory_is_measured_up_to_the_first_batch(monkeypatch):
    """Freeze the memory figures after the first batch.

    The resident memory is simulated, because the system may reclaim memory from any process.
    """
    resident = {"now": 1000, "highest": 1000}
    monkeypatch.setattr(peak_memory, "_restart_peak", lambda: True)
    monkeypatch.setattr(peak_memory, "_resident", lambda: resident["now"])
    monkeypatch.setattr(peak_memory, "_highest", lambda: resident["highest"])
    meter = CostMeter()
    meter.open(FakeSession, cuda=False)
    with meter.watched():
        resident |= {"now": 1200, "highest": 1500}
    meter.batches.add(0.1, batch_size=4)
    assert (meter.memory_bytes(Proof()), meter.cost(Proof()).peak_bytes) == (500, 1500)
    with meter.watched():
        resident |= {"now": 9000, "highest": 9000}
    assert (meter.memory_bytes(Proof()), meter.cost(Proof()).peak_bytes) == (500, 1500)


def test_memory_of_a_separate_process_is_used():
    meter, proof = CostMeter(), Proof(memory_bytes=3, peak_bytes=7)
    meter.open(FakeSession, cuda=False)
    assert (meter.memory_bytes(proof), meter.cost(proof).peak_bytes) == (3, 7)
    browser = Proof(memory_bytes=3)
    assert meter.cost(browser).peak_bytes is None


def test_cuda_memory_is_the_decrease_of_free_memory(monkeypatch):
    free = iter([900, 600, 700])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 1000))
    meter = CostMeter()
    meter.open(FakeSession, cuda=True)
    with meter.watched():
        pass
    assert meter.cost(Proof()).cuda_bytes == 300


def stopwatch_result(*batches):
    stopwatch = Stopwatch()
    for seconds, size in batches:
        stopwatch.add(seconds, batch_size=size)
    return stopwatch.result()


def test_first_and_partial_last_batch_are_excluded():
    latency = stopwatch_result((9.0, 8), (0.01, 8), (0.02, 8), (0.03, 8), (5.0, 2))
    assert (latency.batch_size, latency.batches) == (8, 3)
    assert latency.median_ms == pytest.approx(20.0)
    assert latency.p95_ms == pytest.approx(29.0)
