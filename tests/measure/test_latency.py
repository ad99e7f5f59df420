"""Latency of single samples and batches is measured on real files."""

from __future__ import annotations

from gate import Evidence, MeasurementJob, Policy
from gate.api import measure_job
from gate.measure import run as turns
from gate.policy.sections import Bounds, Instruments, RuntimePolicy
from gate.runtimes.ort import OrtSession
from tests.measure import tiny

POLICY = Policy(
    task="tensors",
    instruments=Instruments.none(),
    runtimes={"ort-cpu": RuntimePolicy(required="always", bounds=Bounds(max_abs_diff=1e-3))},
)


def measure(model, candidate, *, count: int = 12, batch_size: int = 4) -> Evidence:
    return measure_job(
        MeasurementJob(model, candidate, tiny.samples(count), POLICY, batch_size=batch_size)
    )


def test_both_sides_have_single_and_batch_latency(model, good):
    result = measure(model, good)
    (runtime,) = result.runtimes
    for latency, cost in (
        (result.reference_latency, result.reference_cost),
        (runtime.latency, runtime.cost),
    ):
        assert latency is not None
        assert cost is not None
        assert cost.single is not None
        assert (latency.batch_size, latency.batches, latency.cold) == (4, 2, False)
        assert cost.single.batch_size == 1
        assert turns._MIN_TURNS - 1 <= cost.single.batches < turns._MAX_TURNS
        assert 0.0 < cost.single.median_ms <= cost.single.p95_ms
        assert cost.first_batch_size == 1
        assert cost.first_ms is not None
        assert cost.first_ms > 0.0
    assert runtime.cost is not None
    assert runtime.cost.open_ms is not None
    assert runtime.cost.open_ms > 0.0
    assert runtime.memory_bytes is not None
    assert runtime.cost.peak_bytes is not None
    assert runtime.cost.peak_bytes > runtime.memory_bytes
    assert result.reference_cost is not None
    assert result.reference_cost.open_ms is None


def test_failure_of_a_repeated_batch_is_a_failure(model, good, monkeypatch):
    batch_sizes = []

    def run(self, batch):
        batch_sizes.append(len(batch["input"]))
        if batch_sizes.count(4) > 1:
            raise RuntimeError("worn out")
        return original(self, batch)

    original = OrtSession.run
    monkeypatch.setattr(OrtSession, "run", run)
    (runtime,) = measure(model, good, count=4).runtimes
    assert runtime.failure == "RuntimeError: worn out"
