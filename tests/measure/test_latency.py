"""Latency of single samples and batches is measured on real files."""

from __future__ import annotations

import pytest

from gate import Evidence, MeasurementJob, Policy
from gate.api import measure_job
from gate.measure import run as turns
from gate.policy.sections import Bounds, Instruments, RuntimePolicy
from gate.reference.torch_session import TorchSession
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


def test_fixed_batch_has_no_single_latency(model, tmp_path):
    fixed = tiny.export(
        model, tmp_path / "fixed.onnx", example={"input": tiny.images(4)}, dynamic=False
    )
    result = measure(model, fixed)
    (runtime,) = result.runtimes
    assert runtime.measured
    assert runtime.latency is not None
    for cost in (runtime.cost, result.reference_cost):
        assert cost is not None
        assert cost.single is None
        assert cost.single_unmeasured == "fixed_batch"


def test_single_latency_equals_batches_of_one(model, good):
    result = measure(model, good, count=4, batch_size=1)
    (runtime,) = result.runtimes
    assert runtime.cost is not None
    assert runtime.cost.single == runtime.latency


@pytest.mark.parametrize(
    ("count", "batch_size", "fixed"), [(4, 4, False), (7, 4, False), (4, 4, True), (1, 4, False)]
)
def test_only_full_batch_is_repeated_for_timing(model, good, tmp_path, count, batch_size, fixed):
    example = {"input": tiny.images(batch_size)}
    if fixed:
        good = tiny.export(model, tmp_path / "fixed.onnx", example=example, dynamic=False)
    result = measure(model, good, count=count, batch_size=batch_size)
    (runtime,) = result.runtimes
    for latency in (result.reference_latency, runtime.latency):
        assert latency is not None
        assert not latency.cold
        assert latency.batch_size == min(count, batch_size)
        assert turns._MIN_TURNS - 1 <= latency.batches < turns._MAX_TURNS


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


def test_fixed_batch_of_one_has_single_latency(model, tmp_path):
    fixed = tiny.export(
        model, tmp_path / "one.onnx", example={"input": tiny.images(1)}, dynamic=False
    )
    (runtime,) = measure(model, fixed, count=4).runtimes
    assert runtime.cost is not None
    assert (runtime.cost.single, runtime.cost.single_unmeasured) == (runtime.latency, None)


def test_timed_single_samples_are_reused(model, good, monkeypatch):
    """Reuse the timed runs of single samples: stability needs the same batches of one."""
    instruments = Instruments.none().model_copy(update={"stability_samples": 4})
    policy = POLICY.model_copy(update={"instruments": instruments})
    images = tiny.images(12)
    samples_run_alone: dict[str, list[int]] = {"reference": [], "runtime": []}

    def count_single_runs(kind: type, side: str) -> None:
        original = kind.run

        def run(self, batch):
            if len(batch["input"]) == 1:
                is_sample = (images == batch["input"]).reshape(12, -1).all(1)
                samples_run_alone[side].append(int(is_sample.argmax()))
            return original(self, batch)

        monkeypatch.setattr(kind, "run", run)

    count_single_runs(TorchSession, "reference")
    count_single_runs(OrtSession, "runtime")
    monkeypatch.setattr(turns, "_MAX_TURNS", turns._MIN_TURNS)
    result = measure_job(MeasurementJob(model, good, tiny.samples(12), policy, batch_size=4))
    assert result.runtimes[0].outputs[0].stability is not None
    # Sample 0 is the example. The reference computes it twice to check repeatability, and once to
    # measure the size of its activations.
    assert sorted(samples_run_alone["reference"]) == [0, 0, 0, 0, 1, 2, 3]
    assert sorted(samples_run_alone["runtime"]) == [0, 0, 1, 2, 3]
