"""Checks with a number: a metric against its bound. Only finite numbers within it pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from gate.decision.checks import CheckResult, Verdict
from gate.decision.remedies import REMEDIES
from gate.policy.policy import Bounds, Policy
from gate.policy.roles import classes_of, is_unsure, most_ties
from gate.records.evidence import RuntimeEvidence
from gate.records.output_parity import ClassParity, OutputParity

_AGREEMENTS = ("top1_agreement", "top1_lower_bound", "top5_agreement")


class BoundedMetric(NamedTuple):
    """A measured number against its bound; None: not measured, not bounded.

    `<=` is for differences, `>=` for shares; numbers that no measurement can give
    (a negative difference, a share above 1) do not hold either.
    """

    name: str
    observed: float | None
    relation: Literal["<=", ">="]
    bound: float | None
    least: float = 0.0
    """The smallest value that the difference can have."""

    def holds(self) -> bool:
        """True only for finite numbers within the bound."""
        if self.observed is None or self.bound is None or not math.isfinite(self.observed):
            return False
        if self.relation == "<=":
            return self.least <= self.observed <= self.bound
        return self.bound <= self.observed <= 1.0


def numeric(bounds: Bounds, output: OutputParity) -> list[BoundedMetric]:
    """The metrics that every output has."""
    return [
        BoundedMetric("max_abs_diff", output.max_abs_diff, "<=", bounds.max_abs_diff),
        BoundedMetric("mean_abs_diff", output.mean_abs_diff, "<=", bounds.mean_abs_diff),
        BoundedMetric("scaled_diff", _scaled_diff(output), "<=", bounds.scaled_diff),
        BoundedMetric("l2_logits", output.l2_max, "<=", bounds.l2_logits),
    ]


def _scaled_diff(output: OutputParity) -> float:
    """As recorded; of a constant, which has no spread, relative to its size."""
    scalar = output.reference_constant and output.reference_std == 0.0
    if not (scalar and output.dtype.startswith("float") and output.reference_abs_max > 0.0):
        return output.scaled_diff
    return output.max_abs_diff / output.reference_abs_max


def classification(
    policy: Policy, bounds: Bounds, output: OutputParity, logits: ClassParity
) -> list[BoundedMetric]:
    """The metrics of logits, over the samples that have an answer."""
    n = max(output.samples - logits.nan_rows - logits.top1_ties, 0)
    lower = top1_lower_bound(logits.top1_disagreements, n, confidence=policy.confidence)
    # A count and a share that contradict each other must not pass by the better of the two.
    agreement = min(logits.top1_agreement, 1.0 - logits.top1_disagreements / n if n else 0.0)
    if not math.isfinite(logits.top1_agreement):
        agreement = lower = math.nan
    confidence = logits.confidence
    drop = logits.accuracy.drop if logits.accuracy else None
    comparisons = [
        BoundedMetric("top1_agreement", agreement, ">=", bounds.top1_agreement),
        BoundedMetric("top1_lower_bound", lower, ">=", bounds.top1_lower_bound),
        BoundedMetric("top5_agreement", logits.top5_agreement, ">=", bounds.top5_agreement),
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
    return comparisons


def near_ties(
    policy: Policy, runtime: RuntimeEvidence, output: OutputParity
) -> Iterator[CheckResult]:
    """What differs by rounding alone and is excused, as long as it is rare."""
    logits = classes_of(policy, output)
    for what, count, total in (
        ("integers", output.near_ties, output.elements),
        ("answers", logits.top1_ties if logits else 0, output.samples),
    ):
        if count:
            most = most_ties(total)
            yield CheckResult(
                name="near_ties",
                runtime=runtime.runtime,
                output=output.name,
                observed=float(count),
                bound=float(most),
                relation="<=",
                samples=output.samples,
                verdict=Verdict.PASS if count <= most else Verdict.FAIL,
                explanation=f"{count} of {total} {what} differ where rounding alone decides "
                f"between equals: the float64 truth or PyTorch under random rounding says what the "
                f"runtime says. They are in no other number; allowed <= {most}.",
                remedy=REMEDIES["near_ties"],
            )


def judged(policy: Policy, result: CheckResult, output: OutputParity) -> CheckResult:
    """The check, or an ERROR with the reason where its FAIL says nothing about the file."""
    return too_few(policy, unsure(result, output), output)


def too_few(policy: Policy, result: CheckResult, output: OutputParity) -> CheckResult:
    """Where no answer differs, a lower bound that is too low speaks of the number of samples only:
    that can't be judged, and more of the same samples would pass."""
    logits = output.classification
    lower = result.observed
    if logits is None or result.verdict is not Verdict.FAIL or result.name != "top1_lower_bound":
        return result
    same = logits.top1_disagreements == 0 and logits.top1_agreement == 1.0
    if not (same and isinstance(lower, float) and lower > 0.0 and isinstance(result.bound, float)):
        return result
    wanted = samples_for(result.bound, confidence=policy.confidence)
    needed = (
        "no number of samples proves that: choose a bound below 1"
        if wanted is None
        else f"{wanted} samples without a disagreement are needed at {policy.confidence:.4g} "
        "confidence"
    )
    return result.model_copy(
        update={
            "verdict": Verdict.ERROR,
            "explanation": f"{result.explanation} No answer differs, the samples are too few to "
            f"prove it: {needed}.",
        }
    )


