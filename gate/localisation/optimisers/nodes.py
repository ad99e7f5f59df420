"""The nodes that an optimiser made of others: the difference of the two graphs that ONNX Runtime
writes, with it and without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from pathlib import Path

import onnx

from gate.localisation.optimisers.trials import OptimiserTrials
from gate.onnxfile.walk import nodes_of
from gate.storage.temporary import temporary_folder

MOST_BYTES = 512 << 20
"""Of a file whose graphs are written: ONNX Runtime writes the weights, too."""
_MOST_NODES = 64


def exchanged(trials: OptimiserTrials, off: Set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is only in the graph without the optimisers `off`, and what they made of it: operators
    with the names of their nodes, at most 64 each.

    Raises as `OptimiserTrials.write`, and whatever onnx raises.
    """
    with temporary_folder() as folder:
        without, with_them = Path(folder) / "without.onnx", Path(folder) / "with.onnx"
        trials.write(without, off=off)
        trials.write(with_them, off=frozenset())
        before, after = (
            _nodes(onnx.load(path, load_external_data=False)) for path in (without, with_them)
        )
    return _only(before, after), _only(after, before)


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in nodes_of(model) if node.op_type != "Constant"]


def _only(nodes: list[onnx.NodeProto], others: list[onnx.NodeProto]) -> tuple[str, ...]:
    """Nodes of which there is no equal one: by the names of their outputs, which the last node of
    a pattern keeps, or by their own."""
    for outputs in (True, False):
        there = Counter(_key(node, outputs=outputs) for node in others)
        left = []
        for node in nodes:
            key = _key(node, outputs=outputs)
            if there[key]:
                there[key] -= 1
            else:
                left.append(node)
        nodes = left
    return tuple(f"{node.op_type} {node.name}".strip() for node in nodes[:_MOST_NODES])


def _key(node: onnx.NodeProto, *, outputs: bool) -> tuple[object, ...]:
    attributes = sorted(attribute.SerializeToString() for attribute in node.attribute)
    names = tuple(node.output) if outputs else (node.name,)
    return node.op_type, node.domain, names, tuple(attributes)
