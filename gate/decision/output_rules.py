"""Is each output present, finite, varying and consistent with its role?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from gate.decision.bound_rules import BoundedMetric, classification, numeric
from gate.decision.catalog import REMEDIES
from gate.decision.check_result import CheckResult, Verdict
from gate.decision.evidence_rules import check_statement
from gate.policy.output_roles import (
    class_metrics_for,
    infer_role,
    proven_constant,
    unclaimed,
    unmeasurable,
)
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, Role
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.outputs import ClassParity, OutputParity
from gate.storage.record import Record


def measured(policy: Policy, evidence: Evidence, runtime: RuntimeEvidence) -> CheckResult:
    """Every output of the file, measured on every sample; logits where the policy asks."""
    want = [spec.name for spec in evidence.subject.outputs]
    got = [output.name for output in runtime.outputs]
    problems = []
    if got != want:
        problems.append(f"outputs {got} were measured, the file has {want}")
    n = evidence.dataset.samples
    problems += [
        f"'{output.name}' was measured on {output.samples} samples, the data set has {n}"
        for output in runtime.outputs
        if output.samples != n
    ]
    logits = {o.name for o in runtime.outputs if class_metrics_for(policy, o) is not None}
    lacking = sorted(set(policy.logits) - logits) if policy.task != "tensors" else []
    if lacking or (policy.task == "classification" and not logits):
        problems.append(
            f"no output of shape (batch, classes) for the logits {lacking or 'that are judged'}"
        )
    check = check_statement(
        "outputs",
        problems=problems,
        place=(runtime.runtime, None),
        fine="Every output of the file was measured on every sample.",
        verdict=Verdict.ERROR,
    )
    return check if logits else _with_remedy_of_quantized(check, policy)


def _with_remedy_of_quantized(check: CheckResult, policy: Policy) -> CheckResult:
    """The check with the remedy for a quantized file that is no classifier, under a policy that
    is for classifiers, as the built-in one."""
    if policy.precision != "quantized" or policy.task != "classification":
        return check
    return check.model_copy(update={"remedy": REMEDIES["quantized_classifier"]})


def lacks_numbers(
    policy: Policy,
    evidence: Evidence,
    place: tuple[RuntimeEvidence, OutputParity],
    name: Literal["empty", "nonfinite"],
) -> CheckResult:
    """Return the only statement on an output of which nothing can be compared: an ERROR, or WAIVED
    where the policy says so."""
    runtime, output = place
    waived = policy.waives(name, output.name) and not output.max_abs_diff > 0.0
    n = evidence.dataset.samples
    problem, wanted = {
        "empty": (f"no element in any of {n} samples", "at least one element"),
        "nonfinite": (f"no finite element in any of {n} samples", "finite values"),
    }[name]
    return CheckResult(
        name=name,
        runtime=runtime.runtime,
        output=output.name,
        samples=n,
        verdict=Verdict.WAIVED if waived else Verdict.ERROR,
        explanation=f"'{output.name}' has {problem}, so no number of it was compared. Add samples "
        f"for which the model returns {wanted} in '{output.name}'"
        + ("; the policy waives that." if waived else "."),
        remedy=REMEDIES[name],
    )


def varies(evidence: Evidence, runtime: RuntimeEvidence) -> Iterator[CheckResult]:
    """An ERROR where every output is the same for all samples: that proves nothing of any input.
    Of one sample the probes decide, of what has no number `lacks_numbers` says it."""
    outputs = [output for output in runtime.outputs if unmeasurable(output) is None]
    constant = bool(outputs) and all(output.reference_constant for output in outputs)
    if constant and evidence.dataset.samples > 1:
        yield check_statement(
            "reference",
            problems=[
                "no output varies over the samples: the reference gives all of them the same"
            ],
            place=(runtime.runtime, None),
            fine="",
            verdict=Verdict.ERROR,
        )


def reference(policy: Policy, runtime: RuntimeEvidence, output: OutputParity) -> CheckResult:
    """A degenerate reference proves nothing; one constant among other outputs is proven by being
    equal, bit for bit, and else judged by its numbers."""
    problems = []
    proven = proven_constant(output)
    if not proven and not _has_scale(output):
        problems.append(f"the reference's largest absolute value is {output.reference_abs_max}")
    classes = class_metrics_for(policy, output)
    if classes is not None and classes.predicted_classes < 2:
        problems.append(
            "the reference predicts one class for every sample, so agreement on it proves nothing; "
            "give samples of several classes, or say what the output is: outputs: "
            f"{{{output.name}: tensor}} in the policy, or --role {output.name}=tensor"
        )
    fine = "The reference is finite and varies over the samples."
    if output.reference_constant:
        fine = "Constant, equal bit for bit." if proven else "Constant; the numbers decide."
    result = check_statement(
        "reference",
        problems=problems,
        place=(runtime.runtime, output.name),
        fine=fine,
        verdict=Verdict.ERROR,
    )
    if proven and not problems:
        result = result.model_copy(update={"observed": "constant, equal bit for bit"})
    return result


def _has_scale(output: OutputParity) -> bool:
    """Finite, and not zero unless it is constant."""
    largest = output.reference_abs_max
    return math.isfinite(largest) and (largest > 0.0 or output.reference_constant)


def finite(policy: Policy, runtime: RuntimeEvidence, output: OutputParity) -> CheckResult:
    """No NaN, and no infinity on one side only; no number of the record is NaN, bounded or not."""
    problems = []
    if output.nonfinite_mismatched:
        problems.append(
            f"{output.nonfinite_mismatched} elements are NaN or infinite on one side only"
        )
    rows = output.classification.nan_rows if output.classification else 0
    same = max(output.nonfinite_same, rows)
    lacking = unmeasurable(output)
    if same and policy.nonfinite != "same_places" and lacking is None:
        problems.append(
            f"{same} elements are NaN on both sides, which proves nothing unless "
            "the policy says nonfinite: same_places"
        )
    unknown = list(_nans(_judged(policy, output))) if lacking is None else []
    if unknown:
        problems.append(
            f"the measured {', '.join(unknown[:3])} {'is' if len(unknown) == 1 else 'are'} NaN"
        )
    return check_statement(
        "finite",
        problems=problems,
        place=(runtime.runtime, output.name),
        fine=f"NaN in the same {same} places on both sides."
        if same
        else "No NaN, and no infinity on one side only.",
    )


def unbounded(policy: Policy, runtime: RuntimeEvidence, output: OutputParity) -> CheckResult:
    """The only comparison of an output to which no bound of the policy applies."""
    if not policy.judges(output.name):
        return CheckResult(
            name="bounds",
            runtime=runtime.runtime,
            output=output.name,
            observed="judged in the chain",
            verdict=Verdict.PASS,
            explanation="Eight bits at a seam are no answers: what this part rounds is judged in "
            "the chain. Name the output in the policy (outputs) to bound it here, too.",
        )
    check = check_statement(
        "bounds",
        problems=["no bound of the policy applies to this output, so anything in it would pass"],
        place=(runtime.runtime, output.name),
        fine="",
        verdict=Verdict.ERROR,
    )
    return _with_remedy_of_quantized(check, policy)


def _judged(policy: Policy, output: OutputParity) -> OutputParity:
    """The record without the numbers that nothing is judged by."""
    # What is NaN in single samples is NaN in the sums over all of them.
    unused: dict[str, object] = {"worst": ()}
    if class_metrics_for(policy, output) is None or infer_role(policy, output):
        unused["classification"] = None
    if policy.role_for(output.name) not in ("embedding", "probabilities"):
        unused["rows"] = None
    return output.model_copy(update=unused)


def _nans(value: object, place: str = "") -> Iterator[str]:
    """The dotted places of NaN in a record."""
    if isinstance(value, float) and math.isnan(value):
        yield place
    elif isinstance(value, Record):
        for name, item in value:
            yield from _nans(item, f"{place}.{name}" if place else name)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _nans(item, f"{place}.{index}")


# A role that the policy states and that contradicts the output is an ERROR that names the ways out.


_COSINE, _ROW_SUM, _UNEQUAL = 1e-4, 1e-3, 0.0
"""Bounds of a role's own check where the policy sets none."""

