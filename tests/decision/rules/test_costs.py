"""Exceeded bounds on latency and memory are a FAIL; a missing measurement is an ERROR."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import Evidence, Verdict, decide
from gate.decision.cost_rules import check_costs, latency_ratios
from gate.policy.sections import Bounds, RuntimePolicy
from gate.records.evidence import Cost, Latency, RuntimeEvidence
from gate.records.instruments import ConcurrentLoad
from gate.records.outputs import largest
from gate.summary.render import render_check
from tests.builders import absent, evidence, policy, runtime_evidence


def latency(median_ms: float, **overrides: Any) -> Latency:
    fields = {"batch_size": 32, "batches": 9, "median_ms": median_ms, "p95_ms": median_ms}
    return Latency(**fields | overrides)


def single(median_ms: float, **overrides: Any) -> Latency:
    return latency(median_ms, batch_size=1, **overrides)


def timed_runtime(**overrides: Any) -> RuntimeEvidence:
    """Return a runtime with half of PyTorch's latency per batch and the same latency per sample."""
    fields: dict[str, Any] = {
        "latency": latency(10.0),
        "cost": Cost(single=single(2.0)),
        "memory_bytes": 50_000_000,
    }
    return runtime_evidence("ort-cpu", **fields | overrides)


def evidence_of_runtime(runtime: RuntimeEvidence, **overrides: Any) -> Evidence:
    fields: dict[str, Any] = {
        "runtimes": (runtime,),
        "reference_latency": latency(20.0),
        "reference_cost": Cost(single=single(2.0)),
    }
    return evidence(**fields | overrides)


def list_cost_checks(runtime, bounds=None, **overrides):
    bounds = bounds or Bounds(latency_ratio=1.5, memory_mb=60.0)
    return {
        check.name: check
        for check in check_costs(bounds, evidence_of_runtime(runtime, **overrides), runtime)
    }


@pytest.mark.parametrize(
    ("per_second", "verdict"), [(19.9, "FAIL"), (20.0, "PASS"), (900.0, "PASS")]
)
def test_throughput_has_a_lower_bound(per_second, verdict):
    load = ConcurrentLoad(
        connections=8, rate=None, requests=96, batch_invariance_ratio=0.0, crossed=0, p50_ms=1.0,
        p95_ms=2.0, p99_ms=3.0, per_second=per_second,
    )  # fmt: skip
    checks = list_cost_checks(timed_runtime(concurrency=(load,)), Bounds(throughput_min=20.0))
    assert checks["throughput_min"].verdict == verdict


def test_latency_and_memory_within_bounds_pass():
    checks = list_cost_checks(timed_runtime())
    assert {name: (check.observed, check.verdict) for name, check in checks.items()} == {
        "latency_ratio": (1.0, Verdict.PASS),
        "memory_mb": (50.0, Verdict.PASS),
    }
    assert "0.5 for 32 samples, 1 for one sample" in render_check(checks["latency_ratio"])
    assert list_cost_checks(timed_runtime(), Bounds(noise_ratio=1.5)) == {}


@pytest.mark.parametrize(
    ("spoilt", "verdict"),
    [
        ({"latency": latency(31.0)}, Verdict.FAIL),
        ({"cost": Cost(single=single(3.1))}, Verdict.FAIL),
        ({"latency": latency(math.nan)}, Verdict.FAIL),
        ({"latency": latency(math.inf)}, Verdict.FAIL),
        ({"latency": latency(0.0)}, Verdict.FAIL),
        ({"latency": latency(-1.0)}, Verdict.FAIL),
        ({"latency": latency(10.0, batches=0)}, Verdict.FAIL),
        ({"latency": None}, Verdict.ERROR),
        ({"latency": latency(10.0, batch_size=8)}, Verdict.ERROR),
        ({"cost": None}, Verdict.ERROR),
        ({"cost": Cost()}, Verdict.ERROR),
        # The file has a dynamic batch axis, so this reason is not accepted.
        ({"cost": Cost(single_unmeasured="the file has a fixed batch axis of 32")}, Verdict.ERROR),
        ({"latency": latency(1.0, cold=True), "cost": Cost(single=single(1.0, cold=True))}, Verdict.ERROR),
    ],
)  # fmt: skip
def test_slow_or_invalid_or_missing_latency_never_passes(spoilt, verdict):
    check = list_cost_checks(timed_runtime(**spoilt))["latency_ratio"]
    assert check.verdict is verdict
    assert render_check(check, "remedy")
    assert (check.observed is None) == (verdict is Verdict.ERROR)


