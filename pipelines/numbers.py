"""The summary numbers of the evidence by name, the same in MLflow and in DVC."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gate.records.evidence import ClassParity, Evidence, OutputParity, RuntimeEvidence

_ELEMENTWISE = ("max_abs_diff", "mean_abs_diff", "scaled_diff", "l2_mean", "l2_max")
_CLASSES = ("top1_agreement", "top5_agreement", "l2_probabilities_mean", "l2_probabilities_max")
_BANDS = ("below_1", "from_1_to_5", "from_5_to_10", "over_10")
_HEADLINES = frozenset(
    {
        "max_abs_diff",
        "scaled_diff",
        "noise_ratio",
        "top1_agreement",
        "confidence_diff_max",
        "accuracy_candidate",
        "accuracy_drop",
        "latency_median_ms",
    }
)


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


def headlines(evidence: Evidence) -> dict[str, float]:
    """The few of them that fit a table of `dvc metrics`."""
    return {
        name: value
        for name, value in of_evidence(evidence)
        if name.rpartition("/")[2] in _HEADLINES and "/probes/" not in name
    }


def nested(flat: Mapping[str, float]) -> dict[str, Any]:
    """`{"a/b": 1}` as `{"a": {"b": 1}}`, for `dvc metrics`; NaN and infinity as words."""
    tree: dict[str, Any] = {}
    plain = json.loads(json.dumps(dict(flat)), parse_constant=str)
    for name, value in plain.items():
        *folders, leaf = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = value
    return tree
