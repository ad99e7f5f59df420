"""Compare latency and memory with bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from gate.decision.bound_rules import BoundedMetric
from gate.decision.catalog import REMEDIES
from gate.decision.check_result import CheckResult, Verdict
from gate.policy.sections import Bounds
from gate.records.evidence import Evidence, Latency, RuntimeEvidence

_MB = 1e6


def costs(bounds: Bounds, evidence: Evidence, runtime: RuntimeEvidence) -> Iterator[CheckResult]:
    """One check for each bound: the time beside PyTorch's, and the memory."""
    if bounds.latency_ratio is not None:
        yield _latency(bounds.latency_ratio, evidence, runtime)
    if bounds.memory_mb is not None:
        yield _memory(bounds.memory_mb, runtime)


def latency_ratios(
    evidence: Evidence, runtime: RuntimeEvidence
) -> tuple[dict[int, float], str | None]:
    """Median time of a batch, the runtime's by PyTorch's, by batch size: NaN for what is no time.
    And why that is not all that can be measured; None: it is.

    Both sides took turns under the same threads, or the runtime's own. A batch that was the first
    and the only one has no time that counts.
    """
    one, other = runtime.cost, evidence.reference_cost
    if one is None or other is None:
        return {}, (
            "nobody timed it beside PyTorch: a recording has no times, nor has evidence of before"
        )
    pairs = [(runtime.latency, evidence.reference_latency)]
    if one.single is not None or not evidence.has_fixed_batch:
        pairs.append((_of_one(one.single), _of_one(other.single)))
    found: dict[int, float] = {}
    cold: str | None = None
    for latency, reference in pairs:
        if latency is None or reference is None:
            return found, "its batches, and those of one sample, were not timed on both sides"
        if latency.batch_size != reference.batch_size:
            return found, (
                f"batches of {latency.batch_size} were timed beside batches of "
                f"{reference.batch_size} in PyTorch"
            )
        if latency.cold or reference.cold:
            size = _samples(latency.batch_size)
            cold = f"of {size} only one batch was timed, the first, which warms up"
        else:
            found[latency.batch_size] = _ratio(latency, reference)
    return found, cold


def _of_one(single: Latency | None) -> Latency | None:
    """Batches of another size are no answer to how long one sample takes."""
    return single if single is not None and single.batch_size == 1 else None


def largest_ratio(ratios: Mapping[int, float]) -> float | None:
    """What `latency_ratio` bounds: NaN if one of them is; None: there is none."""
    worst = max(ratios.values(), default=None)
    return math.nan if any(map(math.isnan, ratios.values())) else worst


def _ratio(latency: Latency, reference: Latency) -> float:
    new, old = latency.median_ms, reference.median_ms
    timed = latency.batches > 0 and reference.batches > 0
    return new / old if timed and new > 0.0 and 0.0 < old < math.inf else math.nan


def _latency(bound: float, evidence: Evidence, runtime: RuntimeEvidence) -> CheckResult:
    ratios, problem = latency_ratios(evidence, runtime)
    if problem is not None:
        return _check(_metric("latency_ratio", None, bound), runtime, problem)
    worst = largest_ratio(ratios)
    listed = ", ".join(f"{ratio:.3g} for {_samples(size)}" for size, ratio in ratios.items())
    reason = runtime.cost.single_unmeasured if runtime.cost and not runtime.cost.single else None
    text = f"Of PyTorch's time on the CPU, by batch: {listed}{_threads(evidence, runtime)}"
    if reason:
        text += f"; not of one sample: {reason}"
    return _check(_metric("latency_ratio", worst, bound), runtime, text)


def _memory(bound: float, runtime: RuntimeEvidence) -> CheckResult:
    """0 is right where the process had the memory before."""
    grown, none = runtime.memory_bytes, _metric("memory_mb", None, bound)
    if grown is None:
        return _check(none, runtime, "nobody measured its memory, or it could not be read")
    if runtime.cost is None:
        problem = "evidence of before has it by another definition"
        return _check(none, runtime, problem)
    text = (
        "By so much memory grew while it opened the file and ran it: at the peak of the process, "
        "of a browser at the end"
    )
    return _check(_metric("memory_mb", grown / _MB, bound), runtime, text)


def _metric(name: str, observed: float | None, bound: float) -> BoundedMetric:
    return BoundedMetric(name, observed, "<=", bound)


def _check(metric: BoundedMetric, runtime: RuntimeEvidence, text: str) -> CheckResult:
    name, observed, relation, bound, _ = metric
    if observed is None:
        verdict, explanation = Verdict.ERROR, f"{name} was not measured: {text}."
    else:
        verdict = Verdict.PASS if metric.holds() else Verdict.FAIL
        explanation = f"{name} is {observed:.6g}, allowed {relation} {bound:.6g}. {text}."
    return CheckResult(
        name=name,
        runtime=runtime.runtime,
        observed=observed,
        bound=bound,
        relation=relation,
        verdict=verdict,
        explanation=explanation,
        remedy=REMEDIES["cost_unmeasured" if observed is None else name],
    )


def _samples(size: int) -> str:
    return "one sample" if size == 1 else f"{size} samples"


def _threads(evidence: Evidence, runtime: RuntimeEvidence) -> str:
    """Where the runtime was given another number of threads than PyTorch has."""
    own = runtime.session_options.get("intra_op_num_threads")
    threads = evidence.environment.determinism.threads
    if own in (None, str(threads)):
        return ""
    return f" (with {own} threads beside {threads} of PyTorch)"
