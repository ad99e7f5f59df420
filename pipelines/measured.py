"""The part of a policy that decides what is measured, without the bounds.

A changed bound needs no new measurement; a changed runtime, option or instrument does.
"""

from __future__ import annotations

from typing import Any

from gate.policy.policy import Policy

_PARTS = (
    "task",
    "logits",
    "outputs",
    "operating_points",
    "nonfinite",
    "determinism",
    "cuda_provider",
    "preprocessing",
)
_INSTRUMENTS = (
    "noise_samples",
    "stability_samples",
    "probes",
    "probe_batch_sizes",
    "search_inputs",
    "graph",
)


def measured_part(policy: Policy) -> dict[str, Any]:
    """Return a JSON-compatible dict that is equal for policies that can share one measurement."""
    fields = policy.to_plain()
    instruments = policy.instruments.to_plain()
    return {
        **{part: fields.get(part) for part in _PARTS},
        "metrics": [[each.name, str(each.definition())] for each in policy.metrics],
        "instruments": {name: instruments.get(name) for name in _INSTRUMENTS},
        "runtimes": {
            name: {"kind": runtime.kind or name, "options": runtime.options}
            for name, runtime in sorted(policy.runtimes.items())
            if runtime.required != "never"
        },
    }
