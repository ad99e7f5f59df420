"""The file's graph: cut it, mark outputs, run subgraphs."""

from __future__ import annotations

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
from gate.onnx_file.reading import attributes, subgraphs
from gate.onnx_file.sessions import open_session, session_options
from gate.onnx_file.tested_file import TestedFile
from gate.policy.runtime_options import OrtSetup
from gate.storage.arrays import OutputArray, rounded, text_digests
from gate.weights.value_graph import inlined

_INLINE = 1024
"""Bytes up to which a constant stays in the graph: shapes and axes are read from there."""

_REFERENCE = "::reference"
"""Ends the name of the input that takes the place of a tensor that was cut."""


@dataclass(frozen=True)
class Piece:
    """A graph to run."""

    model: onnx.ModelProto
    weights: Mapping[str, OutputArray]
    """Initializers that the graph names only."""
    outputs: tuple[str, ...]
    cuts: tuple[str, ...] = ()
    """Tensors that it takes as inputs, under the names of `reference_name`."""


_READ_VALUES = {"Shape": 0, "Size": 0, "CastLike": 1}
"""Number of inputs, from the first, of which an operator reads values; others: all."""

STEPPED = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class DequantizedConstant:
    """A constant that is stored in a few bits."""

    values: OutputArray
    step: OutputArray
    """Difference of neighboring values, in the shape of `values`."""
    clipped: OutputArray
    """True where the stored number is the lowest or highest one of the tensor."""


