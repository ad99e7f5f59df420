"""The ONNX graph of the file: cut it at tensors, add outputs, run parts of it."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper

from gate.errors import OnnxFileError
from gate.onnx_file.reading import attributes, load_graph, subgraphs
from gate.onnx_file.sessions import open_session, session_options
from gate.onnx_file.tested_file import TestedFile
from gate.policy.runtime_options import OrtSetup
from gate.storage.arrays import OutputArray, rounded, text_digests
from gate.weights.value_graph import load_data

_MAX_INLINE_BYTES = 1024
"""Size in bytes up to which a constant stays in the graph, because shapes and axes are read
there."""

REFERENCE_SUFFIX = "::reference"
"""Suffix of the input that replaces a cut tensor."""


@dataclass(frozen=True)
class Piece:
    """A part of the graph that can be run."""

    model: onnx.ModelProto
    weights: Mapping[str, OutputArray]
    """Initializers whose data is not in the graph."""
    outputs: tuple[str, ...]
    cuts: tuple[str, ...] = ()
    """Tensors that are inputs of the piece, named by `reference_name`."""


_READ_VALUES = {"Shape": 0, "Size": 0, "CastLike": 1}
"""Number of leading inputs whose values the operator reads; other operators read all."""

STEPPED = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class DequantizedConstant:
    """A constant that is stored as quantized integers."""

    values: OutputArray
    step: OutputArray
    """Quantization step of each element, in the shape of `values`."""
    clipped: OutputArray
    """True where the stored integer is the smallest or largest of the tensor."""


def _dequantize(
    stored: OutputArray, scale: OutputArray, zero: OutputArray | None, settings: Mapping[str, Any]
) -> DequantizedConstant | None:
    """Dequantize a constant as the ONNX operator DequantizeLinear does.

    There is one scale for all elements, per index of `axis`, or per block.
    """
    axis, block = int(settings.get("axis", 1)), int(settings.get("block_size", 0))
    factors = [
        scale.astype(np.float64),
        (np.zeros(()) if zero is None else zero).astype(np.float64),
    ]
    spread = []
    for factor in factors:
        if factor.size == 1:
            spread.append(factor.reshape(()))
        elif block:
            repeated = np.repeat(factor, block, axis=axis)
            spread.append(np.take(repeated, range(stored.shape[axis]), axis=axis))
        else:
            shape = [1] * stored.ndim
            shape[axis] = factor.size
            spread.append(factor.reshape(shape))
    integers = stored.astype(np.float64)
    return DequantizedConstant(
        (integers - spread[1]) * spread[0],
        np.broadcast_to(spread[0], stored.shape),
        (integers == integers.min(initial=0.0)) | (integers == integers.max(initial=0.0)),
    )


class FileGraph:
    """The nodes of a file in their order, and the tensors by name.

    The weights are removed from the graph once and passed to each session in memory, so that a
    session opens within milliseconds for a model of any size.
    """

    def __init__(self, candidate: TestedFile) -> None:
        """Read the file. Raises OnnxFileError, DigestMismatch, StorageError."""
        self._skeleton, self.weights = _read_graph(candidate)
        self.nodes = list(self._skeleton.graph.node)
        self.opsets = {opset.domain: opset.version for opset in self._skeleton.opset_import}
        self.outputs = tuple(value.name for value in self._skeleton.graph.output)
        self.producer = {name: i for i, node in enumerate(self.nodes) for name in node.output}
        self._reads = [tuple(_reads(node)) for node in self.nodes]
        self.readers: dict[str, list[int]] = {}
        """Indices of the nodes that read a tensor, by its name."""
        for i, names in enumerate(self._reads):
            for name in names:
                self.readers.setdefault(name, []).append(i)
        self.tensors = self._find_varying(spec.name for spec in candidate.subject.inputs)
        """Tensors that depend on the inputs, in the order of the nodes."""
        self.varying = frozenset(self.tensors)
        self._inputs = tuple(spec.name for spec in candidate.subject.inputs)

    @cached_property
    def _halves(self) -> dict[str, int]:
        """Half-precision tensors; their references are float32."""
        try:
            inferred = onnx.shape_inference.infer_shapes(self._skeleton).graph
        except onnx.shape_inference.InferenceError:
            return {}  # a domain without an opset, which ONNX Runtime accepts
        values = (*inferred.input, *inferred.value_info, *inferred.output)
        kinds = {value.name: value.type.tensor_type.elem_type for value in values}
        return {name: kind for name, kind in kinds.items() if kind in _HALF_KINDS}

    def marked(self, names: Iterable[str]) -> Piece:
        """Return the whole graph with these tensors as additional outputs."""
        outputs = tuple(dict.fromkeys([*self.outputs, *names]))
        return self._subgraph(range(len(self.nodes)), outputs, {})

    def cut(self, names: Iterable[str], cuts: Mapping[str, np.dtype[Any]]) -> Piece:
        """Return the piece of the graph that computes tensors from the nearest of `cuts`.

        `cuts` maps tensors to their dtypes.
        """
        outputs = tuple(dict.fromkeys(names))
        return self._subgraph(sorted(self._nodes_between(outputs, cuts)), outputs, cuts)

    def part(self, indices: Iterable[int], values: Mapping[str, np.dtype[Any]]) -> Piece | None:
        """Return the piece of these nodes, including nodes that compute constants for them.

        values: dtypes of the tensors that have a value. Those that the nodes read but do not
        compute become inputs; those that they compute for other nodes become outputs. None if they
        compute nothing for other nodes.
        """
        selected, cuts = set(indices), dict[str, np.dtype[Any]]()
        pending = list(selected)
        while pending:
            for need in self._reads[pending.pop()]:
                index = self.producer.get(need)
                if index in selected:
                    continue
                if need in values:
                    cuts[need] = values[need]
                elif index is not None:
                    selected.add(index)
                    pending.append(index)
        produced = {name for index in selected for name in self.nodes[index].output if name}
        outputs = tuple(
            name
            for index in sorted(selected)
            for name in self.nodes[index].output
            if name in values
            and (name in self.outputs or not selected.issuperset(self.readers.get(name, (-1,))))
        )
        read_cuts = {name: kind for name, kind in cuts.items() if name not in produced}
        return self._subgraph(sorted(selected), outputs, read_cuts) if outputs else None

    def segment(self, name: str, cuts: Container[str]) -> tuple[list[int], list[str]]:
        """Return the nodes that compute a tensor from the nearest of `cuts`, and these cuts."""
        indices = sorted(self._nodes_between([name], cuts))
        reached = dict.fromkeys(need for i in indices for need in self._reads[i] if need in cuts)
        return indices, list(reached)

    def constants(self, indices: Iterable[int]) -> dict[str, OutputArray]:
        """Return the initializers and constants that these nodes read.

        This includes constants behind nodes that compute constants, because exporters insert
        Identity after shared weights.
        """
        constants: dict[str, OutputArray] = {}
        pending: list[str] = []
        for index in indices:
            needs = self._reads[index]
            pending += needs[:1] if self.nodes[index].op_type in STEPPED else needs
        while pending:
            name = pending.pop()
            if name in self.weights:
                constants[name] = self.weights[name]
            elif name in self.producer and name not in self.varying:
                node = self.nodes[self.producer[name]]
                if node.op_type in STEPPED:
                    # Scales and zero points are not weights.
                    stepped = self.dequantized(name)
                    constants.update({} if stepped is None else {name: stepped.values})
                    pending += () if stepped is not None else node.input[:1]
                    continue
                pending += node.input
                constants.update(_constant_value(node))
        return constants

    def constant(self, name: str) -> OutputArray | None:
        """Return an initializer or the value of a Constant; None for other tensors."""
        while name not in self.weights:
            node = self.nodes[self.producer[name]] if name in self.producer else None
            if node is None or node.op_type != "Identity":
                return None if node is None else dict(_constant_value(node)).get(name)
            name = node.input[0]
        return self.weights[name]

    def dequantized(self, name: str) -> DequantizedConstant | None:
        """Return the constant that DequantizeLinear computes from a stored integer tensor.

        None if the tensor is not such a constant.
        """
        node = self.nodes[self.producer[name]] if name in self.producer else None
        if node is None or node.op_type != "DequantizeLinear":
            return None
        stored = [self.weights.get(name_read) for name_read in node.input if name_read]
        if stored[0] is None or stored[1] is None:
            return None
        zero = stored[2] if len(stored) > 2 else None
        return _dequantize(stored[0], stored[1], zero, attributes(node))

    def sources(self, name: str, among: Container[str], *, steps: int) -> set[str]:
        """Return which tensors of `among` a tensor is computed from.

        The search goes back at most `steps` nodes, and not through another tensor of `among`.
        """
        sources: set[str] = set()
        pending = {name}
        for _ in range(steps):
            producers = {self.producer[need] for need in pending if need in self.producer}
            needs = {need for index in producers for need in self._reads[index]}
            sources |= {need for need in needs if need in among}
            pending = needs - sources
        return sources

    def is_constant(self, name: str) -> bool:
        """Return True if the inputs change at most the shape of a tensor.

        An example is a weight that is expanded to the batch.
        """
        return name not in self._from_values

    @cached_property
    def _from_values(self) -> frozenset[str]:
        return frozenset((*self._inputs, *self._find_varying(self._inputs, shapes=False)))

    def _find_varying(self, inputs: Iterable[str], *, shapes: bool = True) -> tuple[str, ...]:
        """Return the tensors that depend on the inputs. `shapes`: also those that depend on shapes
        only."""
        varying = dict.fromkeys(inputs)
        input_count = len(varying)
        for node, needs in zip(self.nodes, self._reads, strict=True):
            read = needs if shapes else needs[: _READ_VALUES.get(node.op_type, len(needs))]
            if any(need in varying for need in read):
                varying.update(dict.fromkeys(name for name in node.output if name))
        return tuple(varying)[input_count:]

    def _nodes_between(self, names: Iterable[str], cuts: Container[str]) -> set[int]:
        indices: set[int] = set()
        pending = [self.producer[name] for name in names if name in self.producer]
        while pending:
            index = pending.pop()
            if index not in indices:
                indices.add(index)
                needs = (need for need in self._reads[index] if need not in cuts)
                pending += [self.producer[need] for need in needs if need in self.producer]
        return indices

    def _subgraph(
        self, indices: Iterable[int], outputs: tuple[str, ...], cuts: Mapping[str, np.dtype[Any]]
    ) -> Piece:
        model = copy.deepcopy(self._skeleton)
        del model.graph.node[:]
        del model.graph.output[:]
        del model.graph.value_info[:]
        reached: dict[str, None] = {}
        read = set(outputs)
        for index in indices:
            read.update(self._reads[index])
            node = model.graph.node.add()
            node.CopyFrom(self.nodes[index])
            reached.update(dict.fromkeys(_replace_inputs(node, cuts)))
        _drop_weights(model.graph, {name for name in self.weights if name not in read})
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        for name in reached:
            kind = self._halves.get(name) or helper.np_dtype_to_tensor_dtype(cuts[name])
            model.graph.input.append(
                helper.make_tensor_value_info(reference_name(name), kind, None)
            )
        return Piece(model, self.weights, outputs, tuple(reached))


def _drop_weights(graph: onnx.GraphProto, unread: Container[str]) -> None:
    """Remove weights that no node reads, because ONNX Runtime accepts no values for them."""
    for values in (graph.initializer, graph.input):
        kept = [value for value in values if value.name not in unread]
        del values[:]
        values.extend(kept)


def reference_name(tensor: str) -> str:
    """Return the name of the input that replaces a cut tensor."""
    return f"{tensor}{REFERENCE_SUFFIX}"


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node reads, including outer tensors that its subgraphs read."""
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        local = {value.name for value in (*graph.input, *graph.initializer)}
        local |= {name for inner in graph.node for name in inner.output}
        for inner in graph.node:
            yield from (name for name in _reads(inner) if name not in local)
        yield from (value.name for value in graph.output if value.name not in local)