@pytest.mark.parametrize(("spoilt", "verdict"), [
    ({"reference_latency": None}, Verdict.ERROR),
    ({"reference_cost": None}, Verdict.ERROR),
    ({"reference_cost": Cost()}, Verdict.ERROR),
    ({"reference_latency": latency(20.0, batch_size=8)}, Verdict.ERROR),
    ({"reference_latency": latency(0.0)}, Verdict.FAIL),
    ({"reference_latency": latency(math.nan)}, Verdict.FAIL),
    ({"reference_latency": latency(math.inf)}, Verdict.FAIL),
    ({"reference_latency": latency(-3.0)}, Verdict.FAIL),
])  # fmt: skip
def test_missing_reference_latency_never_passes(spoilt, verdict):
    assert list_cost_checks(timed_runtime(), **spoilt)["latency_ratio"].verdict is verdict


def test_single_latency_needs_batch_size_one():
    batch = Cost(single=latency(2.0))
    check = list_cost_checks(timed_runtime(cost=batch), reference_cost=batch)["latency_ratio"]
    assert check.verdict is Verdict.ERROR


def test_latency_of_only_the_first_batch_is_an_error():
    cold = latency(1000.0, batches=1, cold=True)
    check = list_cost_checks(timed_runtime(latency=cold), reference_latency=cold)["latency_ratio"]
    assert (check.verdict, check.observed) == (Verdict.ERROR, None)
    assert check.params["problems"] == [{"code": "only_first", "size": 32}]


def test_fixed_batch_file_is_checked_by_batch_latency_only():
    base = evidence().subject
    fixed = base.inputs[0].model_copy(update={"shape": (32, 3, 64, 64)})
    reason = "the file has a fixed batch axis of 32"
    not_timed = Cost(single_unmeasured=reason)
    check = list_cost_checks(
        timed_runtime(cost=not_timed),
        subject=base.model_copy(update={"inputs": (fixed,)}),
        reference_cost=not_timed,
    )["latency_ratio"]
    assert (check.verdict, check.observed) == (Verdict.PASS, 0.5)
    assert f"Single samples were not timed: {reason}" in render_check(check)


@pytest.mark.parametrize(("size", "verdict"), [
    (0, Verdict.PASS),
    (60_000_000, Verdict.PASS),
    (60_000_001, Verdict.FAIL),
    (None, Verdict.ERROR),
])  # fmt: skip
def test_memory_bound(size, verdict):
    assert list_cost_checks(timed_runtime(memory_bytes=size))["memory_mb"].verdict is verdict


def test_memory_of_older_evidence_is_an_error():
    check = list_cost_checks(timed_runtime(cost=None, memory_bytes=1))["memory_mb"]
    assert (check.verdict, check.observed) == (Verdict.ERROR, None)
    assert check.params["problems"] == [{"code": "memory_older"}]


@given(st.floats(0.1, 100.0), st.floats(1.0, 10.0))
def test_latency_ratio_does_not_decrease_with_latency(median, factor):
    first, second = (
        max(latency_ratios(evidence_of_runtime(runtime), runtime)[0].values())
        for runtime in (timed_runtime(latency=latency(ms)) for ms in (median, median * factor))
    )
    assert second >= first


def test_absent_runtime_is_waived_and_slow_runtime_fails():
    base = policy()
    bounds = base.runtimes["ort-cpu"].bounds.model_copy(update={"latency_ratio": 0.75})
    bounded = base.model_copy(
        update={
            "runtimes": {
                name: RuntimePolicy(required=each.required, bounds=bounds)
                for name, each in base.runtimes.items()
                if name in ("ort-cpu", "ort-cpu-optimized", "ort-cuda")
            }
        }
    )
    fast = runtime_evidence(
        "ort-cpu-optimized", latency=latency(10.0), cost=Cost(single=single(1.0))
    )
    record = evidence_of_runtime(timed_runtime(), runtimes=(timed_runtime(), fast, absent("ort-cuda")))  # fmt: skip
    decision = decide(bounded, record, decided_at="now")
    requested = {c.runtime: c.verdict for c in decision.checks if c.name == "latency_ratio"}
    assert requested == {"ort-cpu": Verdict.FAIL, "ort-cpu-optimized": Verdict.PASS}
    assert (decision.verdict, decision.runtimes) == (Verdict.FAIL, ("ort-cpu-optimized",))


@pytest.mark.parametrize("order", [1, -1])
def test_largest_propagates_nan(order):
    assert math.isnan(largest([math.nan, 0.4][::order]) or 0.0)
    assert largest([3.0, 2.0][::order]) == 3.0
    assert largest([]) is None