_SUM_ERROR = 0.05
"""From here on, rows of the reference do not sum to 1."""


def named(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """An ERROR for roles of outputs that the file does not have."""
    names = [spec.name for spec in evidence.subject.outputs]
    waived = policy.waive if isinstance(policy.waive, dict) else {}
    lacking = sorted({*policy.outputs, *waived} - set(names))
    if lacking:
        yield CheckResult(
            name="role",
            verdict=Verdict.ERROR,
            explanation=f"the policy names the output {', '.join(map(repr, lacking))}, and the "
            f"file has the outputs {names}. Name outputs of the file.",
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
    """The numbers by which the output is judged."""
    stated = policy.role_for(output.name)
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
    classes = class_metrics_for(policy, output)
    if classes is not None:
        compared += _of_classes(policy, bounds, output, classes)
    return compared


def judges_noise(policy: Policy, output: OutputParity) -> bool:
    """False where equality is demanded."""
    return policy.role_for(output.name) not in ("mask", "indices")


def _of_classes(
    policy: Policy, bounds: Bounds, output: OutputParity, classes: ClassParity
) -> list[BoundedMetric]:
    compared = classification(policy, bounds, output, classes)
    if infer_role(policy, output):
        return [metric for metric in compared if metric.name == "top1_agreement"]
    if policy.role_for(output.name) != "probabilities":
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
    share = output.unequal / output.elements
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
