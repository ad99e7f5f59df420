"""The numbers of the evidence by name: all of them for MLflow, a few for DVC."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from gate.records.evidence import ClassParity, Evidence, OutputParity, RuntimeEvidence

_ELEMENTWISE = ("max_abs_diff", "mean_abs_diff", "scaled_diff", "l2_mean", "l2_max")
_CLASSES = ("top1_agreement", "top5_agreement", "l2_probabilities_mean", "l2_probabilities_max")
_BANDS = ("below_1", "from_1_to_5", "from_5_to_10", "over_10")
_WORST: Mapping[str, Callable[[Iterable[float]], float]] = {
    "accuracy_candidate": min,
    "accuracy_drop": max,
    "top1_agreement": min,
    "noise_ratio": max,
    "noise_peak": max,
    "max_abs_diff": max,
    "confidence_diff_max": max,
}
"""What is compared between commits, and which of several outputs and runtimes counts."""


def of_outputs(evidence: Evidence) -> Iterator[tuple[str, OutputParity]]:
    """Each measured output with the place of its numbers: `runtime`, or `runtime/output`."""
    for runtime in evidence.runtimes:
        several = len(runtime.outputs) > 1
        for output in runtime.outputs:
            yield f"{runtime.runtime}/{output.name}" if several else runtime.runtime, output


def of_evidence(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """`runtime/metric` and its value, NaN and infinity included; latencies in milliseconds."""
    for place, output in of_outputs(evidence):
        for name in _ELEMENTWISE:
            yield f"{place}/{name}", getattr(output, name)
        yield f"{place}/nonfinite_mismatched", float(output.nonfinite_mismatched)
        for name, value in _of_instruments(output):
            yield f"{place}/{name}", value
        if output.classification is not None:
            for name, value in _of_classes(output.classification):
                yield f"{place}/{name}", value
    for runtime in evidence.runtimes:
        for name, value in _of_probes(runtime):
            yield f"{runtime.runtime}/{name}", value
    latencies = [("reference", evidence.reference_latency)]
    latencies += [(runtime.runtime, runtime.latency) for runtime in evidence.runtimes]
    for name, latency in latencies:
        if latency is not None:
            yield f"{name}/latency_median_ms", latency.median_ms
            yield f"{name}/latency_p95_ms", latency.p95_ms


def _of_instruments(output: OutputParity) -> Iterator[tuple[str, float]]:
    if output.noise is not None:
        yield "noise_ratio", output.noise.ratio
        yield "noise_peak", output.noise.peak
    if output.stability is not None:
        for name in ("repeatability", "batch_invariance"):
            yield name, getattr(output.stability, name)


def _of_probes(runtime: RuntimeEvidence) -> Iterator[tuple[str, float]]:
    """What the probes gave, by name; a probe that failed has no number."""
    for probe in runtime.probes:
        if probe.noise_ratio is not None:
            yield f"probes/{probe.name}/noise_ratio", probe.noise_ratio
        elif probe.relative_diff is not None:
            yield f"probes/{probe.name}/relative_diff", probe.relative_diff


def _of_classes(logits: ClassParity) -> Iterator[tuple[str, float]]:
    for name in _CLASSES:
        yield name, getattr(logits, name)
    yield "top1_disagreements", float(logits.top1_disagreements)
    for name in ("mean", "min", "max"):
        yield f"confidence_diff_{name}", getattr(logits.confidence, name)
    for name, share in zip(_BANDS, logits.confidence.bands, strict=True):
        yield f"confidence_{name}_percent", share
    if logits.accuracy is not None:
        for name in ("reference", "candidate", "drop"):
            yield f"accuracy_{name}", getattr(logits.accuracy, name)


def headlines(evidence: Evidence) -> dict[str, float | str]:
    """The few numbers that `dvc metrics diff` and `dvc exp show` compare: the worst of all outputs
    in the runtimes on the CPU, which every machine has. Whole; NaN and infinity as words.

    No latency: it is another one on every machine and day.
    """
    found: dict[str, list[float]] = {}
    for place, value in of_evidence(evidence):
        runtime, *_, name = place.split("/")
        if name in _WORST and runtime.startswith("ort-cpu") and "/probes/" not in place:
            found.setdefault(name, []).append(value)
    worst = {
        name: math.nan if any(map(math.isnan, found[name])) else of(found[name])
        for name, of in _WORST.items()
        if name in found
    }
    plain: dict[str, float | str] = json.loads(json.dumps(worst), parse_constant=str)
    return {"samples": evidence.dataset.samples, **plain}
