"""Write a piece of a file as a standalone model, and search for the fewest nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gate.localize.file_graph import Piece, reference_name
from gate.onnx_file.reading import (
    constant_tensor,
    nodes_within,
    replace_messages,
    subgraphs,
    tensors_of,
)
from gate.storage.arrays import OutputArray

Differs = Callable[[tuple[int, ...]], bool]
"""Returns whether the graph of the nodes at these indices shows the difference."""

TRIALS = 400
"""Largest number of graphs that are tried."""


def fewest_nodes(
    indices: Sequence[int], differs: Differs, *, trials: int = TRIALS
) -> tuple[int, ...]:
    """Return a minimal selection of `indices` for which `differs` is True, in order.

    Delta debugging (Zeller and Hildebrandt, 2002): tries parts of the graph, then the graph without
    a part, with ever smaller parts. After `trials` graphs, returns the smallest selection so far.
    """
    tried: dict[tuple[int, ...], bool] = {}

    def is_differing(candidate: tuple[int, ...]) -> bool:
        if candidate not in tried:
            if not candidate or len(tried) >= trials:
                return False
            tried[candidate] = differs(candidate)
        return tried[candidate]

    kept, parts = tuple(indices), 2
    while len(kept) > 1:
        step = -(-len(kept) // parts)
        chunks = [kept[start : start + step] for start in range(0, len(kept), step)]
        part = next(filter(is_differing, chunks), None)
        rest = None if part else next(filter(is_differing, _omit_each(chunks)), None)
        if part is not None:
            kept, parts = part, 2
        elif rest is not None:
            kept, parts = rest, max(2, parts - 1)
        elif step == 1:
            break
        else:
            parts = min(len(kept), 2 * parts)
    return kept


def _omit_each(chunks: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    for omitted in range(len(chunks)):
        kept = [chunk for index, chunk in enumerate(chunks) if index != omitted]
        yield tuple(index for chunk in kept for index in chunk)


def latest(count: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number below `count` for which `holds` is True, by bisection.

    It is True for 0. After the first False, larger numbers are expected to be False.
    """
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def node_count(model: onnx.ModelProto) -> int:
    """Return the number of nodes that compute, including those of subgraphs."""
    return sum(node.op_type != "Constant" for node in nodes_within(model.graph.node))


@dataclass(frozen=True)
class Standalone:
    """A piece of a file as a complete model."""

    model: onnx.ModelProto
    inputs: Mapping[str, OutputArray]
    """Arrays by name: x0, x1, …"""
    sources: Mapping[str, str]
    """The inputs' names in the file."""
    outputs: Mapping[str, str]
    """Output names (y0, y1, …) by their names in the file."""

    @classmethod
    def from_piece(
        cls,
        piece: Piece,
        fed: Mapping[str, OutputArray],
        computed: Mapping[str, OutputArray] | None = None,
    ) -> Standalone:
        """Return the piece as a model that contains its weights.

        fed: arrays by the names of the piece's inputs. computed: outputs, from which dtypes and
        shapes are taken.

        Texts and metadata are removed, because exporters write paths and source code into them.
        """
        model = copy.deepcopy(piece.model)
        graph = model.graph
        _inline_weights(graph, piece.weights)
        _constants_to_initializers(graph)
        _drop_texts(model)
        read = set(_reads(graph.node)) | set(piece.outputs)
        dense, sparse = graph.initializer, graph.sparse_initializer
        replace_messages(dense, [tensor for tensor in dense if tensor.name in read])
        replace_messages(sparse, [tensor for tensor in sparse if tensor.values.name in read])
        initial = {tensor.name for tensor in graph.initializer}
        initial |= {tensor.values.name for tensor in graph.sparse_initializer}
        names = [v.name for v in graph.input if v.name in read and v.name not in initial]
        new = {name: f"x{index}" for index, name in enumerate(names)}
        outputs = {name: f"y{index}" for index, name in enumerate(piece.outputs)}
        _rename(graph.node, {**new, **outputs})
        for tensor in graph.initializer:
            tensor.name = outputs.get(tensor.name, tensor.name)
        kinds = {value.name: value.type.tensor_type.elem_type for value in graph.input}
        del graph.input[:], graph.output[:], graph.value_info[:]
        graph.input.extend(
            helper.make_tensor_value_info(new[name], kinds[name], fed[name].shape) for name in names
        )
        arrays = computed or {}
        graph.output.extend(_declare(outputs[name], arrays.get(name)) for name in piece.outputs)
        graph.name = "reduced"
        cut = {reference_name(name): name for name in piece.cuts}
        return cls(
            model,
            {new[name]: fed[name] for name in names},
            {new[name]: cut.get(name, name) for name in names},
            outputs,
        )


def _declare(name: str, array: OutputArray | None) -> onnx.ValueInfoProto:
    if array is None:
        return onnx.ValueInfoProto(name=name)
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, kind, array.shape)


