"""The numbers of the evidence that DVC compares."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping

from gate.mlflow_client.log_evaluation import metrics_from_evidence
from gate.records.evidence import Evidence
from gate.records.runtime import CPU_PROVIDER, traits_of

_WORST_VALUE: Mapping[str, Callable[[Iterable[float]], float]] = {
    "accuracy_candidate": min,
    "accuracy_drop": max,
    "top1_agreement": min,
    "noise_ratio": max,
    "noise_peak": max,
    "max_abs_diff": max,
    "confidence_diff_max": max,
}
"""Metrics that are compared between commits, and how outputs and runtimes are combined."""


def headline_metrics(evidence: Evidence) -> dict[str, float | str]:
    """Return the numbers for `dvc metrics diff` and `dvc exp show`.

    Each is the worst over all outputs in the CPU runtimes, which every machine has. NaN and
    infinity are strings. Latency is excluded, because it depends on the machine.
    """
    values: dict[str, list[float]] = {}
    for path, value in metrics_from_evidence(evidence):
        runtime, *_, name = path.split("/")
        on_cpu = traits_of(runtime).provider == CPU_PROVIDER
        if name in _WORST_VALUE and on_cpu and "/probes/" not in path:
            values.setdefault(name, []).append(value)
    worst = {
        name: math.nan if any(map(math.isnan, values[name])) else combine(values[name])
        for name, combine in _WORST_VALUE.items()
        if name in values
    }
    plain: dict[str, float | str] = json.loads(json.dumps(worst), parse_constant=str)
    return {"samples": evidence.dataset.samples, **plain}
