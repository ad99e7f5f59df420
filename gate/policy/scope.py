"""What a policy is about, and which bounds fit that: none that nothing could be measured for, and
those without which the gate would refuse nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gate.policy.sections import Bounds, Instruments

Task = Literal["auto", "classification", "tensors"]
Precision = Literal["exact", "reduced", "quantized"]

CROSSINGS = ("threshold_crossing", "threshold_crossing_bound")
"""Bounds at operating points."""
_CLASSES = ("l2_probabilities", "confidence_diff", "confidence_bands", "top1_agreement",
            "top1_lower_bound", "top5_agreement", "accuracy_drop", *CROSSINGS)  # fmt: skip
"""Bounds on answers of classes."""
_NOISE = ("noise_ratio", "noise_peak", "noise_diff")
_EXACT = ("max_abs_diff", "mean_abs_diff", "scaled_diff", "l2_logits", *_NOISE)
_STABILITY = ("repeatability", "repeatability_ratio", "batch_invariance", "batch_invariance_ratio")


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Fields of a policy that decide which bounds it needs and can have."""

    task: Task
    precision: Precision
    waive: frozenset[str]
    """Names of bounds that may go unmeasured."""
    instruments: Instruments
    names_classes: bool
    """Whether the policy says of an output by its name that it is one of classes."""

    def check(self, runtime: str, bounds: Bounds) -> None:
        """Raises ValueError for bounds of this runtime that do not fit: one is missing, or can't be
        judged."""
        exact = {"max_abs_diff", "scaled_diff", "noise_ratio"} - self.waive
        if self.precision == "exact" and not bounds.stated(exact):
            raise ValueError(
                f"{runtime}: precision 'exact' needs a bound noise_ratio (not waived), "
                "max_abs_diff or scaled_diff"
            )
        self._check_quantized(runtime, bounds)
        if self.instruments.noise_samples == 0 and bounds.stated(_NOISE):
            raise ValueError(f"{runtime}: a bound on noise needs instruments.noise_samples above 0")
        if self.instruments.stability_samples == 0 and bounds.stated(_STABILITY):
            raise ValueError(
                f"{runtime}: a bound on repeatability or batch invariance needs "
                "instruments.stability_samples above 1"
            )
        self._check_classes(runtime, bounds)

    def _check_classes(self, runtime: str, bounds: Bounds) -> None:
        bounded = bounds.stated(_CLASSES)
        if "top1_agreement" not in bounded and (
            self.task == "classification" or (self.task == "auto" and self.names_classes)
        ):
            why = "task 'classification'" if self.task == "classification" else "the role of logits"
            raise ValueError(f"{runtime}: {why} needs a bound top1_agreement")
        if self.task == "tensors" and bounded:
            raise ValueError(
                f"{runtime}: {', '.join(sorted(bounded))} need logits; set task: classification"
            )
        beyond = sorted(set(bounded) - {"top1_agreement"})
        if self.task == "auto" and beyond and not self.names_classes:
            raise ValueError(
                f"{runtime}: {', '.join(beyond)} need logits, and a guess is not enough for them; "
                "name the output (outputs: {NAME: logits}), or set task: classification"
            )

    def _check_quantized(self, runtime: str, bounds: Bounds) -> None:
        """Eight bits are no rounding of 24: a quantized file is judged by its answers."""
        if self.precision != "quantized" or self.task != "classification":
            return
        exact = bounds.stated(_EXACT)
        if exact:
            raise ValueError(
                f"{runtime}: {', '.join(exact)} are for exact files; a quantized one is judged by "
                "top1_agreement, confidence_bands and accuracy_drop"
            )
        if bounds.confidence_bands is None:
            raise ValueError(f"{runtime}: precision 'quantized' needs a bound confidence_bands")