def _inline_weights(graph: onnx.GraphProto, weights: Mapping[str, OutputArray]) -> None:
    for tensor in graph.initializer:
        if tensor.external_data:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))


def _constants_to_initializers(graph: onnx.GraphProto) -> None:
    """Move the graph's constants to its initializers; those of subgraphs become tensors."""
    for node in nodes_within(graph.node):
        tensor = constant_tensor(node)
        if tensor is not None and node.attribute[0].name != "value":
            node.attribute[0].CopyFrom(helper.make_attribute("value", tensor))
    kept = []
    for node in graph.node:
        value = constant_tensor(node)
        if value is None:
            kept.append(node)
            continue
        graph.initializer.add().CopyFrom(value)
        graph.initializer[-1].name = node.output[0]
    replace_messages(graph.node, kept)


def _drop_texts(model: onnx.ModelProto) -> None:
    model.DiscardUnknownFields()
    model.domain = model.producer_name = model.producer_version = ""
    del model.training_info[:], model.configuration[:]
    _keep_used_functions(model)
    _drop_texts_of(model)
    for function in model.functions:
        _drop_texts_of(function)
        for value in function.value_info:
            _drop_texts_of(value)
        for attribute in function.attribute_proto:
            attribute.doc_string = ""
        _drop_texts_of_nodes(function.node)
    _drop_texts_of_nodes(model.graph.node)
    _drop_texts_of_graph(model.graph)
    for tensor in tensors_of(model):
        _drop_texts_of(tensor)


def _keep_used_functions(model: onnx.ModelProto) -> None:
    """Remove functions that no node calls, because they contain weights of other layers."""
    used, pending = set[tuple[str, str]](), list(model.graph.node)
    while pending:
        for node in nodes_within([pending.pop()]):
            name = (node.domain, node.op_type)
            if name not in used:
                used.add(name)
                called = [f for f in model.functions if (f.domain, f.name) == name]
                pending += [inner for function in called for inner in function.node]
    kept = [f for f in model.functions if (f.domain, f.name) in used]
    replace_messages(model.functions, kept)


def _drop_texts_of(described: Any) -> None:
    described.doc_string = ""
    del described.metadata_props[:]


def _drop_texts_of_graph(graph: onnx.GraphProto) -> None:
    _drop_texts_of(graph)
    graph.name = "graph"
    del graph.quantization_annotation[:]
    for value in (*graph.input, *graph.output, *graph.value_info):
        _drop_texts_of(value)


def _drop_texts_of_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes_within(nodes):
        _drop_texts_of(node)
        del node.device_configurations[:]
        for attribute in node.attribute:
            attribute.doc_string = ""
        for inner in subgraphs(node):
            _drop_texts_of_graph(inner)


def _reads(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    for node in nodes_within(nodes):
        yield from node.input
        for inner in subgraphs(node):
            yield from (value.name for value in inner.output)


def _rename(nodes: Iterable[onnx.NodeProto], new: Mapping[str, str]) -> None:
    for node in nodes:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
        for inner in subgraphs(node):
            _rename(inner.node, new)
            for value in inner.output:
                value.name = new.get(value.name, value.name)


def without_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without node names and with numbered tensors; inputs and outputs keep
    names."""
    result = copy.deepcopy(model)
    kept = {value.name for value in (*result.graph.input, *result.graph.output)}
    numbers: dict[str, str] = {}

    def new(name: str) -> str:
        is_kept = not name or name in kept
        return name if is_kept else numbers.setdefault(name, f"t{len(numbers)}")

    graphs = [result.graph]
    while graphs:
        graph = graphs.pop()
        sparse = (tensor.values for tensor in graph.sparse_initializer)
        values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer, *sparse)
        for value in values:
            value.name = new(value.name)
        for node in graph.node:
            node.name = ""
            node.input[:] = [new(name) for name in node.input]
            node.output[:] = [new(name) for name in node.output]
            graphs += subgraphs(node)
    return result


def random_like(array: OutputArray, seed: int) -> OutputArray:
    """Return random numbers with the shape, dtype and range of `array`.

    Floats also have the mean and deviation of its finite values.
    """
    random = np.random.default_rng(seed)
    if not array.size:
        return array
    if array.dtype.kind not in "biu":
        wide = array.astype(np.float64).ravel()
        finite = wide[np.isfinite(wide)]
        if not finite.size:
            finite = np.zeros(1)
        least, most = finite.min(), finite.max()
        drawn = random.normal(finite.mean(), finite.std(), array.shape)
        # Not clipped, because the minimum and maximum are values of the original.
        inside = random.uniform(least, most, array.shape)
        floats: OutputArray = np.where((drawn < least) | (drawn > most), inside, drawn)
        return floats.astype(array.dtype)
    low, high = int(array.min()), int(array.max())
    drawn = random.integers(low, high, array.shape, array.dtype, endpoint=True)
    return np.asarray(drawn)
