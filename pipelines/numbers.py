"""The few numbers of the evidence that DVC compares."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping

from gate.mlflow_client.log_evaluation import metrics_from_evidence
from gate.records.evidence import Evidence
from gate.records.runtime import CPU_PROVIDER, traits_of

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


def headlines(evidence: Evidence) -> dict[str, float | str]:
    """The few numbers that `dvc metrics diff` and `dvc exp show` compare: the worst of all outputs
    in the gate's own runtimes on the CPU, which every machine has. Whole; NaN and infinity as
    words.

    No latency: it is another one on every machine and day.
    """
    found: dict[str, list[float]] = {}
    for place, value in metrics_from_evidence(evidence):
        runtime, *_, name = place.split("/")
        on_cpu = traits_of(runtime).provider == CPU_PROVIDER
        if name in _WORST and on_cpu and "/probes/" not in place:
            found.setdefault(name, []).append(value)
    worst = {
        name: math.nan if any(map(math.isnan, found[name])) else of(found[name])
        for name, of in _WORST.items()
        if name in found
    }
    plain: dict[str, float | str] = json.loads(json.dumps(worst), parse_constant=str)
    return {"samples": evidence.dataset.samples, **plain}