def unsure(result: CheckResult, output: OutputParity) -> CheckResult:
    """A disagreement is no verdict on the file where PyTorch's own rounding changes answers as
    often: what can't be judged is an ERROR, with that reason."""
    logits = output.classification
    if logits is None or result.verdict is not Verdict.FAIL or result.name not in _AGREEMENTS:
        return result
    if not is_unsure(logits):
        return result
    return result.model_copy(
        update={
            "verdict": Verdict.ERROR,
            "explanation": f"{result.explanation} That can't be judged: PyTorch's own float32 "
            f"answers differ from its float64 answers on {logits.unsure} of "
            f"{logits.unsure + logits.sure} samples, so "
            "the model itself has no decided answer there.",
            "remedy": REMEDIES["unsure"],
        }
    )


def check(comparison: BoundedMetric, runtime: RuntimeEvidence, output: OutputParity) -> CheckResult:
    """The check of one comparison: ERROR if it was not measured, FAIL if it does not hold."""
    name, observed, relation, bound, _ = comparison
    if observed is None:
        verdict, outcome = Verdict.ERROR, "was not measured"
    else:
        passed = comparison.holds() and output.samples > 0
        verdict = Verdict.PASS if passed else Verdict.FAIL
        outcome = f"is {observed:.6g}"
    return CheckResult(
        name=name,
        runtime=runtime.runtime,
        output=output.name,
        observed=observed,
        bound=bound,
        relation=relation,
        samples=output.samples,
        verdict=verdict,
        explanation=f"{name} {outcome}, allowed {relation} {bound:.6g} (n = {output.samples}).",
        remedy=REMEDIES[name],
    )


def top1_lower_bound(disagreements: int, samples: int, *, confidence: float) -> float:
    """One-sided Clopper-Pearson lower bound of the agreement, in [0, 1].

    The exact binomial bound (Clopper and Pearson, Biometrika 26, 1934): the
    `1 - confidence` quantile of Beta(agreements, disagreements + 1); 0.0 without agreements.
    """
    agreements = samples - disagreements
    if agreements <= 0:
        return 0.0
    from scipy.special import betaincinv

    return float(betaincinv(agreements, disagreements + 1, 1.0 - confidence))


def samples_for(bound: float, *, confidence: float) -> int | None:
    """The fewest samples whose lower bound, without a disagreement, reaches `bound`; None: none do.

    Without disagreements the bound is `(1 - confidence) ** (1 / samples)`.
    """
    if not 0.0 < bound < 1.0:
        return None if bound >= 1.0 else 1
    samples = max(math.ceil(math.log1p(-confidence) / math.log(bound)), 1)
    while top1_lower_bound(0, samples, confidence=confidence) < bound:  # rounding at the edge
        samples += 1
    while samples > 1 and top1_lower_bound(0, samples - 1, confidence=confidence) >= bound:
        samples -= 1
    return samples
