"""Judge correct exports of torchvision's classifiers with the default policy.

    .venv/bin/python -m benchmarks.torchvision_sweep [--only 'correct/resnet*'] [--runtime openvino]

Judges all architectures below 100 million parameters with the weights of
`benchmarks.torchvision_models` on eight images. Options, tables and exit codes are those of
`benchmarks.corpus`. Two processes share the work, each with one thread and one model at a time.
"""

from __future__ import annotations

import sys

from benchmarks.corpus.__main__ import build_parser, judge_entries
from benchmarks.corpus.entry import correct_entry, matching
from benchmarks.corpus.exporters import DIRECT_13, TRACED_13, Recipe
from benchmarks.torchvision_models import architecture, architectures

PARAMETERS = 100_000_000

_RECIPES = {
    "maxvit_t": DIRECT_13,
    "vit_b_16": Recipe("direct", 14),
    "vit_b_32": Recipe("direct", 14),
}
"""Architectures that cannot be exported from a trace at opset 13."""

ENTRIES = [
    correct_entry(architecture(name), _RECIPES.get(name, TRACED_13))
    for name in architectures(below=PARAMETERS)
]


def main(arguments: list[str] | None = None) -> int:
    """Judge the selected architectures, print the results, and return the exit code."""
    parser = build_parser("python -m benchmarks.torchvision_sweep", __doc__ or "")
    parser.set_defaults(jobs=2)
    options = parser.parse_args(arguments)
    registry = "benchmarks.torchvision_sweep"
    return judge_entries(matching(ENTRIES, options.only), options, registry=registry)


if __name__ == "__main__":
    sys.exit(main())
