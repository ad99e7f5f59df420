"""Judge the metrics of the task by their bounds. Reads numbers only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from gate.decision.check_result import CheckResult, Problem, Verdict, statement
from gate.policy.metrics import MetricPolicy
from gate.policy.policy import Policy
from gate.records.champion_comparison import ChampionComparison
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.metrics import (
    ChampionMetric,
    ChampionMetricGroup,
    MetricDrop,
    MetricEvidence,
    MetricGroup,
)

Change = tuple[str | None, int, MetricDrop]
"""Title of the group, its samples, the drop."""

_ROUNDING = 1e-9
"""A drop may differ from the difference of the values by this share of the larger one."""


def check_measured(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """Yield one check for each metric: whether the evidence has it as the policy defines it."""
    for metric in policy.metrics:
        problem = _problem(metric, _metric_evidence(evidence, metric), evidence)
        yield _statement("metric", metric, problem)


def check_runtime_metrics(
    policy: Policy, evidence: Evidence, runtime: RuntimeEvidence
) -> Iterator[CheckResult]:
    """Yield the checks of one runtime; none for an unmeasured metric (see `check_measured`)."""
    for metric in policy.metrics:
        record = _metric_evidence(evidence, metric)
        if record is None or _problem(metric, record, evidence) is not None:
            continue
        sides = [(group, group.runtimes.get(runtime.runtime)) for group in record.groups]
        drops = [(group.title, group.samples, side.change) for group, side in sides if side]
        if len(drops) < len(sides):
            problem: Problem = {"code": "metric_no_side", "runtime": runtime.runtime}
            yield _statement("metric", metric, problem)
            continue
        first, total = sides[0]
        assert total is not None
        yield from _check_limit(metric, total.value, samples=first.samples)
        if metric.max_drop is not None:
            for check in _check_drops("metric_drop", metric, drops, metric.max_drop):
                yield _with_direction(check, metric, total.change, metric.max_drop)


def check_champion_metrics(
    policy: Policy, evidence: Evidence, incumbent: ChampionComparison
) -> Iterator[CheckResult]:
    """Yield the checks against the champion, which is comparable."""
    for metric in policy.metrics:
        limit = metric.max_drop_from_champion
        if limit is None:
            continue
        record = next((each for each in incumbent.metrics if each.name == metric.name), None)
        problem = _problem(metric, record, evidence)
        if problem is not None or record is None:
            yield _statement("metric_champion_drop", metric, problem or {"code": "metric_absent"})
            continue
        drops = [(group.title, group.samples, group.change) for group in record.groups]
        unpaired = [] if record.paired else [{"code": "metric_unpaired"}]
        for check in _check_drops("metric_champion_drop", metric, drops, limit):
            yield check.with_code(notes=unpaired)


def _statement(name: str, metric: MetricPolicy, problem: Problem | None) -> CheckResult:
    check = statement(name, [problem] if problem else [], verdict=Verdict.ERROR)
    return check.model_copy(update={"point": metric.name})


def _metric_evidence(evidence: Evidence, metric: MetricPolicy) -> MetricEvidence | None:
    return next((each for each in evidence.metrics if each.name == metric.name), None)


def _problem(
    metric: MetricPolicy, record: MetricEvidence | ChampionMetric | None, evidence: Evidence
) -> Problem | None:
    """Return why the numbers of a metric do not count; None: they do."""
    if record is None:
        return {"code": "metric_absent"}
    if record.failure is not None:
        return {"code": "metric_failed", "reason": record.failure.rstrip(".")}
    titles = [group.title for group in record.groups]
    columns = {group.column for group in record.groups[1:]}
    has_groups = titles[:1] == [None] and len(set(titles)) == len(titles)
    wrong = {
        "metric_other": record.definition_sha256 != metric.definition(),
        "metric_groups": not has_groups or columns != set(metric.slices),
        "metric_slices": bool(metric.slices) and evidence.source.slices_sha256 is None,
        "metric_source": not (metric.is_builtin or record.source),
        "metric_values": isinstance(record, MetricEvidence) and record.values_sha256 is None,
        "metric_samples": not _covers(record.groups, evidence.dataset.samples),
        "metric_numbers": any(
            _contradicts(*drop, metric=metric) for group in record.groups for drop in _drops(group)
        ),
    }
    return next(({"code": code} for code, holds in wrong.items() if holds), None)


def _covers(groups: Sequence[MetricGroup] | Sequence[ChampionMetricGroup], samples: int) -> bool:
    """Return whether the first group and the slices of each column have the required samples."""
    counts = Counter[str | None]()
    for group in groups:
        counts[group.column] += group.samples
    return all(count == samples for count in counts.values())


def _drops(
    group: MetricGroup | ChampionMetricGroup,
) -> Iterator[tuple[int, float, float, MetricDrop]]:
    """Yield samples, the value before, the value after, and the drop between them."""
    if isinstance(group, ChampionMetricGroup):
        yield group.samples, group.champion.value, group.value.value, group.change
        return
    for side in group.runtimes.values():
        yield group.samples, group.reference.value, side.value, side.change


def _contradicts(
    samples: int, before: float, after: float, change: MetricDrop, *, metric: MetricPolicy
) -> bool:
    """Return whether a drop contradicts its two values, or more samples changed than exist."""
    drop = before - after if metric.is_higher_better else after - before
    rounding = _ROUNDING * max(abs(before), abs(after))
    off = math.isfinite(drop) and not abs(drop - change.drop) <= rounding
    return off or (change.changed or 0) > samples


def _check_limit(metric: MetricPolicy, value: float, *, samples: int) -> Iterator[CheckResult]:
    higher = metric.is_higher_better
    bound = metric.min if higher else metric.max
    if bound is None:
        return
    holds = math.isfinite(value) and (value >= bound if higher else value <= bound)
    yield CheckResult(
        name="metric_limit",
        point=metric.name,
        observed=value,
        bound=bound,
        relation=">=" if higher else "<=",
        samples=samples,
        verdict=Verdict.PASS if holds and samples else Verdict.FAIL,
        code="within" if holds and samples else "beyond",
    )


def _check_drops(
    name: str, metric: MetricPolicy, drops: Sequence[Change], limit: float
) -> Iterator[CheckResult]:
    """Yield one check for each group: the upper bound of its drop is at most `limit`, with Holm's
    correction over the slices. For a limit of 0 the drop itself is compared."""
    from gate.metrics.intervals import holds_by_holm  # scipy, which reports need not load

    total = [change.bounds for title, _, change in drops if title is None]
    family = [change.bounds for title, _, change in drops if title is not None]
    total_holds = [len(bounds) == 1 and bounds[0] <= limit for bounds in total]
    complete = all(len(bounds) == len(family) for bounds in family)
    holds = holds_by_holm(family, limit) if complete else [False] * len(family)
    # Unproven groups are compared at the level at which Holm's procedure ended.
    rank = max(holds.count(False), 1)
    proven = iter(holds)
    for title, samples, change in drops:
        point = metric.name if title is None else f"{metric.name}, {title}"
        if title is None:
            is_proven, level = total_holds.pop(0), 0
        else:
            is_proven, level = next(proven), min(rank, len(change.bounds)) - 1
        yield _check_drop(
            CheckResult(name=name, point=point, relation="<=", samples=samples,
                        verdict=Verdict.FAIL),
            change,
            limit,
            (is_proven, level, 1.0 - metric.confidence),
        )  # fmt: skip


def _with_direction(
    check: CheckResult, metric: MetricPolicy, total: MetricDrop, limit: float
) -> CheckResult:
    """Return an ERROR for a metric of the user's own that rises by more than it may drop, if the
    policy does not state whether a larger value is better: it may be a loss."""
    gain = -total.drop
    is_stated = metric.is_builtin or metric.higher_is_better is not None
    if is_stated or check.verdict is not Verdict.PASS or check.point != metric.name:
        return check
    if gain <= max(limit, _output_rounding(total)):
        return check
    return check.with_code("no_direction", Verdict.ERROR, gain=gain)


def _check_drop(
    check: CheckResult, change: MetricDrop, limit: float, proof: tuple[bool, int, float]
) -> CheckResult:
    is_proven, level, alpha = proof
    upper = change.bounds[level] if 0 <= level < len(change.bounds) else math.nan
    # For a limit of 0 there may be no bound.
    observed = upper if limit > 0.0 else 0.0 if _is_rounding(change) else change.drop
    finite = math.isfinite(change.drop) and math.isfinite(observed) and bool(check.samples)
    params: Problem = {"drop": change.drop, "changed": change.changed, "method": change.method}
    verdict = Verdict.ERROR
    if not finite:
        code = "no_number"
    elif limit == 0.0:
        good = observed <= 0.0
        verdict, code = (Verdict.PASS, "no_worse") if good else (Verdict.FAIL, "worse")
    elif is_proven and change.drop <= limit:
        verdict, code = Verdict.PASS, "proven"
    elif change.drop > limit:
        verdict, code = Verdict.FAIL, "dropped"
    else:
        needed = samples_to_prove(
            check.samples or 0, change, bound=upper, limit=limit, alpha=alpha / (level + 1)
        )
        code = "too_few" if needed is not None else "at_limit"
        params |= {"needed": needed} if needed is not None else {}
    update = {"observed": observed, "bound": limit, "verdict": verdict, "code": code}
    return check.model_copy(update=update | {"params": params})


def samples_to_prove(
    samples: int, change: MetricDrop, *, bound: float, limit: float, alpha: float
) -> int | None:
    """Return the number of similar samples that would prove that the drop is at most `limit`.

    bound: the upper bound from the present samples. alpha: 1 - confidence level.

    The rule of three is solved for the number of samples; the width of other intervals is
    proportional to its inverse square root. None if the drop itself reaches the limit, so that no
    number is enough.
    """
    drop, scale = change.drop, change.scale
    if not (math.isfinite(bound) and drop < limit):
        return None
    if change.method == "rule_of_three" and limit < scale:
        return math.ceil(math.log(alpha) / math.log1p((drop - limit) / (scale - drop)))
    return max(samples + 1, math.ceil(samples * ((bound - drop) / (limit - drop)) ** 2))


def _is_rounding(change: MetricDrop) -> bool:
    """Return whether the values differ by the rounding of float32 outputs only."""
    return change.changed == 0 and 0.0 < change.drop <= _output_rounding(change)


def _output_rounding(change: MetricDrop) -> float:
    """Return the largest change of a metric by the rounding of float32 outputs."""
    from gate.metrics.intervals import OUTPUT_ROUNDING

    return OUTPUT_ROUNDING * change.scale
