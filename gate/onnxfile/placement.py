"""Where ONNX Runtime put the nodes, read from the profile of a short run.

`get_available_providers()` proves nothing, and the active providers of a session say only what
was allowed: the profile says what ran.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gate.errors import EvidenceError
from gate.records.runtime import CPU_PROVIDER

SHAPE_OPS = frozenset(
    {
        "Add", "And", "Cast", "Ceil", "Concat", "Constant", "ConstantOfShape", "Div", "Equal",
        "Expand", "Flatten", "Floor", "Gather", "Greater", "GreaterOrEqual", "Identity", "Less",
        "LessOrEqual", "Loop", "If", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Range",
        "ReduceMax", "ReduceMin", "ReduceProd", "Reshape", "ScatterND", "Shape", "Size", "Slice",
        "Split", "Sqrt", "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip
"""Operators that compute shapes and indices, beside other work."""
_SHAPE_ELEMENTS = 64
"""A shape, or an index into one, has no more elements than this."""


@dataclass(frozen=True)
class Placement:
    """Nodes that ran, counted per provider, and the compute nodes among those on the CPU."""

    nodes_per_provider: dict[str, int]
    cpu_compute_nodes: tuple[str, ...]
    """`op_type:node_name`."""


def read_placement(profile: Path) -> Placement:
    """Read the JSON that ONNX Runtime's profiler wrote. Raises EvidenceError."""
    try:
        events = json.loads(profile.read_text(encoding="utf-8"))
        nodes = {}
        for event in events:
            provider = event.get("args", {}).get("provider")
            if event.get("cat") == "Node" and provider:
                args = event["args"]
                key = (event["name"], args.get("node_index"), provider)
                nodes[key] = args
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise EvidenceError(
            f"ONNX Runtime's profile can't be read ({type(error).__name__}: {error}), so it is "
            "not known which provider ran the nodes. Free space in the temporary folder; "
            "otherwise this version of ONNX Runtime writes another format."
        ) from error
    counts = Counter(provider for _, _, provider in nodes)
    compute = tuple(
        f"{args.get('op_name', '?')}:{name.removesuffix('_kernel_time')}"
        for (name, _, provider), args in nodes.items()
        if provider == CPU_PROVIDER and not _is_shape_arithmetic(args)
    )
    return Placement(dict(sorted(counts.items())), compute)


def _is_shape_arithmetic(args: Mapping[str, Any]) -> bool:
    """Shapes, sizes and indices belong on the CPU: at most a vector of a few numbers."""
    if args.get("op_name") not in SHAPE_OPS:
        return False
    outputs: Iterable[Mapping[str, list[int]]] = args.get("output_type_shape", [{"": [-1, -1]}])
    shapes = [shape for output in outputs for shape in output.values()]
    return all(map(is_small, shapes))


def is_small(shape: list[int]) -> bool:
    """Whether a tensor of this shape may be a shape, or an index into one."""
    return len(shape) <= 1 and int(np.prod(shape)) <= _SHAPE_ELEMENTS