def _replace_inputs(node: onnx.NodeProto, cuts: Container[str]) -> Iterator[str]:
    """Make a node read references instead of cut tensors; yield the cut tensors."""
    for index, name in enumerate(node.input):
        if name in cuts:
            node.input[index] = reference_name(name)
            yield name
    for graph in subgraphs(node):
        for inner in graph.node:
            yield from _replace_inputs(inner, cuts)


def _constant_value(node: onnx.NodeProto) -> Iterator[tuple[str, OutputArray]]:
    for attribute in node.attribute:
        if node.op_type == "Constant" and attribute.name == "value":
            yield node.output[0], numpy_helper.to_array(attribute.t)


def _read_graph(candidate: TestedFile) -> tuple[onnx.ModelProto, dict[str, OutputArray]]:
    """Return the file's graph without its weights, and the weights."""
    data = candidate.verified()
    try:
        model = load_graph(data)
        weights: dict[str, OutputArray] = {}
        for tensor in model.graph.initializer:
            array = numpy_helper.to_array(load_data(tensor, candidate))
            weights[tensor.name] = array
            if array.nbytes > _MAX_INLINE_BYTES and array.dtype.kind in "biuf":
                _remove_data(tensor)
            elif tensor.data_location == onnx.TensorProto.EXTERNAL:
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    except Exception as error:  # errors of protobuf and onnx have no common base
        raise OnnxFileError(
            f"{candidate.path.name} can't be read as an ONNX graph: {type(error).__name__}: "
            f"{error}. Copy or export it again."
        ) from error
    return model, weights


