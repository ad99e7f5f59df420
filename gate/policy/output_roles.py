"""The role of each output, stated or inferred."""

from __future__ import annotations

import math
from typing import Literal

from gate.policy.policy import Policy
from gate.records.outputs import ClassParity, OutputParity


def class_metrics_for(policy: Policy, output: OutputParity) -> ClassParity | None:
    """Return the class metrics by which the output is judged; None: it is judged by numbers alone.

    For an inferred role (task `auto`, an output without a role) agreement is claimed where the
    samples can prove it: where the reference gives at least two classes. A constant output has no
    class unless the policy says so.
    """
    classes = output.classification
    if classes is None or not policy.counts_classes(output.name):
        return None
    if policy.role_for(output.name) is None and output.reference_constant:
        return None
    return None if infer_role(policy, output) and _why_unprovable(classes, output) else classes


def infer_role(policy: Policy, output: OutputParity) -> bool:
    """Return True if nothing but the output's shape says that it might be one of classes."""
    return policy.task == "auto" and policy.role_for(output.name) is None


def unclaimed(policy: Policy, output: OutputParity) -> str | None:
    """Return why the samples can't prove agreement of an output shaped like logits, or None."""
    classes = output.classification
    if not infer_role(policy, output) or classes is None or output.reference_constant:
        return None
    return _why_unprovable(classes, output) if policy.counts_classes(output.name) else None


def most_ties(total: int) -> int:
    """How many of so many answers or integers may be near-ties: 1 %, or one."""
    return max(1, math.ceil(0.01 * total))


def is_unsure(classes: ClassParity) -> bool:
    """Return True if PyTorch's own rounding changes a tenth of the answers or more: disagreement
    then says nothing."""
    return classes.unsure >= max(2.0, 0.1 * (classes.unsure + classes.sure))


def _why_unprovable(classes: ClassParity, output: OutputParity) -> str | None:
    if classes.predicted_classes < 2:
        return "every sample has the same largest column"
    if classes.top1_ties > most_ties(output.samples):
        return f"rounding decides which column is the largest in {classes.top1_ties} samples"
    if classes.top1_disagreements and is_unsure(classes):
        return f"PyTorch's own rounding changes the largest column in {classes.unsure} samples"
    return None


def proven_constant(output: OutputParity) -> bool:
    """Return True for an output that is the same for every sample, and equal on both sides bit for
    bit."""
    return (
        output.reference_constant
        and output.elements > 0
        and output.max_abs_diff == 0.0
        and output.nonfinite_mismatched == 0
    )


def unmeasurable(output: OutputParity) -> Literal["empty", "nonfinite"] | None:
    """Return why the output can't be compared, or None if it can.

    It has no element in any sample, or no finite one.
    """
    if output.elements == 0:
        return "empty"
    return "nonfinite" if output.nonfinite_reference >= output.elements else None
