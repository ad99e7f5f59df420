"""Compare metrics with bounds: differences, classes, noise, operating points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from gate.decision.check_result import CheckResult, Problem, Verdict
from gate.policy.output_roles import class_metrics_for, infer_role, is_unsure, max_ties
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, OperatingPoint, Waivable
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.instruments import EPSILON, NoiseParity
from gate.records.outputs import LISTED, ClassParity, Crossing, OutputParity
from gate.records.runtime import RuntimeName

_AGREEMENTS = ("top1_agreement", "top1_lower_bound", "top5_agreement")


class BoundedMetric(NamedTuple):
    """A measured number and its bound. None: not measured, not bounded.

    Impossible numbers (a negative difference, a share above 1) do not hold.
    """

    name: str
    observed: float | None
    relation: Literal["<=", ">="]
    bound: float | None
    least: float = 0.0
    """The smallest possible value."""
    most: float = math.inf
    """The largest possible value. Shares that are computed from counts need none."""

    def holds(self) -> bool:
        """Return True only for finite numbers within the bound."""
        if self.observed is None or self.bound is None or not math.isfinite(self.observed):
            return False
        if self.relation == "<=":
            return self.least <= self.observed <= self.bound
        return self.bound <= self.observed <= self.most


def numeric_metrics(bounds: Bounds, output: OutputParity) -> list[BoundedMetric]:
    """Return the metrics that every output has."""
    return [
        BoundedMetric("max_abs_diff", output.max_abs_diff, "<=", bounds.max_abs_diff),
        BoundedMetric("mean_abs_diff", output.mean_abs_diff, "<=", bounds.mean_abs_diff),
        BoundedMetric("scaled_diff", _scaled_diff(output), "<=", bounds.scaled_diff),
        BoundedMetric("l2_logits", output.l2_max, "<=", bounds.l2_logits),
    ]


_NUMERIC = ("max_abs_diff", "mean_abs_diff", "scaled_diff", "l2_logits")

_FIRST_SAMPLES = ("noise_ratio", "noise_peak")
"""Metrics that the first samples determine."""

_CLEAR = 3.0
"""Factors on `noise_ratio` and on 1 above which the error of a whole output can't be a random
effect of few runs under random rounding. Measured on 900 outputs with 1 to 320 effective errors:
the ratio of a correct runtime is at most 2.4 with three runs, and 1.2 with fifteen."""


def is_refused(
    policy: Policy,
    runtime: RuntimeName,
    noise: Mapping[str, NoiseParity | None],
    *,
    times: float = 1.0,
    few_draws: bool = False,
) -> bool:
    """Return True if an output exceeds a bound on its noise `times` times, so that examining
    samples or probes again can't change the verdict. `noise`: by output. `few_draws`: neither can
    further runs under random rounding."""
    for name, measured in noise.items():
        if measured is None or not measured.elements:
            continue
        if policy.role_for(name) in ("mask", "indices"):
            continue
        bounds = policy.bounds_for(runtime, name)
        allowed = bounds.noise_ratio
        if allowed is not None:  # the operator that computes the output is not known yet
            allowed = max((allowed, *(bounds.noise_ratio_by_operator or {}).values()))
        if _exceeds(measured.settled or 0.0, bounds.noise_diff, times=times):
            return True
        if few_draws or measured.few_draws:
            least = _CLEAR * max(1.0, 1.0 / allowed) if allowed else _CLEAR
            if not _exceeds(measured.whole_ratio, allowed, times=least):
                continue
            if few_draws:
                return True
        pairs = ((measured.ratio, allowed), (measured.peak, bounds.noise_peak))
        if any(_exceeds(observed, bound, times=times) for observed, bound in pairs):
            return True
    return False


def _exceeds(observed: float, bound: float | None, *, times: float) -> bool:
    return bound is not None and not observed <= times * bound


def mark_unexamined(
    checks: Iterable[CheckResult], *, unexamined: bool, few_draws: bool
) -> list[CheckResult]:
    """Turn a FAIL into an ERROR if examining samples again may change it, and a PASS of
    `noise_diff` if an `unexamined` sample may exceed the bound. `few_draws`: also if further runs
    under random rounding may change the FAIL."""
    settled = _NUMERIC if few_draws else (*_NUMERIC, *_FIRST_SAMPLES)

    def may_change(check: CheckResult) -> bool:
        if check.verdict is Verdict.PASS:
            return unexamined and check.name == "noise_diff"
        return check.verdict is Verdict.FAIL and check.name not in settled

    return [
        check.with_code("unexamined", Verdict.ERROR) if may_change(check) else check
        for check in checks
    ]


def _scaled_diff(output: OutputParity) -> float:
    """Return the recorded `scaled_diff`; for a constant, the error relative to its size."""
    scalar = output.reference_constant and output.reference_std == 0.0
    if not (scalar and output.dtype.startswith("float") and output.reference_abs_max > 0.0):
        return output.scaled_diff
    return output.max_abs_diff / output.reference_abs_max


def class_metrics(
    policy: Policy, bounds: Bounds, output: OutputParity, logits: ClassParity
) -> list[BoundedMetric]:
    """Return the metrics of logits over the samples that have an answer."""
    answered = max(output.samples - logits.nan_rows, 0)
    n = max(answered - logits.top1_ties, 0)
    lower: float | None
    agreement: float | None
    lower = agreement_lower_bound(logits.top1_disagreements, n, confidence=policy.confidence)
    # If count and share contradict each other, the worse one counts.
    agreement = min(logits.top1_agreement, 1.0 - logits.top1_disagreements / n if n else 0.0)
    if not math.isfinite(logits.top1_agreement):
        agreement = lower = math.nan
    if n == 0:
        agreement = lower = None
    confidence = logits.confidence
    drop = logits.accuracy.drop if logits.accuracy else None
    comparisons = [
        BoundedMetric("top1_agreement", agreement, ">=", bounds.top1_agreement),
        BoundedMetric("top1_lower_bound", lower, ">=", bounds.top1_lower_bound),
        BoundedMetric(
            "top5_agreement", logits.top5_agreement, ">=", bounds.top5_agreement, most=1.0
        ),
        BoundedMetric(
            "l2_probabilities", logits.l2_probabilities_max, "<=", bounds.l2_probabilities
        ),
        BoundedMetric("confidence_diff", confidence.max, "<=", bounds.confidence_diff),
        BoundedMetric("accuracy_drop", drop, "<=", bounds.accuracy_drop, least=-1.0),
    ]
    if bounds.confidence_bands is not None:
        _, from1, from5, from10 = confidence.bands
        allowed = bounds.confidence_bands
        comparisons += [
            BoundedMetric(f"confidence_over_{percent}_percent", share, "<=", bound)
            for percent, share, bound in (
                (1, from1 + from5 + from10, allowed.over_1_percent),
                (5, from5 + from10, allowed.over_5_percent),
                (10, from10, allowed.over_10_percent),
            )
        ]
    if answered == 0:
        return [metric._replace(observed=None) for metric in comparisons]
    return comparisons


def check_near_ties(policy: Policy, output: OutputParity) -> Iterator[CheckResult]:
    """Yield a check that differences excused by rounding are rare."""
    logits = class_metrics_for(policy, output)
    for kind, count, total in (
        ("integers", output.near_ties, output.elements),
        ("answers", logits.top1_ties if logits else 0, output.samples),
    ):
        if count:
            most = max_ties(total)
            ties = BoundedMetric("near_ties", float(count), "<=", float(most))
            code = "few" if count <= most else "too_many"
            check = check_metric(ties, samples=output.samples)
            yield check.with_code(code, count=count, total=total, what=kind)


def mark_unproven(policy: Policy, check: CheckResult, output: OutputParity) -> CheckResult:
    """Turn a FAIL of agreement into an ERROR if it proves nothing about the file: PyTorch's own
    rounding changes as many answers, or no answer differs and more such samples would pass."""
    logits = output.classification
    if logits is None or check.verdict is not Verdict.FAIL or check.name not in _AGREEMENTS:
        return check
    if is_unsure(logits):
        judged = logits.unsure + logits.sure
        return check.with_code("unsure", Verdict.ERROR, unsure=logits.unsure, judged=judged)
    lower, bound, confidence = check.observed, check.bound, policy.confidence
    same = logits.top1_disagreements == 0 and logits.top1_agreement == 1.0
    if check.name != "top1_lower_bound" or not same:
        return check
    if not (isinstance(lower, float) and lower > 0.0 and isinstance(bound, float)):
        return check
    needed = samples_needed(bound, confidence=confidence)
    if needed is None:
        return check.with_code("never_enough_samples", Verdict.ERROR)
    return check.with_code("too_few_samples", Verdict.ERROR, needed=needed, confidence=confidence)


def check_metric(metric: BoundedMetric, *, samples: int | None, **fields: Any) -> CheckResult:
    """Return the check of one comparison: ERROR if not measured, FAIL if it does not hold or there
    are no samples. `samples`: None for a number that is not about samples. `fields`: output, point
    and params of the check."""
    numbers = {**metric._asdict(), "samples": samples, **fields}
    del numbers["least"], numbers["most"]
    if metric.observed is None:
        return CheckResult(verdict=Verdict.ERROR, code="unmeasured", **numbers)
    if metric.holds() and samples != 0:
        return CheckResult(verdict=Verdict.PASS, code="within", **numbers)
    return CheckResult(verdict=Verdict.FAIL, code="beyond", **numbers)


def agreement_lower_bound(disagreements: int, samples: int, *, confidence: float) -> float:
    """Return the one-sided Clopper-Pearson lower bound of the agreement, in [0, 1]; 0.0 without
    agreements."""
    from gate.metrics.intervals import share_limits  # scipy, which reports need not load

    return share_limits(max(samples - disagreements, 0), samples, confidence)[0]


def samples_needed(bound: float, *, confidence: float) -> int | None:
    """Return the smallest number of samples whose lower bound reaches `bound` without a
    disagreement. None if no number does.

    Without disagreements the bound is `(1 - confidence) ** (1 / samples)`.
    """
    if not 0.0 < bound < 1.0:
        return None if bound >= 1.0 else 1
    samples = max(math.ceil(math.log1p(-confidence) / math.log(bound)), 1)
    while agreement_lower_bound(0, samples, confidence=confidence) < bound:  # rounding at the edge
        samples += 1
    while samples > 1 and agreement_lower_bound(0, samples - 1, confidence=confidence) >= bound:
        samples -= 1
    return samples


# A missing measurement, or one on fewer samples than the policy requires, is an ERROR. It can be
# waived by name.


_ROUNDING = 1e-9
"""Relative difference of float64 sums between two ways to compute the same ratio."""


def noise_metrics(bounds: Bounds, output: OutputParity) -> list[BoundedMetric]:
    """Return the metrics in units of rounding; none for integers and bools, which are not
    rounded."""
    if not output.dtype.startswith("float"):
        return []
    measured = output.noise
    allowed = bounds.noise_ratio
    if measured is not None and measured.scatter is None:
        allowed = _widened(bounds.noise_ratio, measured.elements)
    return [
        BoundedMetric("noise_ratio", _noise_ratio(measured) if measured else None, "<=", allowed),
        BoundedMetric(
            "noise_peak", _noise_peak(output) if measured else None, "<=", bounds.noise_peak
        ),
        BoundedMetric("noise_diff", measured.diff if measured else None, "<=", bounds.noise_diff),
    ]


def with_exceptions(bounds: Bounds, evidence: Evidence, output: str) -> Bounds:
    """Return the bounds, with a larger `noise_ratio` if the operator that computes the output has
    one."""
    exceptions = bounds.noise_ratio_by_operator or {}
    reports = [evidence.graph, *(part.graph for part in evidence.parts.values())]
    allowed = [
        exceptions[operator]
        for report in reports
        if report is not None
        for operator in report.last_operators.get(output, report.operators)
        if operator in exceptions
    ]
    if not allowed or bounds.noise_ratio is None:
        return bounds
    return bounds.model_copy(update={"noise_ratio": max(bounds.noise_ratio, *allowed)})


def check_noise(
    policy: Policy, bounds: Bounds, evidence: Evidence, output: OutputParity
) -> Iterator[CheckResult]:
    """Yield `noise_ratio`, `noise_peak` and `noise_diff` of a float output."""
    measured = output.noise
    lacking = _problem(policy, evidence, output)
    for metric in noise_metrics(bounds, output):
        if metric.bound is None:
            continue
        check = check_metric(metric, samples=output.samples)
        # The measured part of a bad output is enough to refuse it, waived or not.
        if lacking is not None and (not _has_values(measured) or metric.holds()):
            waived = policy.waives(cast(Waivable, metric.name), output.name)
            verdict = Verdict.WAIVED if waived else Verdict.ERROR
            check = check.with_code("no_floor", verdict, problems=[lacking])
        elif measured is not None:
            check = check.with_code(notes=[*_noise_notes(metric.name, measured)])
        yield check.model_copy(update={"samples": measured.samples if measured else 0})


def _noise_notes(name: str, measured: NoiseParity) -> Iterator[Problem]:
    """Yield the location of the largest ratio, unless it is the whole output, and which side is
    closer to the float64 reference."""
    if measured.group and name == "noise_ratio":
        yield {"code": "in_group", "group": measured.group}
    by_float64 = measured.baseline == "float64"
    yield {"code": f"closer_{measured.closer}" if by_float64 else "by_rounding"}


_SAME_IN_FLOAT64 = 1e-4
"""Largest `Evidence.float64_differences` of a file that computes the function of the model."""


def check_noise_floor(
    policy: Policy, bounds: Bounds, evidence: Evidence, output: OutputParity
) -> Iterator[CheckResult]:
    """Yield a check for a float output whose noise floor may hide faults or is missing.

    The floor hides no fault if file and model agree in float64.
    """
    if not any(metric.bound is not None for metric in noise_metrics(bounds, output)):
        return
    metric = BoundedMetric("not_measurable", None, "<=", policy.instruments.max_floor)
    if not _is_measurable(evidence, output):
        waived = policy.waives("noise_ratio", output.name)
        verdict = Verdict.WAIVED if waived else Verdict.ERROR
        yield check_metric(metric, samples=output.samples).with_code("no_reference", verdict)
        return
    share, differs = floor_share(output), evidence.float64_differences.get(output.name)
    if share <= policy.instruments.max_floor:
        return
    check = check_metric(metric._replace(observed=share), samples=output.samples)
    if differs is None or share > 1.0:
        yield check.with_code("hidden", Verdict.ERROR)
    elif not differs <= _SAME_IN_FLOAT64:
        params = {"differs": differs, "allowed": _SAME_IN_FLOAT64}
        yield check.with_code("differs_in_float64", Verdict.ERROR, **params)


_OF_CHOICES = {
    "noise_ratio", "noise_peak", "noise_diff", "unequal_share", "near_ties", "top1_agreement",
    "batch_invariance", "batch_invariance_ratio",
}  # fmt: skip
"""Checks with large numbers if the two sides choose differently. Probes have such numbers, too."""


def mark_left_to_rounding(evidence: Evidence, checks: Sequence[CheckResult]) -> list[CheckResult]:
    """Turn each FAIL of a runtime that compares choices into an ERROR if rounding changes the
    choices of the model and an output is `not_measurable`."""
    changes = evidence.validity is not None and evidence.validity.own_choices
    hidden = any(c.name == "not_measurable" and c.verdict is Verdict.ERROR for c in checks)
    return [_undetermined(check) if changes and hidden else check for check in checks]


def _undetermined(check: CheckResult) -> CheckResult:
    of_probe = check.name.startswith("probe_") and check.observed is not None
    if check.verdict is not Verdict.FAIL or not (of_probe or check.name in _OF_CHOICES):
        return check
    return check.with_code("left_to_rounding", Verdict.ERROR)


_DIGITS = 8.0
"""Largest floor, in roundings of the largest value, that is due to the float format itself."""


def floor_share(output: OutputParity) -> float:
    """Return the noise floor in units of the spread of the output (its standard deviation, for a
    constant its magnitude). 0 if the floor is a few roundings of the largest value, or unknown."""
    noise = output.noise
    if noise is None or not math.isfinite(noise.floor_rms):
        return 0.0
    spread = output.reference_std or output.reference_abs_max
    if not spread > 0.0 or noise.floor_rms <= _DIGITS * EPSILON * output.reference_abs_max:
        return 0.0
    return noise.floor_rms / spread


def _is_measurable(evidence: Evidence, output: OutputParity) -> bool:
    names = [spec.name for spec in evidence.subject.outputs]
    if evidence.validity is None or output.name not in names:
        return True
    return evidence.validity.is_measurable(names.index(output.name))


def _widened(bound: float | None, elements: int) -> float | None:
    """Return the bound for a ratio of older records, which was not divided by its scatter: 2 allows
    2.02 on 32 000 elements, 2.2 on 320, 3.4 on 8."""
    return bound if bound is None or not elements else bound * (1.0 + 2.0 / math.sqrt(elements))


def _noise_ratio(measured: NoiseParity) -> float:
    """Return the recorded ratio, or the ratio of the recorded errors if it is larger: if they
    contradict each other, the worse one counts."""
    if not (math.isfinite(measured.ratio) and measured.ratio >= 0.0):
        return measured.ratio
    floor = measured.floor_rms
    if not (math.isfinite(floor) and math.isfinite(measured.candidate_rms)):
        return math.nan
    scatter = 1.0 if measured.scatter is None else measured.scatter
    if not (math.isfinite(scatter) and scatter >= 1.0):
        return math.nan
    return max(measured.ratio, measured.candidate_rms / floor / scatter * (1.0 - _ROUNDING))


def _noise_peak(output: OutputParity) -> float:
    """Return the recorded peak. For a constant, twice its error in units of the floor: this is one
    error, not the largest of many, so no scatter excuses it."""
    measured = output.noise
    assert measured is not None
    constant = output.reference_constant and output.samples > 1
    if not constant or not measured.floor_peak or math.isnan(measured.peak):
        return measured.peak
    return max(2.0 * output.max_abs_diff / measured.floor_peak, measured.peak)


def _problem(policy: Policy, evidence: Evidence, output: OutputParity) -> Problem | None:
    """Return why the noise floor is not measured on all samples that the policy requires."""
    measured = output.noise
    if not _is_measurable(evidence, output):
        return {"code": "no_function"}
    reason = (evidence.noise_unmeasured or "no reason is recorded").rstrip(".")
    required = min(policy.instruments.noise_samples, evidence.dataset.samples)
    if measured is None:
        return {"code": "noise_unmeasured", "reason": reason}
    if not _has_values(measured):
        return {"code": "nothing_compared"}
    if measured.samples < required:
        count = measured.samples
        return {"code": "few_in_float64", "count": count, "required": required, "reason": reason}
    return None


def _has_values(measured: NoiseParity | None) -> bool:
    return measured is not None and measured.samples > 0 and measured.elements > 0


# Only counts that are consistent with each other and with the samples are judged.


def check_crossings(
    policy: Policy, bounds: Bounds, runtime: RuntimeEvidence, output: OutputParity
) -> Iterator[CheckResult]:
    """Yield the share of crossing samples and its upper bound at each point of the output.

    A point of a class that no output has is an ERROR on each output.
    """
    classes = class_metrics_for(policy, output)
    if classes is None or infer_role(policy, output):
        return
    judged = (class_metrics_for(policy, o) for o in runtime.outputs if not infer_role(policy, o))
    largest = max(each.classes for each in judged if each is not None)
    for point in policy.points:
        label = point.label
        if label is not None and classes.classes <= label < largest:
            continue  # the point belongs to another output
        crossing = _crossing(policy, output, classes, point)
        samples = share = upper = None
        if isinstance(crossing, Crossing):
            samples, share = crossing.samples, crossing.crossed / crossing.samples
            upper = crossing_upper_bound(crossing.crossed, samples, confidence=policy.confidence)
            params = crossing.model_dump(include=_CROSSING)
        else:
            params = {"problems": [crossing]}
        for metric in (
            BoundedMetric("threshold_crossing", share, "<=", bounds.threshold_crossing),
            BoundedMetric("threshold_crossing_bound", upper, "<=", bounds.threshold_crossing_bound),
        ):
            if metric.bound is not None:
                yield check_metric(metric, samples=samples, point=str(point), params=params)


_CROSSING = {"crossed", "crossing", "reference_above", "candidate_above"}
"""Parameters of the text about an operating point."""


def crossing_upper_bound(crossed: int, samples: int, *, confidence: float) -> float:
    """Return the one-sided Clopper-Pearson upper bound of the share that crosses, in [0, 1]; 1.0 if
    all cross, and without samples."""
    from gate.metrics.intervals import share_limits

    return share_limits(crossed, samples, confidence)[1]


def _crossing(
    policy: Policy, output: OutputParity, classes: ClassParity, point: OperatingPoint
) -> Crossing | Problem:
    """Return the record of a point, or why it can't be judged."""
    if point.label is not None and point.label >= classes.classes:
        return {"code": "no_class", "label": point.label, "classes": classes.classes}
    records = [c for c in classes.crossings if (c.threshold, c.label) == tuple(point)]
    if len(records) != 1:
        return {"code": "records", "count": len(records)}
    if classes.normalised != (policy.role_for(output.name) == "probabilities"):
        return {"code": "without_softmax" if classes.normalised else "with_softmax"}
    (crossing,) = records
    n, crossed, listed = crossing.samples, crossing.crossed, crossing.crossing
    above = (crossing.reference_above, crossing.candidate_above)
    most = output.samples - classes.nan_rows
    least = most - classes.top1_ties if crossing.label is None else 0
    is_consistent = (
        least <= n <= most
        and max(crossed, *above) <= n
        and max(above) - min(above) <= crossed
        and len(listed) == len(set(listed)) == min(crossed, LISTED)
    )
    if not is_consistent:
        counts = crossing.model_dump(include=_CROSSING)
        return {"code": "contradiction", "count": n, "most": most, **counts}
    return crossing if n else {"code": "no_sample"}