def _dequantized(
    stored: OutputArray, scale: OutputArray, zero: OutputArray | None, given: Mapping[str, Any]
) -> DequantizedConstant | None:
    """Dequantize a constant as the ONNX operator DequantizeLinear does.

    There is one scale, one along `axis`, or one for each block.
    """
    axis, block = int(given.get("axis", 1)), int(given.get("block_size", 0))
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
    """The nodes of a file in their order; tensors are identified by their names.

    The weights are taken out of the graph once and handed to every session as they lie in memory,
    so that building a session costs milliseconds for a model of any size.
    """

    def __init__(self, candidate: TestedFile) -> None:
        """Raises OnnxFileError, DigestMismatch, StorageError."""
        self._skeleton, self.weights = _read(candidate)
        self.nodes = list(self._skeleton.graph.node)
        self.outputs = tuple(value.name for value in self._skeleton.graph.output)
        self.producer = {name: at for at, node in enumerate(self.nodes) for name in node.output}
        self._needs = [tuple(_reads(node)) for node in self.nodes]
        self.readers: dict[str, list[int]] = {}
        """Places of the nodes that read a tensor."""
        for at, needs in enumerate(self._needs):
            for name in needs:
                self.readers.setdefault(name, []).append(at)
        self.tensors = self._varying(spec.name for spec in candidate.subject.inputs)
        """What the nodes compute from the inputs, in the order of the nodes."""
        self._computed = frozenset(self.tensors)
        self._inputs = tuple(spec.name for spec in candidate.subject.inputs)

    @cached_property
    def _halves(self) -> dict[str, int]:
        """The tensors in half precision, whose references are in float32."""
        try:
            inferred = onnx.shape_inference.infer_shapes(self._skeleton).graph
        except onnx.shape_inference.InferenceError:  # a domain without an opset, as ORT takes it
            return {}
        values = (*inferred.input, *inferred.value_info, *inferred.output)
        kinds = {value.name: value.type.tensor_type.elem_type for value in values}
        return {name: kind for name, kind in kinds.items() if kind in _HALF_KINDS}

    def marked(self, names: Iterable[str]) -> Piece:
        """The whole graph with these tensors as outputs behind its own."""
        outputs = tuple(dict.fromkeys([*self.outputs, *names]))
        return self._piece(range(len(self.nodes)), outputs, {})

    def cut(self, wanted: Iterable[str], cuts: Mapping[str, np.dtype[Any]]) -> Piece:
        """Return the piece of the graph that computes `wanted`, starting at the nearest of `cuts`.

        `cuts` gives the tensors with their dtypes.
        """
        outputs = tuple(dict.fromkeys(wanted))
        return self._piece(sorted(self._between(outputs, cuts)), outputs, cuts)

    def part(self, places: Iterable[int], values: Mapping[str, np.dtype[Any]]) -> Piece | None:
        """Return the piece of these nodes, with those that compute constants for them.

        `values`: tensors with a value, with their dtypes: what the nodes read of these and do not
        compute is an input, and what they compute of these for other nodes is an output. None if
        they compute nothing for others.
        """
        inside, cuts = set(places), dict[str, np.dtype[Any]]()
        ahead = list(inside)
        while ahead:
            for need in self._needs[ahead.pop()]:
                at = self.producer.get(need)
                if at in inside:
                    continue
                if need in values:
                    cuts[need] = values[need]
                elif at is not None:
                    inside.add(at)
                    ahead.append(at)
        produced = {name for at in inside for name in self.nodes[at].output if name}
        outputs = tuple(
            name
            for at in sorted(inside)
            for name in self.nodes[at].output
            if name in values
            and (name in self.outputs or not inside.issuperset(self.readers.get(name, (-1,))))
        )
        kept = {name: kind for name, kind in cuts.items() if name not in produced}
        return self._piece(sorted(inside), outputs, kept) if outputs else None

    def segment(self, name: str, cuts: Container[str]) -> tuple[list[int], list[str]]:
        """Places of the nodes that compute the tensor from the nearest of `cuts`, and these."""
        inside = sorted(self._between([name], cuts))
        met = dict.fromkeys(need for at in inside for need in self._needs[at] if need in cuts)
        return inside, list(met)

    def constants(self, places: Iterable[int]) -> dict[str, OutputArray]:
        """The initializers and constants that these nodes read, also by way of nodes that
        compute constants: exporters put Identity behind weights that are shared."""
        found: dict[str, OutputArray] = {}
        ahead = [
            name
            for place in places
            for name in (
                self._needs[place][:1]
                if self.nodes[place].op_type in STEPPED
                else self._needs[place]
            )
        ]
        while ahead:
            name = ahead.pop()
            if name in self.weights:
                found[name] = self.weights[name]
            elif name in self.producer and name not in self._computed:
                node = self.nodes[self.producer[name]]
                if node.op_type in STEPPED:
                    # Scales and zero points are no weights.
                    stepped = self.dequantized(name)
                    found.update({} if stepped is None else {name: stepped.values})
                    ahead += () if stepped is not None else node.input[:1]
                    continue
                ahead += node.input
                found.update(_constant(node))
        return found

    def constant(self, name: str) -> OutputArray | None:
        """Return an initializer or the value of a Constant; None for other tensors."""
        while name not in self.weights:
            node = self.nodes[self.producer[name]] if name in self.producer else None
            if node is None or node.op_type != "Identity":
                return None if node is None else dict(_constant(node)).get(name)
            name = node.input[0]
        return self.weights[name]

    def dequantized(self, name: str) -> DequantizedConstant | None:
        """Return the constant that DequantizeLinear makes of a stored integer tensor; None if the
        tensor is no such constant."""
        node = self.nodes[self.producer[name]] if name in self.producer else None
        if node is None or node.op_type != "DequantizeLinear":
            return None
        stored = [self.weights.get(each) for each in node.input if each]
        if stored[0] is None or stored[1] is None:
            return None
        zero = stored[2] if len(stored) > 2 else None
        return _dequantized(stored[0], stored[1], zero, attributes(node))

    def sources(self, name: str, among: Container[str], *, steps: int) -> set[str]:
        """Which of the tensors `among` it is computed from, at most so many nodes further up and
        not through another one of them."""
        found: set[str] = set()
        ahead = {name}
        for _ in range(steps):
            producers = {self.producer[need] for need in ahead if need in self.producer}
            needs = {need for at in producers for need in self._needs[at]}
            found |= {need for need in needs if need in among}
            ahead = needs - found
        return found

    def is_constant(self, name: str) -> bool:
        """Return True for what the inputs change at most in shape: a weight that is expanded to
        the batch."""
        return name not in self._from_values

    @cached_property
    def _from_values(self) -> frozenset[str]:
        return frozenset((*self._inputs, *self._varying(self._inputs, shapes=False)))

    def _varying(self, inputs: Iterable[str], *, shapes: bool = True) -> tuple[str, ...]:
        """What is computed from the inputs. `shapes`: also from their shapes and types alone."""
        varying = dict.fromkeys(inputs)
        given = len(varying)
        for node, needs in zip(self.nodes, self._needs, strict=True):
            read = needs if shapes else needs[: _READ_VALUES.get(node.op_type, len(needs))]
            if any(need in varying for need in read):
                varying.update(dict.fromkeys(name for name in node.output if name))
        return tuple(varying)[given:]

    def _between(self, names: Iterable[str], cuts: Container[str]) -> set[int]:
        inside: set[int] = set()
        ahead = [self.producer[name] for name in names if name in self.producer]
        while ahead:
            at = ahead.pop()
            if at not in inside:
                inside.add(at)
                needs = (need for need in self._needs[at] if need not in cuts)
                ahead += [self.producer[need] for need in needs if need in self.producer]
        return inside

    def _piece(
        self, places: Iterable[int], outputs: tuple[str, ...], cuts: Mapping[str, np.dtype[Any]]
    ) -> Piece:
        model = onnx.ModelProto()
        model.CopyFrom(self._skeleton)
        del model.graph.node[:]
        del model.graph.output[:]
        del model.graph.value_info[:]
        met: dict[str, None] = {}
        read = set(outputs)
        for at in places:
            read.update(self._needs[at])
            node = model.graph.node.add()
            node.CopyFrom(self.nodes[at])
            met.update(dict.fromkeys(_exchange(node, cuts)))
        _forget(model.graph, {name for name in self.weights if name not in read})
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        for name in met:
            kind = self._halves.get(name) or helper.np_dtype_to_tensor_dtype(cuts[name])
            model.graph.input.append(
                helper.make_tensor_value_info(reference_name(name), kind, None)
            )
        return Piece(model, self.weights, outputs, tuple(met))


