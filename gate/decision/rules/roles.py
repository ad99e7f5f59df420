"""Checks by the role of an output: docs/roles.md has them in one table.

A role that the policy states and that contradicts the output is an ERROR that names the ways out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gate.decision.checks import CheckResult, Verdict
from gate.decision.remedies import REMEDIES
from gate.decision.rules.comparisons import BoundedMetric, classification, numeric
from gate.policy.policy import Bounds, Policy, Role
from gate.policy.roles import all_nonfinite, classes_of, guessed, unclaimed
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.output_parity import ClassParity, OutputParity

_COSINE, _ROW_SUM, _UNEQUAL = 1e-4, 1e-3, 0.0
"""Bounds of a role's own check where the policy sets none."""
_SUM_ERROR = 0.05
"""From here on, rows of the reference do not sum to 1."""


def named(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """An ERROR for roles of outputs that the file does not have."""
    names = [spec.name for spec in evidence.subject.outputs]
    lacking = sorted(set(policy.outputs) - set(names))
    if lacking:
        yield CheckResult(
            name="role",
            verdict=Verdict.ERROR,
            explanation=f"the policy says what {', '.join(map(repr, lacking))} is, and the file "
            f"has the outputs {names}. Name outputs of the file.",
            remedy=REMEDIES["role"],
        )


def role(policy: Policy, runtime: RuntimeEvidence, output: OutputParity) -> Iterator[CheckResult]:
    """Whether the output can be what the policy says; that no agreement is claimed, where a guess
    would have to."""
    stated = policy.outputs.get(output.name)
    if stated is not None:
        problem = _contradiction(stated, output)
        yield CheckResult(
            name="role",
            runtime=runtime.runtime,
            output=output.name,
            observed=stated,
            verdict=Verdict.ERROR if problem else Verdict.PASS,
            explanation=problem or f"It can be what the policy says: {stated}.",
            remedy=REMEDIES["role"],
        )
    elif why := unclaimed(policy, output):
        yield CheckResult(
            name="agreement",
            runtime=runtime.runtime,
            output=output.name,
            observed="not claimed",
            verdict=Verdict.PASS,
            explanation=f"no agreement is claimed: {why}; the numbers decide. "
            f"Say --role {output.name}=logits if it is a classifier.",
            remedy=REMEDIES["agreement"],
        )


def comparisons(policy: Policy, bounds: Bounds, output: OutputParity) -> list[BoundedMetric]:
    """The numbers by which the output is judged; none for one that is all NaN and infinite, and
    constant, and proven equal."""
    if all_nonfinite(output):
        return []
    stated = policy.role_of(output.name)
    if stated == "mask":
        return [BoundedMetric("mask_diff", output.max_abs_diff, "<=", 0.0)]
    if stated == "indices":
        bound = bounds.unequal_share if bounds.unequal_share is not None else _UNEQUAL
        return [BoundedMetric("unequal_share", _unequal_share(output), "<=", bound)]
    compared = numeric(bounds, output)
    if not output.dtype.startswith("float") and bounds.unequal_share is not None:
        share = BoundedMetric("unequal_share", _unequal_share(output), "<=", bounds.unequal_share)
        compared.append(share)
    if stated == "embedding":
        bound = bounds.cosine_distance if bounds.cosine_distance is not None else _COSINE
        distance = output.rows.cosine_distance if output.rows else None
        compared.append(BoundedMetric("cosine_distance", distance, "<=", bound))
    classes = classes_of(policy, output)
    if classes is not None:
        compared += _of_classes(policy, bounds, output, classes)
    return compared


def judges_noise(policy: Policy, output: OutputParity) -> bool:
    """False where equality is demanded, or proven where there is no number."""
    return policy.role_of(output.name) not in ("mask", "indices") and not all_nonfinite(output)


def _of_classes(
    policy: Policy, bounds: Bounds, output: OutputParity, classes: ClassParity
) -> list[BoundedMetric]:
    compared = classification(policy, bounds, output, classes)
    if guessed(policy, output):
        return [metric for metric in compared if metric.name == "top1_agreement"]
    if policy.role_of(output.name) != "probabilities":
        return compared
    rows = output.rows
    as_they_are = {
        "l2_probabilities": output.l2_max,
        "confidence_diff": rows.confidence_diff if rows else None,
        "confidence_over_1_percent": sum(rows.bands[1:]) if rows else None,
        "confidence_over_5_percent": sum(rows.bands[2:]) if rows else None,
        "confidence_over_10_percent": rows.bands[3] if rows else None,
    }
    compared = [
        metric._replace(observed=as_they_are.get(metric.name, metric.observed))
        for metric in compared
    ]
    bound = bounds.row_sum_diff if bounds.row_sum_diff is not None else _ROW_SUM
    return [*compared, BoundedMetric("row_sum_diff", rows.sum_diff if rows else None, "<=", bound)]


def _unequal_share(output: OutputParity) -> float | None:
    if output.unequal is None:
        return None
    share = output.unequal / output.elements if output.elements else math.nan
    # A count and a difference that contradict each other must not pass by the better of the two.
    return share if output.unequal or output.max_abs_diff == 0.0 else math.nan


def _contradiction(stated: Role, output: OutputParity) -> str | None:
    """Why the output can't be what the policy says, with the ways out."""
    floats = output.dtype.startswith("float")
    if stated in ("logits", "probabilities") and output.classification is None:
        return (
            f"its role is '{stated}', which is for floats of shape (batch, classes >= 2), and "
            f"this {output.dtype} output has another shape or dtype. Say indices for classes that "
            "the model has chosen, scores for independent numbers, tensor for anything else."
        )
    if stated == "probabilities" and output.rows and not output.rows.sum_error <= _SUM_ERROR:
        return (
            "its role is 'probabilities', and the reference's rows do not sum to 1 (off by up to "
            f"{output.rows.sum_error:.3g}). Say logits if a softmax follows, scores if each column "
            "stands for itself."
        )
    if stated in ("scores", "embedding") and not floats:
        return (
            f"its role is '{stated}', which is for floats, and it is {output.dtype}. Say indices, "
            "mask or tensor."
        )
    if stated == "embedding" and output.rows is None:
        return (
            "its role is 'embedding', and no vectors of 2 to 65 536 numbers a sample were "
            "measured. Say tensor, or measure again."
        )
    if stated == "indices" and output.unequal is None:
        return (
            f"its role is 'indices', which is for integers, and it is {output.dtype}. Say scores "
            "or tensor."
        )
    return None
