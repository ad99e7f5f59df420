"""Runtimes and bounds of the built-in policies."""

from __future__ import annotations

from typing import Any

from gate.policy.sections import Bounds, ConfidenceBands, Instruments, RuntimePolicy
from gate.records.runtime import RUNTIMES, BoundsKind, RuntimeName

# No bound depends on the model's scale. Sources: docs/metrics.md, for CUDA docs/cuda.md, for the
# quantized twin docs/adr/0012.
ANSWERS_ONLY = Instruments(
    noise_samples=0, stability_samples=0, search_inputs=0, probe_relative_diff=0.2
)
"""Instruments of a file that is judged by its predictions, not by its rounding."""

_CPU = Bounds(
    unequal_share=0.0,
    top1_agreement=1.0,
    noise_ratio=1.5,
    noise_peak=6.0,
    noise_diff=32.0,
    repeatability_ratio=8.0,
    batch_invariance_ratio=16.0,
)

_DEVICE = Bounds(
    unequal_share=0.0,
    top1_agreement=1.0,
    noise_ratio=32.0,
    noise_peak=64.0,
    noise_diff=128.0,
    repeatability_ratio=8.0,
    batch_invariance_ratio=32.0,
)

_CUDA = _DEVICE.model_copy(
    update={"noise_ratio": 2.0, "noise_ratio_by_operator": {"LogSoftmax": 7.0}}
)
"""ONNX Runtime on CUDA rounds like the CPU. Only LogSoftmax was measured to be less exact: 5.7,
times 1.2, the margin of the CPU bound above its correct files."""

_EXACT: dict[BoundsKind, Bounds] = {"cpu": _CPU, "cuda": _CUDA, "device": _DEVICE}

REDUCED_UNIT = 2.0**13
"""Unit roundoff of float16, 2^-11, divided by that of float32, 2^-24. TF32 rounds like float16."""

_REDUCED = Bounds(
    unequal_share=0.05,
    noise_ratio=1.5 * REDUCED_UNIT,
    noise_peak=6.0 * REDUCED_UNIT,
    noise_diff=32.0 * REDUCED_UNIT,
    repeatability_ratio=8.0 * REDUCED_UNIT,
    batch_invariance_ratio=16.0 * REDUCED_UNIT,
)

REDUCED = Instruments(probe_relative_diff=0.2, probe_noise_ratio=32.0 * REDUCED_UNIT)
"""Instruments of a 16-bit file: all of them, with probes that look for different predictions."""

BFLOAT16 = 4.0
"""Bounds of a bfloat16 file divided by those of a float16 file. A `noise_ratio` of 8 655 to 11 884
was measured on 40 correct encoders of one layer, and 111 710 or more on five faulty ones."""

_QUANTIZED = Bounds(
    unequal_share=0.01,
    top1_agreement=0.99,
    confidence_bands=ConfidenceBands(over_1_percent=1.0, over_5_percent=0.05, over_10_percent=0.02),
)


def exact_runtimes(*, classes: bool) -> dict[RuntimeName, RuntimePolicy]:
    """Return the runtimes of an exact file: CPU always, CUDA when present.

    `classes`: whether the file may return class scores.
    """
    return {
        name: RuntimePolicy(
            required="when_present" if traits.cuda else "always",
            bounds=exact_bounds("cuda" if traits.cuda else "cpu", classes=classes),
            exceeded="warn" if traits.engine == "torch" else "fail",
        )
        for name, traits in RUNTIMES.items()
    }


def exact_bounds(kind: BoundsKind, *, classes: bool) -> Bounds:
    """Return the bounds of an exact file for one kind of runtime."""
    update = {} if classes else {"top1_agreement": None}
    return _EXACT[kind].model_copy(update=update)


def reduced_runtimes(*, top1_agreement: float | None) -> dict[RuntimeName, RuntimePolicy]:
    """Return the runtimes of an intentionally 16-bit file: those of an exact one, with wider
    bounds."""
    bounds = _REDUCED.model_copy(update={"top1_agreement": top1_agreement})
    return {
        name: runtime.model_copy(update={"bounds": bounds})
        for name, runtime in exact_runtimes(classes=False).items()
    }


def bfloat16_bounds(bounds: Bounds) -> Bounds:
    """Return `bounds` with built-in float16 bounds in units of rounding scaled to bfloat16."""
    same = {
        name: value * BFLOAT16
        for name, value in _REDUCED
        if value is not None and value > REDUCED_UNIT and getattr(bounds, name) == value
    }
    return bounds.model_copy(update=same)


def quantized_runtimes() -> dict[RuntimeName, RuntimePolicy]:
    """Return the runtimes of a quantized twin: those of ONNX Runtime, optimized CPU required."""
    return {
        name: RuntimePolicy(
            required="always" if name == "ort-cpu-optimized" else "when_present",
            bounds=_QUANTIZED,
        )
        for name, traits in RUNTIMES.items()
        if traits.engine == "onnxruntime"
    }


def with_default_sections(stated: dict[str, Any]) -> dict[str, Any]:
    """Complete the settings of a policy file from the built-in policy of its precision.

    This adds missing runtimes and missing settings of the instruments.
    """
    precision = stated.get("precision", "exact")
    task = stated.get("task", "classification")
    if precision == "quantized":
        runtimes, instruments = quantized_runtimes(), ANSWERS_ONLY
    elif precision == "reduced":
        top1 = 0.95 if task == "classification" else None
        runtimes, instruments = reduced_runtimes(top1_agreement=top1), REDUCED
    else:
        runtimes, instruments = exact_runtimes(classes=task != "tensors"), Instruments()
    complete = dict(stated)
    if isinstance(stated.get("twin"), dict):
        complete["twin"] = with_default_sections(stated["twin"])
    if "runtimes" not in stated:
        complete["runtimes"] = {name: runtime.to_plain() for name, runtime in runtimes.items()}
    if isinstance(stated.get("instruments", {}), dict):
        complete["instruments"] = {**instruments.to_plain(), **stated.get("instruments", {})}
    return complete
