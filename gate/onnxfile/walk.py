"""Walking a model: its graph with all subgraphs, and its functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in a node's own attributes: the branches of an If, the body of a Loop."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def nodes_within(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These nodes, and all that are in their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from nodes_within(graph.node)


def nodes_of(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """All nodes."""
    yield from nodes_within(model.graph.node)
    for function in model.functions:
        yield from nodes_within(function.node)


def tensors_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """All tensors: initializers and those in attributes, of sparse ones values and indices."""
    yield from _in_graph(model.graph)
    for function in model.functions:
        yield from _in_nodes(function.node)


def _in_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _in_nodes(graph.node)


def _in_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            own = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
            for sparse in (*own, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
        for graph in subgraphs(node):
            yield from _in_graph(graph)