def _forget(graph: onnx.GraphProto, unread: Container[str]) -> None:
    """Leave out weights that no node reads: ONNX Runtime takes no values for them."""
    for listed in (graph.initializer, graph.input):
        kept = [one for one in listed if one.name not in unread]
        del listed[:]
        listed.extend(kept)


def reference_name(tensor: str) -> str:
    """The input that takes the place of a tensor that was cut."""
    return f"{tensor}{_REFERENCE}"


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node reads, including outer tensors that its subgraphs read."""
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        own = {value.name for value in (*graph.input, *graph.initializer)}
        own |= {name for inner in graph.node for name in inner.output}
        for inner in graph.node:
            yield from (name for name in _reads(inner) if name not in own)
        yield from (value.name for value in graph.output if value.name not in own)


def _exchange(node: onnx.NodeProto, cuts: Container[str]) -> Iterator[str]:
    """Let a node read the references instead of the tensors that are cut; yields these."""
    for place, name in enumerate(node.input):
        if name in cuts:
            node.input[place] = reference_name(name)
            yield name
    for graph in subgraphs(node):
        for inner in graph.node:
            yield from _exchange(inner, cuts)


def _constant(node: onnx.NodeProto) -> Iterator[tuple[str, OutputArray]]:
    for attribute in node.attribute:
        if node.op_type == "Constant" and attribute.name == "value":
            yield node.output[0], numpy_helper.to_array(attribute.t)


def _read(candidate: TestedFile) -> tuple[onnx.ModelProto, dict[str, OutputArray]]:
    """The file without its weights, and its weights."""
    data = candidate.verified()
    try:
        if isinstance(data, bytes):
            model = onnx.ModelProto.FromString(data)
        else:
            model = onnx.load(data, load_external_data=False)
        weights: dict[str, OutputArray] = {}
        for tensor in model.graph.initializer:
            array = numpy_helper.to_array(inlined(tensor, candidate))
            weights[tensor.name] = array
            if array.nbytes > _INLINE and array.dtype.kind in "biuf":
                _empty(tensor)
            elif tensor.data_location == onnx.TensorProto.EXTERNAL:
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    except Exception as error:  # protobuf's and onnx's own, without a common base
        raise OnnxFileError(
            f"{candidate.path.name} can't be read as an ONNX graph: {type(error).__name__}: "
            f"{error}. Copy or export it again."
        ) from error
    return model, weights


def _empty(tensor: onnx.TensorProto) -> None:
    """Keep name, dtype and shape, and say that the data is elsewhere."""
    bare = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    bare.data_location = onnx.TensorProto.EXTERNAL
    bare.external_data.add(key="location", value="weights")
    tensor.CopyFrom(bare)


_HALF_KINDS = {onnx.TensorProto.FLOAT16: "float16", onnx.TensorProto.BFLOAT16: "bfloat16"}

_COMPARABLE = ("float", "double", "float16", "int", "uint", "bool")


class SubgraphSession:
    """A session of a piece."""

    def __init__(self, piece: Piece, setup: OrtSetup) -> None:
        """Raise EvidenceError where the provider doesn't load, and what ONNX Runtime raises."""
        options = session_options(
            setup,
            threads=torch.get_num_threads(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        named = {t.name for t in piece.model.graph.initializer if t.external_data}
        # The session reads the arrays where they lie: they live as long as it does.
        self._held = {name: piece.weights[name] for name in named}
        self._values = [onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in self._held.values()]
        options.add_external_initializers(list(self._held), self._values)
        self.cuts = piece.cuts
        """Tensors that it needs references for."""
        self._halves = {
            value.name: _HALF_KINDS[value.type.tensor_type.elem_type]
            for value in piece.model.graph.input
            if value.type.tensor_type.elem_type in _HALF_KINDS
        }
        self._session = open_session(piece.model.SerializeToString(), options, setup)
        self.outputs = tuple(
            value.name for value in self._session.get_outputs() if _is_comparable(value.type)
        )
        """Outputs that are tensors of numbers."""

    def __call__(
        self,
        feed: Mapping[str, OutputArray],
        references: Mapping[str, OutputArray] | None = None,
        *,
        only: Iterable[str] | None = None,
    ) -> dict[str, OutputArray]:
        """Arrays by the names of tensors, texts as digests. `references`: what stands for the cut
        tensors."""
        fed = {**feed, **self.fed(references or {})}
        wanted = list(self.outputs if only is None else only)
        return dict(zip(wanted, map(text_digests, self._session.run(wanted, fed)), strict=True))

    def fed(self, references: Mapping[str, OutputArray]) -> dict[str, OutputArray]:
        """Return what is fed for the cut tensors, by `reference_name`, in the file's dtypes."""
        fed = {}
        for name in self.cuts:
            half = self._halves.get(reference_name(name))
            fed[reference_name(name)] = (
                rounded(references[name], half) if half else references[name]
            )
        return fed


def _is_comparable(kind: str) -> bool:
    return any(kind.startswith(f"tensor({name}") for name in _COMPARABLE)
