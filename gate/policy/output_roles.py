"""The role of each output, stated in the policy or inferred."""

from __future__ import annotations

import math
from typing import Literal

from gate.policy.policy import Policy
from gate.records.outputs import ClassParity, OutputParity


def class_metrics_for(policy: Policy, output: OutputParity) -> ClassParity | None:
    """Return the class metrics for judging the output; None if only its numbers are judged.

    For an inferred role (task `auto`, no role in the policy), agreement is judged only if the
    samples can prove it: the reference must predict at least two classes. A constant output has no
    classes unless the policy states them.
    """
    classes = output.classification
    if classes is None or not policy.counts_classes(output.name):
        return None
    if policy.role_for(output.name) is None and output.reference_constant:
        return None
    return None if infer_role(policy, output) and _why_unprovable(classes, output) else classes


def infer_role(policy: Policy, output: OutputParity) -> bool:
    """Return whether the role of the output is inferred from its shape."""
    return policy.task == "auto" and policy.role_for(output.name) is None


def unprovable_reason(policy: Policy, output: OutputParity) -> str | None:
    """Return why the samples can't prove agreement of an output shaped like logits, or None."""
    classes = output.classification
    if not infer_role(policy, output) or classes is None or output.reference_constant:
        return None
    return _why_unprovable(classes, output) if policy.counts_classes(output.name) else None


def max_ties(total: int) -> int:
    """Return the maximum number of near-ties among `total` answers or integers: 1 %, or one."""
    return max(1, math.ceil(0.01 * total))


def is_unsure(classes: ClassParity) -> bool:
    """Return whether PyTorch's rounding changes at least a tenth of the top-1 answers.

    Then a disagreement proves nothing.
    """
    return classes.unsure >= max(2.0, 0.1 * (classes.unsure + classes.sure))


def _why_unprovable(classes: ClassParity, output: OutputParity) -> str | None:
    if classes.predicted_classes < 2:
        return "every sample has the same largest column"
    if classes.top1_ties > max_ties(output.samples):
        return f"rounding decides which column is the largest in {classes.top1_ties} samples"
    if classes.top1_disagreements and is_unsure(classes):
        return f"PyTorch's own rounding changes the largest column in {classes.unsure} samples"
    return None


def proven_constant(output: OutputParity) -> bool:
    """Return whether the output is the same for every sample, and bit-identical on both sides."""
    return (
        output.reference_constant
        and output.elements > 0
        and output.max_abs_diff == 0.0
        and output.nonfinite_mismatched == 0
    )


def unmeasurable(output: OutputParity) -> Literal["empty", "nonfinite"] | None:
    """Return why the output can't be compared (no elements or no finite ones), or None."""
    if output.elements == 0:
        return "empty"
    return "nonfinite" if output.nonfinite_reference >= output.elements else None
