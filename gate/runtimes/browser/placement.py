"""Where ONNX Runtime put the nodes, by the lines of its log in the page.

`Node(s) placed on [X]. Number of nodes: 3`, and where there is more than one provider, a line
`Conv (/conv/Conv)` for each node of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import onnx

from gate.errors import EvidenceError
from gate.onnxfile.placement import SHAPE_OPS
from gate.onnxfile.shape_arithmetic import shape_arithmetic

_COUNT = re.compile(r"nodes placed on \[(\w+)\]\. Number of nodes: (\d+)", re.IGNORECASE)
_NODE = re.compile(r"(\w+) \((.*)\)")


def placed(lines: Iterable[str]) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Nodes per provider, and where there are several their names by provider, as
    `op_type:node_name`. Raises EvidenceError where the log does not say."""
    counts: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    provider = ""
    for line in lines:
        count, node = _COUNT.search(line.replace("(s)", "s")), _NODE.fullmatch(line)
        if count:
            provider = count[1]
            counts[provider] = counts.get(provider, 0) + int(count[2])
        elif node and provider:
            names.setdefault(provider, []).append(f"{node[1]}:{node[2]}")
    if not counts:
        raise EvidenceError(
            "onnxruntime-web did not say on which provider it put the nodes, so it is not known "
            "what computed. Its log reads otherwise than that of the pinned version."
        )
    return dict(sorted(counts.items())), {name: tuple(found) for name, found in names.items()}


def strays(
    names: Mapping[str, tuple[str, ...]], provider: str, model: Callable[[], onnx.ModelProto]
) -> tuple[str, ...]:
    """The nodes that should have been on `provider` and are not: all but those that compute shapes
    in the file. `model`: reads it, without external data."""
    elsewhere = [name for place in names if place != provider for name in names[place]]
    if not any(name.partition(":")[0] in SHAPE_OPS for name in elsewhere):
        return tuple(elsewhere)
    excused = shape_arithmetic(model())
    return tuple(name for name in elsewhere if name not in excused)
