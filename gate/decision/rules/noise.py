"""Checks in units of rounding: the noise floor of an output, as the float64 truth tells it.

Where it was not measured, or on fewer samples than the policy asks for, that is an ERROR; it can be
waived by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gate.decision.checks import CheckResult, Verdict
from gate.decision.rules.comparisons import BoundedMetric, check
from gate.policy.policy import Bounds, Policy
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.instruments import NoiseParity
from gate.records.output_parity import OutputParity

_CLOSER = {
    "reference": "PyTorch is closer to the float64 truth.",
    "candidate": "The runtime is closer to the float64 truth than PyTorch.",
    "neither": "Both are equally far from the float64 truth.",
}
_ROUNDING = 1e-9
"""Of float64 sums: two ways to the same ratio."""


def noises(bounds: Bounds, output: OutputParity) -> list[BoundedMetric]:
    """The metrics in units of rounding; none for integers and bools, which have no rounding."""
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


def noise(
    policy: Policy, bounds: Bounds, evidence: Evidence, place: tuple[RuntimeEvidence, OutputParity]
) -> Iterator[CheckResult]:
    """`noise_ratio`, `noise_peak` and `noise_diff` of an output of floats."""
    runtime, output = place
    measured = output.noise
    lacking = _lacking(policy, evidence, measured)
    for metric in noises(bounds, output):
        if metric.bound is None:
            continue
        result = check(metric, runtime, output)
        verdict, explanation = result.verdict, result.explanation
        # What was seen of a bad one is enough to refuse it, waived or not.
        if lacking is not None and (not _compared(measured) or metric.holds()):
            verdict = Verdict.WAIVED if metric.name in policy.waive else Verdict.ERROR
            explanation = f"{metric.name} was not measured: {lacking}"
        elif measured is not None:
            explanation = (
                f"{metric.name} is {metric.observed:.6g}, allowed <= {metric.bound:.6g} "
                f"(n = {measured.samples}){_place(metric.name, measured)}. "
                f"{_CLOSER[measured.closer]}"
            )
        yield result.model_copy(
            update={
                "samples": measured.samples if measured else 0,
                "verdict": verdict,
                "explanation": explanation,
            }
        )


def _widened(bound: float | None, elements: int) -> float | None:
    """The bound for a ratio that was not divided by its scatter, of records of before: 2 allows
    2.02 on 32 000 elements, 2.2 on 320, 3.4 on 8."""
    return bound if bound is None or not elements else bound * (1.0 + 2.0 / math.sqrt(elements))


def _noise_ratio(measured: NoiseParity) -> float:
    """The recorded ratio, or that of the recorded errors where it is larger: numbers that
    contradict each other must not pass by the better of them."""
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
    """The recorded peak; of a constant twice its error in units of the floor: that is no largest of
    many but one error, however often it is repeated, and no scatter excuses it."""
    measured = output.noise
    assert measured is not None
    if not output.reference_constant or not measured.floor_peak or math.isnan(measured.peak):
        return measured.peak
    return max(2.0 * output.max_abs_diff / measured.floor_peak, measured.peak)


def _place(name: str, measured: NoiseParity) -> str:
    """Where the ratio is largest, if that is not the whole output."""
    return f" in {measured.group}" if measured.group and name == "noise_ratio" else ""


def _lacking(policy: Policy, evidence: Evidence, measured: NoiseParity | None) -> str | None:
    """Why the noise floor is not measured, or not on all samples that the policy asks for."""
    why = evidence.noise_unmeasured or "no reason is recorded"
    required = min(policy.instruments.noise_samples, evidence.dataset.samples)
    if measured is None:
        return why
    if not _compared(measured):
        return "no element could be compared with the float64 truth"
    if measured.samples < required:
        return f"only {measured.samples} of {required} samples were computed in float64: {why}"
    return None


def _compared(measured: NoiseParity | None) -> bool:
    return measured is not None and measured.samples > 0 and measured.elements > 0
