"""The numbers of the evidence by name: all of them, and the few that somebody compares."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from gate.records.cost import Cost
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.output_parity import ClassParity, OutputParity
from gate.story.costs import costs_of

LARGEST, SMALLEST = "largest", "smallest"
COMPARED = {
    "noise_ratio": LARGEST,
    "noise_peak": LARGEST,
    "max_abs_diff": LARGEST,
    "top1_agreement": SMALLEST,
    "confidence_diff_max": LARGEST,
    "crossed_share": LARGEST,
    "accuracy_candidate": SMALLEST,
    "accuracy_drop": LARGEST,
    "probe_noise_ratio": LARGEST,
}
"""What becomes a metric of MLflow for each runtime, and which of several outputs' is the worst.
`docs/metrics.md` says why these."""

_MB = 1e6
_ELEMENTWISE = ("max_abs_diff", "mean_abs_diff", "scaled_diff", "l2_mean", "l2_max")
_CLASSES = ("top1_agreement", "top5_agreement", "l2_probabilities_mean", "l2_probabilities_max")
_BANDS = ("below_1", "from_1_to_5", "from_5_to_10", "over_10")


def of_outputs(evidence: Evidence) -> Iterator[tuple[str, OutputParity]]:
    """Each measured output with the place of its numbers: `runtime`, or `runtime/output`."""
    for runtime in evidence.runtimes:
        several = len(runtime.outputs) > 1
        for output in runtime.outputs:
            yield f"{runtime.runtime}/{output.name}" if several else runtime.runtime, output


def of_evidence(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """`runtime/metric` and its value, NaN and infinity included; latencies in milliseconds."""
    for place, output in of_outputs(evidence):
        for name, value in _of_output(output):
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
    costs = [("reference", evidence.reference_cost)]
    costs += [(runtime.runtime, runtime.cost) for runtime in evidence.runtimes]
    for name, cost in costs:
        for number, value in _of_cost(cost):
            yield f"{name}/{number}", value
    yield from _by_costs(evidence)


def compared(evidence: Evidence) -> dict[str, float]:
    """`runtime/metric` for the metrics of `COMPARED`, the worst over its outputs (NaN is worse than
    any number), and the latencies: the same names for every model, so that runs can be compared."""
    numbers = {"export/size_bytes": float(evidence.subject.size_bytes)}
    numbers["dataset/samples"] = float(evidence.dataset.samples)
    if evidence.reference_latency is not None:
        numbers["reference/latency_median_ms"] = evidence.reference_latency.median_ms
    for runtime in evidence.runtimes:
        for name, value in _compared_of(runtime):
            numbers[f"{runtime.runtime}/{name}"] = value
    return numbers | dict(_by_costs(evidence))


def _compared_of(runtime: RuntimeEvidence) -> Iterator[tuple[str, float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for output in runtime.outputs:
        for name, value in _of_output(output):
            found[name].append(value)
        for crossing in output.classification.crossings if output.classification else ():
            found["crossed_share"].append(crossing.crossed / max(crossing.samples, 1))
    ratios = [probe.noise_ratio for probe in runtime.probes if probe.noise_ratio is not None]
    found["probe_noise_ratio"] = ratios
    for name, sense in COMPARED.items():
        if found[name]:
            yield name, _worst(found[name], sense)
    if runtime.latency is not None:
        yield "latency_median_ms", runtime.latency.median_ms


def table(evidence: Evidence) -> list[dict[str, object]]:
    """All numbers as rows: where, which, its value; to six digits, because the page cuts a long one
    off before its exponent. In full they are in the evidence."""
    rows: list[dict[str, object]] = []
    for name, value in of_evidence(evidence):
        where, _, number = name.partition("/")
        rows.append({"runtime": where, "number": number, "value": float(f"{value:.6g}")})
    return rows


def classes_table(evidence: Evidence) -> list[dict[str, object]]:
    """How far the confidence moves, by runtime and class of the reference."""
    return [
        {"runtime": place, **entry.model_dump()}
        for place, output in of_outputs(evidence)
        for entry in (output.classification.confidence.per_class if output.classification else ())
    ]


def _worst(values: list[float], sense: str) -> float:
    for value in values:
        if math.isnan(value):
            return value
    return max(values) if sense == LARGEST else min(values)


def _of_output(output: OutputParity) -> Iterator[tuple[str, float]]:
    for name in _ELEMENTWISE:
        yield name, getattr(output, name)
    yield "nonfinite_mismatched", float(output.nonfinite_mismatched)
    if output.noise is not None:
        yield "noise_ratio", output.noise.ratio
        yield "noise_peak", output.noise.peak
    if output.stability is not None:
        for name in ("repeatability", "batch_invariance"):
            yield name, getattr(output.stability, name)
    if output.classification is not None:
        yield from _of_classes(output.classification)


def _of_cost(cost: Cost | None) -> Iterator[tuple[str, float]]:
    """Milliseconds and megabytes."""
    if cost is None:
        return
    for name, time in (("open_ms", cost.open_ms), ("first_ms", cost.first_ms)):
        if time is not None:
            yield name, time
    if cost.single is not None:
        yield "latency_single_median_ms", cost.single.median_ms
        yield "latency_single_p95_ms", cost.single.p95_ms
    for name, size in (("peak_mb", cost.peak_bytes), ("cuda_mb", cost.cuda_bytes)):
        if size is not None:
            yield name, size / _MB


def _by_costs(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """What of the costs somebody compares between runs: the time beside PyTorch's, the memory."""
    for row in costs_of(evidence):
        if row.latency_ratio is not None:
            yield f"{row.runtime}/latency_ratio", row.latency_ratio
        if row.memory_bytes is not None:
            yield f"{row.runtime}/memory_mb", row.memory_bytes / _MB


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
    for crossing in logits.crossings:
        point = f"{crossing.threshold:g}"
        place = point if crossing.label is None else f"{point}_class_{crossing.label}"
        yield f"crossed_at_{place}", float(crossing.crossed)
    if logits.accuracy is not None:
        for name in ("reference", "candidate", "drop"):
            yield f"accuracy_{name}", getattr(logits.accuracy, name)
