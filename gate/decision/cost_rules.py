"""Compare latency and memory with bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gate.decision.bound_rules import BoundedMetric, check_metric
from gate.decision.check_result import CheckResult, Problem
from gate.policy.sections import Bounds
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.outputs import largest

_MB = 1e6

_NO_LOAD: Problem = {"code": "no_load"}


def check_costs(
    bounds: Bounds, evidence: Evidence, runtime: RuntimeEvidence
) -> Iterator[CheckResult]:
    """Yield one check per bound: the time relative to PyTorch's, and the memory."""
    if bounds.latency_ratio is not None:
        ratios, problem = latency_ratios(evidence, runtime)
        ratio = largest(ratios.values()) if problem is None else None
        metric = BoundedMetric("latency_ratio", ratio, "<=", bounds.latency_ratio)
        sizes = {size: "one sample" if size == 1 else f"{size} samples" for size in ratios}
        shown = [f"{ratio:.3g} for {sizes[size]}" for size, ratio in ratios.items()]
        notes = [*_notes(evidence, runtime)]
        yield _check(metric, problem, ratios=shown, notes=notes)
    if bounds.memory_mb is not None:  # 0 is valid: the process may have had the memory before
        grown = runtime.memory_bytes
        problem = {"code": "memory_unread" if grown is None else "memory_older"}
        size = grown / _MB if grown is not None and runtime.cost is not None else None
        yield _check(BoundedMetric("memory_mb", size, "<=", bounds.memory_mb), problem)
    if bounds.p95_ms is not None:
        slowest = max((load.p95_ms for load in runtime.concurrency), default=None)
        yield _check(BoundedMetric("p95_ms", slowest, "<=", bounds.p95_ms), _NO_LOAD)
    if bounds.throughput_min is not None:
        closed = [load for load in runtime.concurrency if load.rate is None]
        most = max(closed, key=lambda load: load.connections, default=None)
        rate = None if most is None else most.per_second
        yield _check(BoundedMetric("throughput_min", rate, ">=", bounds.throughput_min), _NO_LOAD)


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
        singles = [s if s and s.batch_size == 1 else None for s in (cost.single, baseline.single)]
        pairs.append((singles[0], singles[1]))
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
            ratios[latency.batch_size] = latency.ratio_to(reference)
    return ratios, cold


def _check(metric: BoundedMetric, problem: Problem | None, **params: Any) -> CheckResult:
    """Return the check of a number. `problem`: why it was not measured, if it was not."""
    params = {"problems": [problem]} if metric.observed is None else params
    return check_metric(metric, samples=None, params=params)


def _notes(evidence: Evidence, runtime: RuntimeEvidence) -> Iterator[Problem]:
    """Yield notes on different numbers of threads, and on why single samples were not timed."""
    threads = runtime.session_options.get("intra_op_num_threads")
    reference = evidence.environment.determinism.threads
    if threads not in (None, str(reference)):
        yield {"code": "other_threads", "threads": threads, "reference_threads": reference}
    cost = runtime.cost
    if cost is not None and cost.single is None and cost.single_unmeasured:
        yield {"code": "no_single", "reason": cost.single_unmeasured.rstrip(".")}
