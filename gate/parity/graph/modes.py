"""Nodes that behave as in training: batch statistics, active dropout, random numbers."""

from __future__ import annotations

from collections.abc import Iterator

from gate.parity.graph.values import FlatGraph, Node
from gate.parity.graph.witness import Witness
from gate.records.instruments import GraphFinding

_RANDOM = (
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
)  # fmt: skip


def training_mode(graph: FlatGraph, witness: Witness) -> Iterator[GraphFinding]:
    """Live nodes in training mode. What the reference does in eval mode itself is none."""
    for node in graph.live():
        detail = _detail(graph, node, witness)
        if detail is not None:
            yield GraphFinding(code="training_mode", place=node.place, detail=detail)


def _detail(graph: FlatGraph, node: Node, witness: Witness) -> str | None:
    if node.operator == "BatchNormalization":
        detail = _batch_norm(graph, node)
        return detail if detail and not witness.conduct.batch_statistics else None
    if node.operator == "Dropout":
        detail = _dropout(graph, node)
    elif node.operator in _RANDOM:
        detail = "draws random numbers"
    else:
        return None
    return detail if detail and not witness.conduct.draws else None


def _batch_norm(graph: FlatGraph, node: Node) -> str | None:
    """Since opset 14 an attribute says it, since 7 the number of outputs, before `is_test`."""
    if graph.opset >= 14:
        training = node.attribute("training_mode", 0) != 0
    elif graph.opset >= 7:
        training = sum(value is not None for value in node.outputs) > 1
    else:
        training = node.attribute("is_test", 0) == 0
    return "normalises by the statistics of the batch" if training else None


def _dropout(graph: FlatGraph, node: Node) -> str | None:
    """Since opset 12 an input says it; from 7 on there was only inference; before, `is_test`."""
    if graph.opset >= 12:
        ratio = graph.constant(node.input(1))
        if node.input(2) is None or (ratio is not None and not ratio.any()):
            return None
        flag = graph.constant(node.input(2))
        if flag is None:
            return "drops at random unless a computed flag says otherwise"
        return "drops at random" if flag.any() else None
    if graph.opset >= 7:
        mask = node.outputs[1] if len(node.outputs) > 1 else None
        return "the mask of what it drops is in use" if mask in graph.live_values else None
    return "drops at random" if node.attribute("is_test", 0) == 0 else None
