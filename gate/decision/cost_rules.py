"""Compare latency and memory with bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from gate.decision.bound_rules import BoundedMetric, check_metric
from gate.decision.check_result import CheckResult, Problem
from gate.policy.sections import Bounds
from gate.records.evidence import Evidence, Latency, RuntimeEvidence
from gate.records.outputs import largest

_MB = 1e6


def check_costs(
    bounds: Bounds, evidence: Evidence, runtime: RuntimeEvidence
) -> Iterator[CheckResult]:
    """Yield one check per bound: the time relative to PyTorch's, and the memory."""
    if bounds.latency_ratio is not None:
        yield _latency(bounds.latency_ratio, evidence, runtime)
    if bounds.memory_mb is not None:
        yield _memory(bounds.memory_mb, runtime)
    if bounds.p95_ms is not None:
        slowest = max((load.p95_ms for load in runtime.concurrency), default=None)
        yield _load("p95_ms", slowest, "<=", bounds.p95_ms, runtime)
    if bounds.throughput_min is not None:
        closed = [load for load in runtime.concurrency if load.rate is None]
        most = max(closed, key=lambda load: load.connections, default=None)
        least = None if most is None else most.per_second
        yield _load("throughput_min", least, ">=", bounds.throughput_min, runtime)


def latency_ratios(
    evidence: Evidence, runtime: RuntimeEvidence
) -> tuple[dict[int, float], Problem | None]:
    """Return the median time of a batch divided by PyTorch's, by batch size (NaN for invalid
    times), and why the measurement is incomplete, or None.

    Both sides took turns with the same number of threads, or the runtime's own. The time of a
    single first batch does not count.
    """
    cost, baseline = runtime.cost, evidence.reference_cost
    if cost is None or baseline is None:
        return {}, {"code": "not_timed"}
    pairs = [(runtime.latency, evidence.reference_latency)]
    if cost.single is not None or not evidence.has_fixed_batch:
        pairs.append((_single_sample_latency(cost.single), _single_sample_latency(baseline.single)))
    ratios: dict[int, float] = {}
    cold: Problem | None = None
    for latency, reference in pairs:
        if latency is None or reference is None:
            return ratios, {"code": "one_side_timed"}
        if latency.batch_size != reference.batch_size:
            sizes = {"size": latency.batch_size, "reference_size": reference.batch_size}
            return ratios, {"code": "other_batches", **sizes}
        if latency.cold or reference.cold:
            cold = {"code": "only_first", "size": latency.batch_size}
        else:
            ratios[latency.batch_size] = _ratio(latency, reference)
    return ratios, cold


def _single_sample_latency(single: Latency | None) -> Latency | None:
    """Return the latency if its batches have a single sample, else None."""
    return single if single is not None and single.batch_size == 1 else None


def _ratio(latency: Latency, reference: Latency) -> float:
    new, old = latency.median_ms, reference.median_ms
    timed = latency.batches > 0 and reference.batches > 0
    return new / old if timed and new > 0.0 and 0.0 < old < math.inf else math.nan


def _latency(bound: float, evidence: Evidence, runtime: RuntimeEvidence) -> CheckResult:
    ratios, problem = latency_ratios(evidence, runtime)
    if problem is not None:
        return _unmeasured("latency_ratio", bound, runtime, problem)
    notes = [*_threads(evidence, runtime)]
    reason = runtime.cost.single_unmeasured if runtime.cost and not runtime.cost.single else None
    if reason:
        notes.append({"code": "no_single", "reason": reason.rstrip(".")})
    params: Problem = {
        "ratios": [f"{ratio:.3g} for {_samples(size)}" for size, ratio in ratios.items()],
        "notes": notes,
    }
    metric = BoundedMetric("latency_ratio", largest(ratios.values()), "<=", bound)
    return _cost_check(metric, runtime, params)


def _memory(bound: float, runtime: RuntimeEvidence) -> CheckResult:
    """Check the growth of memory. 0 is valid: the process may have had the memory before."""
    grown = runtime.memory_bytes
    if grown is None or runtime.cost is None:
        code = "memory_unread" if grown is None else "memory_older"
        return _unmeasured("memory_mb", bound, runtime, {"code": code})
    return _cost_check(BoundedMetric("memory_mb", grown / _MB, "<=", bound), runtime, {})


def _load(
    name: str,
    observed: float | None,
    relation: Literal["<=", ">="],
    bound: float,
    runtime: RuntimeEvidence,
) -> CheckResult:
    if observed is None:
        return _unmeasured(name, bound, runtime, {"code": "no_load"})
    return _cost_check(BoundedMetric(name, observed, relation, bound), runtime, {})


def _unmeasured(name: str, bound: float, runtime: RuntimeEvidence, problem: Problem) -> CheckResult:
    return _cost_check(BoundedMetric(name, None, "<=", bound), runtime, {"problems": [problem]})


def _cost_check(metric: BoundedMetric, runtime: RuntimeEvidence, params: Problem) -> CheckResult:
    return check_metric(metric, samples=None, runtime=runtime.runtime, params=params)


def _samples(size: int) -> str:
    return "one sample" if size == 1 else f"{size} samples"


def _threads(evidence: Evidence, runtime: RuntimeEvidence) -> Iterator[Problem]:
    """Yield a note if the runtime and PyTorch had different numbers of threads."""
    threads = runtime.session_options.get("intra_op_num_threads")
    reference = evidence.environment.determinism.threads
    if threads not in (None, str(reference)):
        yield {"code": "other_threads", "threads": threads, "reference_threads": reference}