def _remove_data(tensor: onnx.TensorProto) -> None:
    """Keep name, dtype and shape, and mark the data as external."""
    bare = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    bare.data_location = onnx.TensorProto.EXTERNAL
    bare.external_data.add(key="location", value="weights")
    tensor.CopyFrom(bare)


_HALF_KINDS = {onnx.TensorProto.FLOAT16: "float16", onnx.TensorProto.BFLOAT16: "bfloat16"}

_COMPARABLE = (
    "tensor(float", "tensor(double", "tensor(int", "tensor(uint", "tensor(bool", "tensor(string",
)  # fmt: skip


class SubgraphSession:
    """An ONNX Runtime session of a piece."""

    def __init__(self, piece: Piece, setup: OrtSetup) -> None:
        """Open the session. Raises EvidenceError if the provider does not load, or ONNX Runtime's
        errors."""
        options = session_options(
            setup,
            threads=torch.get_num_threads(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        named = {t.name for t in piece.model.graph.initializer if t.external_data}
        # The session reads the arrays in place, so they must stay alive.
        self._weights = {name: piece.weights[name] for name in named}
        self._values = [onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in self._weights.values()]
        options.add_external_initializers(list(self._weights), self._values)
        self.cuts = piece.cuts
        """Tensors whose references must be passed."""
        kinds = {value.name: value.type.tensor_type.elem_type for value in piece.model.graph.input}
        self._halves = {n: _HALF_KINDS[kind] for n, kind in kinds.items() if kind in _HALF_KINDS}
        self._session = open_session(piece.model.SerializeToString(), options, setup)
        returned = self._session.get_outputs()
        self.outputs = tuple(v.name for v in returned if v.type.startswith(_COMPARABLE))
        """Outputs that are tensors."""

    def __call__(
        self,
        feed: Mapping[str, OutputArray],
        references: Mapping[str, OutputArray] | None = None,
        *,
        only: Iterable[str] | None = None,
    ) -> dict[str, OutputArray]:
        """Run the piece. Return arrays by tensor name, strings as digests.

        references: values of the cut tensors.
        """
        inputs = {**feed, **self.cut_inputs(references or {})}
        names = list(self.outputs if only is None else only)
        return dict(zip(names, map(text_digests, self._session.run(names, inputs)), strict=True))

    def cut_inputs(self, references: Mapping[str, OutputArray]) -> dict[str, OutputArray]:
        """Return the inputs for the cut tensors, by `reference_name`, in the file's dtypes."""
        fed = {}
        for name in self.cuts:
            half = self._halves.get(reference_name(name))
            fed[reference_name(name)] = (
                rounded(references[name], half) if half else references[name]
            )
        return fed
