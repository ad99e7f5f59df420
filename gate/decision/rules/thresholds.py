"""Checks at the operating points: on how many samples does somebody act by one side only?

Only counts that fit each other and the samples are judged: from any others nothing is concluded.
"""

from __future__ import annotations

from collections.abc import Iterator

from gate.decision.checks import CheckResult, Verdict
from gate.decision.remedies import REMEDIES
from gate.decision.rules.comparisons import BoundedMetric
from gate.policy.operating_points import OperatingPoint
from gate.policy.policy import Bounds, Policy
from gate.policy.roles import classes_of, guessed
from gate.records.evidence import RuntimeEvidence
from gate.records.output_parity import ClassParity, OutputParity
from gate.records.samples import LISTED, Crossing


def crossings(
    policy: Policy, bounds: Bounds, runtime: RuntimeEvidence, output: OutputParity
) -> Iterator[CheckResult]:
    """The share of crossing samples and its upper bound, at each point that the output has.

    A point of a class that no output has is judged on each, and so is an ERROR.
    """
    classes = classes_of(policy, output)
    if classes is None or guessed(policy, output):
        return
    largest = max(_judged_classes(policy, runtime))
    for point in policy.points:
        label = point.label
        if label is not None and classes.classes <= label < largest:
            continue  # it is another output's
        problem, crossing = _crossing(policy, output, classes, point)
        share = upper = None
        if crossing is not None:
            share = crossing.crossed / crossing.samples
            upper = crossing_upper_bound(
                crossing.crossed, crossing.samples, confidence=policy.confidence
            )
        for metric in (
            BoundedMetric("threshold_crossing", share, "<=", bounds.threshold_crossing),
            BoundedMetric("threshold_crossing_bound", upper, "<=", bounds.threshold_crossing_bound),
        ):
            if metric.bound is not None:
                result = _check(metric, point, crossing, problem)
                yield result.model_copy(
                    update={"runtime": runtime.runtime, "output": output.name, "point": str(point)}
                )


def crossing_upper_bound(crossed: int, samples: int, *, confidence: float) -> float:
    """One-sided Clopper-Pearson upper bound of the share that crosses, in [0, 1].

    The `confidence` quantile of Beta(crossed + 1, samples - crossed); 1.0 where all cross, and
    without samples.
    """
    if crossed >= samples:
        return 1.0
    from scipy.special import betaincinv

    return float(betaincinv(crossed + 1, samples - crossed, confidence))


def _judged_classes(policy: Policy, runtime: RuntimeEvidence) -> Iterator[int]:
    """Numbers of classes of the outputs that operating points are for."""
    for output in runtime.outputs:
        classes = classes_of(policy, output)
        if classes is not None and not guessed(policy, output):
            yield classes.classes


def _crossing(
    policy: Policy, output: OutputParity, classes: ClassParity, point: OperatingPoint
) -> tuple[str, Crossing | None]:
    """The record of a point; or why it can't be judged."""
    if point.label is not None and point.label >= classes.classes:
        return f"no output has a class {point.label}, this one has {classes.classes} classes", None
    found = [c for c in classes.crossings if (c.threshold, c.label) == tuple(point)]
    if len(found) != 1:
        return f"the evidence has {len(found) or 'no'} records of this point", None
    if classes.normalised != (policy.role_of(output.name) == "probabilities"):
        taken = "without" if classes.normalised else "with"
        return f"it was measured {taken} a softmax, as another role has it", None
    (crossing,) = found
    problem = _contradiction(crossing, output, classes)
    if problem is not None:
        return f"its counts contradict each other: {problem}", None
    if not crossing.samples:
        return "no sample was compared there", None
    return "", crossing


def _contradiction(crossing: Crossing, output: OutputParity, classes: ClassParity) -> str | None:
    """Which of the counts can't be true; None: all can."""
    n, crossed = crossing.samples, crossing.crossed
    most = output.samples - classes.nan_rows
    least = most - classes.top1_ties if crossing.label is None else 0
    if not least <= n <= most:
        return f"{n} samples were compared, of {most} with an answer"
    above = (crossing.reference_above, crossing.candidate_above)
    if max(crossed, *above) > n:
        return f"{crossed} of {n} cross, {above[0]} and {above[1]} are above"
    if abs(above[0] - above[1]) > crossed:
        return f"{above[0]} and {above[1]} are above, and only {crossed} cross"
    listed = crossing.crossing
    if len(listed) != min(crossed, LISTED) or len(set(listed)) != len(listed):
        return f"{crossed} cross, and {len(set(listed))} are listed"
    return None


def _check(
    metric: BoundedMetric, point: OperatingPoint, crossing: Crossing | None, problem: str
) -> CheckResult:
    name, observed, relation, bound, _ = metric
    if crossing is None:
        verdict, explanation = Verdict.ERROR, f"{name} at {point} can't be judged: {problem}."
    else:
        verdict = Verdict.PASS if metric.holds() else Verdict.FAIL
        samples = ", ".join(map(str, crossing.crossing[:5]))
        which = f", samples {samples}{', ...' if crossing.crossed > 5 else ''}" if samples else ""
        explanation = (
            f"{name} at {point} is {observed:.6g}, allowed {relation} {bound:.6g}: "
            f"{crossing.crossed} of {crossing.samples} samples are at or above it on one side "
            f"only, or with another class{which}; the model is above it on "
            f"{crossing.reference_above}, the file on {crossing.candidate_above}."
        )
    return CheckResult(
        name=name,
        observed=observed,
        bound=bound,
        relation=relation,
        samples=None if crossing is None else crossing.samples,
        verdict=verdict,
        explanation=explanation,
        remedy=REMEDIES[name if crossing is not None else "threshold_unmeasured"],
    )
