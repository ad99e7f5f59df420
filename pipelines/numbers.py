"""The few numbers of the evidence that DVC compares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gate.records.evidence import Evidence
from gate.tracking.numbers import of_evidence

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
