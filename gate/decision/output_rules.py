"""Is each output present, finite, varying and consistent with its role?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from gate.decision.bound_rules import BoundedMetric, class_metrics, numeric_metrics
from gate.decision.check_result import CheckResult, Problem, Verdict, check_result, statement
from gate.policy.output_roles import (
    class_metrics_for,
    infer_role,
    proven_constant,
    unmeasurable,
    unprovable_reason,
)
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, Role
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.outputs import ClassParity, OutputParity
from gate.storage.record import Record


def check_measured(policy: Policy, evidence: Evidence, runtime: RuntimeEvidence) -> CheckResult:
    """Check that every output is measured on every sample; logits if the policy requires it."""
    expected = [spec.name for spec in evidence.subject.outputs]
    actual = [output.name for output in runtime.outputs]
    problems: list[Problem] = []
    if actual != expected:
        problems.append({"code": "other_outputs", "measured": actual, "outputs": expected})
    n = evidence.dataset.samples
    problems += [
        {"code": "other_samples", "output": output.name, "count": output.samples, "samples": n}
        for output in runtime.outputs
        if output.samples != n
    ]
    bounds = policy.runtimes[runtime.runtime].bounds
    if runtime.has_other_lengths and not (policy.is_bounded_by_metrics and bounds.empty):
        problems.append({"code": "other_lengths"})
    logits = {o.name for o in runtime.outputs if class_metrics_for(policy, o) is not None}
    lacking = sorted(set(policy.logits) - logits) if policy.task != "tensors" else []
    if lacking:
        problems.append({"code": "no_logits", "names": lacking})
    elif policy.task == "classification" and not logits:
        problems.append({"code": "no_classes"})
    check = statement("outputs", problems, verdict=Verdict.ERROR)
    for_quantized_classifiers = (policy.precision, policy.task) == ("quantized", "classification")
    if problems and not logits and for_quantized_classifiers:
        return check.with_code("violated_quantized")
    return check


def check_unmeasurable(
    policy: Policy, evidence: Evidence, output: OutputParity, name: Literal["empty", "nonfinite"]
) -> CheckResult:
    """Return the check of an output that can't be compared.

    It is an ERROR, or WAIVED if the policy allows it.
    """
    waived = policy.waives(name, output.name) and not output.max_abs_diff > 0.0
    verdict = Verdict.WAIVED if waived else Verdict.ERROR
    code = "no_numbers_waived" if waived else "no_numbers"
    check = check_result(name, code, verdict)
    return check.model_copy(update={"samples": evidence.dataset.samples})


def check_variation(evidence: Evidence, runtime: RuntimeEvidence) -> Iterator[CheckResult]:
    """Yield an ERROR where every output is the same for all samples, which proves nothing.

    A single sample is judged by the probes, and outputs without numbers by `check_unmeasurable`.
    """
    outputs = [output for output in runtime.outputs if unmeasurable(output) is None]
    constant = bool(outputs) and all(output.reference_constant for output in outputs)
    if constant and evidence.dataset.samples > 1:
        yield statement("reference", [{"code": "no_output_varies"}], verdict=Verdict.ERROR)


def check_reference(policy: Policy, output: OutputParity) -> CheckResult:
    """Check that the reference can prove something. A constant output is proven by equal bits;
    otherwise its numbers are judged."""
    problems: list[Problem] = []
    proven, largest = proven_constant(output), output.reference_abs_max
    has_scale = math.isfinite(largest) and (largest > 0.0 or output.reference_constant)
    if not proven and not has_scale:
        problems.append({"code": "no_scale", "largest": largest})
    classes = class_metrics_for(policy, output)
    if classes is not None and classes.predicted_classes < 2:
        problems.append({"code": "single_class", "output": output.name})
    holds = "holds"
    if output.reference_constant:
        holds = "proven_constant" if proven else "constant"
    return statement("reference", problems, holds=holds, verdict=Verdict.ERROR)


def check_finite(policy: Policy, output: OutputParity) -> CheckResult:
    """Check that there is no NaN, no infinity on one side only, and no NaN in the record."""
    problems: list[Problem] = []
    if output.nonfinite_mismatched:
        problems.append({"code": "one_side_only", "count": output.nonfinite_mismatched})
    rows = output.classification.nan_rows if output.classification else 0
    same = max(output.nonfinite_same, rows)
    lacking = unmeasurable(output)
    if same and policy.nonfinite != "same_places" and lacking is None:
        problems.append({"code": "nan_both", "count": same})
    unknown = list(_nan_paths(_without_unused_numbers(policy, output))) if lacking is None else []
    if unknown:
        problems.append({"code": "nan_statistics", "names": unknown[:3]})
    params: Problem = {"holds": "same_places", "count": same} if same else {}
    return statement("finite", problems, **params)


def check_unbounded(policy: Policy, runtime: RuntimeEvidence, output: OutputParity) -> CheckResult:
    """Return the only check of an output to which no bound of the policy applies."""
    names = [each.name for each in runtime.outputs]
    metrics = [each.name for each in policy.metrics if each.judges(output.name, of=names)]
    if not policy.judges(output.name):
        return check_result("bounds", "checked_in_chain", Verdict.PASS)
    if metrics and policy.is_bounded_by_metrics:
        return check_result("bounds", "checked_by_metric", Verdict.PASS, names=metrics)
    code = "no_bound_quantized" if policy.precision == "quantized" else "no_bound"
    return check_result("bounds", code, Verdict.ERROR)


def _without_unused_numbers(policy: Policy, output: OutputParity) -> OutputParity:
    """Return the record without the numbers that no check uses."""
    # NaN in single samples is also in the sums over all samples.
    unused: dict[str, object] = {"worst": ()}
    if class_metrics_for(policy, output) is None or infer_role(policy, output):
        unused["classification"] = None
    if policy.role_for(output.name) not in ("embedding", "probabilities"):
        unused["rows"] = None
    return output.model_copy(update=unused)


def _nan_paths(value: object, path: str = "") -> Iterator[str]:
    """Yield the dotted paths of NaN in a record."""
    if isinstance(value, float) and math.isnan(value):
        yield path
    elif isinstance(value, Record):
        for name, item in value:
            yield from _nan_paths(item, f"{path}.{name}" if path else name)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _nan_paths(item, f"{path}.{index}")


# A role in the policy that contradicts the output is an ERROR with a remedy.


_COSINE, _ROW_SUM, _UNEQUAL = 1e-4, 1e-3, 0.0
"""Default bounds of the checks of a role."""

_SUM_ERROR = 0.05
"""Largest error of the row sums of probabilities in the reference."""


def check_role_names(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """Yield an ERROR for roles of outputs that the file does not have."""
    names = [spec.name for spec in evidence.subject.outputs]
    waived = policy.waive if isinstance(policy.waive, dict) else {}
    lacking = sorted({*policy.outputs, *waived} - set(names))
    if lacking:
        yield check_result("role", "unknown_outputs", Verdict.ERROR, names=lacking, outputs=names)


def check_role(policy: Policy, output: OutputParity) -> Iterator[CheckResult]:
    """Check that the output can have the role that the policy states; state that no agreement is
    claimed where an inferred role would have to claim it."""
    stated = policy.outputs.get(output.name)
    if stated is not None:
        code = _contradiction(stated, output)
        verdict = Verdict.PASS if code is None else Verdict.ERROR
        error = output.rows.sum_error if output.rows else None
        params: Problem = {"role": stated, "dtype": output.dtype, "sum_error": error}
        check = check_result("role", code or "matches", verdict, **params)
        yield check.model_copy(update={"observed": stated})
    elif why := unprovable_reason(policy, output):
        yield check_result("agreement", "not_claimed", Verdict.PASS, reason=why)


def bounded_metrics(policy: Policy, bounds: Bounds, output: OutputParity) -> list[BoundedMetric]:
    """Return the numbers by which the output is judged."""
    stated, bound = policy.role_for(output.name), bounds.unequal_share
    if stated == "mask":
        return [BoundedMetric("mask_diff", output.max_abs_diff, "<=", 0.0)]
    unequal = BoundedMetric("unequal_share", _unequal_share(output), "<=", bound)
    if stated == "indices":
        return [unequal._replace(bound=_UNEQUAL) if bound is None else unequal]
    compared = numeric_metrics(bounds, output)
    if not output.dtype.startswith("float"):
        compared.append(unequal)
    if stated == "embedding":
        bound = bounds.cosine_distance if bounds.cosine_distance is not None else _COSINE
        distance = output.rows.cosine_distance if output.rows else None
        compared.append(BoundedMetric("cosine_distance", distance, "<=", bound))
    classes = class_metrics_for(policy, output)
    if classes is not None:
        compared += _class_metrics(policy, bounds, output, classes)
    return compared


def _class_metrics(
    policy: Policy, bounds: Bounds, output: OutputParity, classes: ClassParity
) -> list[BoundedMetric]:
    compared = class_metrics(policy, bounds, output, classes)
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
    """Return the code of why the output cannot have the role that the policy states."""
    if stated in ("logits", "probabilities") and output.classification is None:
        return "wrong_shape"
    if stated == "probabilities" and output.rows and not output.rows.sum_error <= _SUM_ERROR:
        return "wrong_sums"
    if stated in ("scores", "embedding") and not output.dtype.startswith("float"):
        return "not_float"
    if stated == "embedding" and output.rows is None:
        return "no_vectors"
    return "not_integer" if stated == "indices" and output.unequal is None else None
