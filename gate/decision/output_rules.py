"""Checks without a number on outputs: all are there, and each can be compared."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gate.decision.checks import CheckResult, Verdict
from gate.decision.rules.statements import statement
from gate.policy.policy import Policy
from gate.policy.roles import all_nonfinite, classes_of, guessed, proven_constant
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.output_parity import OutputParity
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
    problems += [
        f"'{output.name}' is empty for every sample, so nothing of it was compared; give samples "
        "for which it is not, or leave it out of the export"
        for output in runtime.outputs
        if output.elements == 0
    ]
    logits = {o.name for o in runtime.outputs if classes_of(policy, o) is not None}
    lacking = sorted(set(policy.logits) - logits) if policy.task != "tensors" else []
    if lacking or (policy.task == "classification" and not logits):
        problems.append(
            f"no output of shape (batch, classes) for the logits {lacking or 'that are judged'}"
        )
    return statement(
        "outputs",
        problems=problems,
        place=(runtime.runtime, None),
        fine="Every output of the file was measured on every sample.",
        verdict=Verdict.ERROR,
    )


def varies(runtime: RuntimeEvidence) -> Iterator[CheckResult]:
    """An ERROR where every output is the same for all samples: that proves nothing of any input."""
    if all(output.reference_constant for output in runtime.outputs):
        yield statement(
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
    if not proven and output.nonfinite_reference >= output.elements:
        problems.append("the reference has no finite element")
    elif not proven and not _has_scale(output):
        problems.append(f"the reference's largest absolute value is {output.reference_abs_max}")
    classes = classes_of(policy, output)
    if classes is not None and classes.predicted_classes < 2:
        problems.append(
            "the reference predicts one class for every sample, so agreement on it proves nothing; "
            "give samples of several classes, or say what the output is: outputs: "
            f"{{{output.name}: tensor}} in the policy, or --role {output.name}=tensor"
        )
    fine = "The reference is finite and varies over the samples."
    if output.reference_constant:
        fine = "Constant, equal bit for bit." if proven else "Constant; the numbers decide."
    result = statement(
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
    if same and policy.nonfinite != "same_places":
        problems.append(
            f"{same} elements are NaN on both sides, which proves nothing unless "
            "the policy says nonfinite: same_places"
        )
    unknown = [] if all_nonfinite(output) else list(_nans(_judged(policy, output)))
    if unknown:
        problems.append(
            f"the measured {', '.join(unknown[:3])} {'is' if len(unknown) == 1 else 'are'} NaN"
        )
    return statement(
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
    return statement(
        "bounds",
        problems=["no bound of the policy applies to this output, so anything in it would pass"],
        place=(runtime.runtime, output.name),
        fine="",
        verdict=Verdict.ERROR,
    )


def _judged(policy: Policy, output: OutputParity) -> OutputParity:
    """The record without the numbers that nothing is judged by."""
    # What is NaN in single samples is NaN in the sums over all of them.
    unused: dict[str, object] = {"worst": ()}
    if classes_of(policy, output) is None or guessed(policy, output):
        unused["classification"] = None
    if policy.role_of(output.name) not in ("embedding", "probabilities"):
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
