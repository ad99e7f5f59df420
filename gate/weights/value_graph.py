"""The graph with resolved names; contents of initializers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from gate.errors import OnnxFileError
from gate.onnx_file.reading import (
    STANDARD_DOMAINS,
    constant_tensor,
    opset_of,
    subgraphs,
    tensors_of,
)
from gate.onnx_file.tested_file import TestedFile

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)

INTEGERS = (
    TensorProto.INT64, TensorProto.INT32, TensorProto.INT16, TensorProto.INT8, TensorProto.UINT8,
    TensorProto.BOOL,
)  # fmt: skip

_MAX_SMALL_SIZE = 1024
"""Maximum size of tensors whose values are kept: shapes, flags and scalars are smaller."""

_CHUNK = 1 << 20

_BITS = {"INT2": 2, "UINT2": 2, "INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4}


@dataclass(frozen=True)
class Initializers:
    """The number of elements of a tensor of floats, and of zero and non-finite ones."""

    elements: int
    zeros: int = 0
    nans: int = 0
    infinities: int = 0

    @classmethod
    def from_array(cls, array: NDArray[Any]) -> Initializers:
        """Count the elements in chunks, which keeps the masks small."""
        flat = array.reshape(-1)
        zeros = nans = infinities = 0
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            zeros += part.size - int(np.count_nonzero(part))
            if not np.isfinite(part).all():
                nans += int(np.isnan(part).sum())
                infinities += int(np.isinf(part).sum())
        return cls(flat.size, zeros, nans, infinities)

    @classmethod
    def from_tensor(cls, tensor: TensorProto, values: NDArray[Any]) -> Initializers:
        """Return the counts for the values of a tensor; only the total if they are not floats."""
        return cls.from_array(values) if tensor.data_type in FLOATS else cls(math.prod(tensor.dims))


class DroppedContents:
    """The counts and notes on tensors whose values were dropped."""

    def __init__(self) -> None:
        self._counted: list[Initializers] = []
        self._notes: list[object] = []

    def contents(self, tensor: TensorProto) -> Initializers:
        """Return the counts of a tensor's values, which may have been dropped since."""
        if is_dropped(tensor):
            return self._counted[int(tensor.external_data[0].value)]
        return Initializers.from_tensor(tensor, numpy_helper.to_array(tensor))

    def note(self, tensor: TensorProto) -> object:
        """Return the note that was stored when a tensor was dropped; None for small tensors."""
        return self._notes[int(tensor.external_data[0].value)] if is_dropped(tensor) else None

    def drop(self, tensor: TensorProto, contents: Initializers, note: object = None) -> None:
        """Drop the values of a tensor; its external location becomes the index of the counts."""
        self._counted.append(contents)
        self._notes.append(note)
        _clear(tensor)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=str(len(self._counted) - 1))


def condense(
    model: onnx.ModelProto,
    folder: Path,
    files: tuple[str, ...],
    *,
    match: Callable[[TensorProto, NDArray[Any]], object] | None = None,
) -> DroppedContents:
    """Drop the values of the large tensors of a model, and load small external tensors.

    match: called with each large tensor before; its result becomes the note of the tensor. Data is
    only read from `files` in `folder`. Raises OnnxFileError for other files.
    """
    dropped = DroppedContents()
    for tensor in tensors_of(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            data = _external_bytes(tensor, folder, files)
            _clear(tensor)
            tensor.raw_data = data
        if math.prod(tensor.dims) <= _MAX_SMALL_SIZE:
            continue
        if tensor.data_type not in (FLOATS if match is None else (*FLOATS, *INTEGERS)):
            dropped.drop(tensor, Initializers(math.prod(tensor.dims)))
            continue
        values = numpy_helper.to_array(tensor)
        note = None if match is None else match(tensor, values)
        dropped.drop(tensor, Initializers.from_tensor(tensor, values), note)
    return dropped


def small_values(tensor: TensorProto) -> NDArray[Any] | None:
    """Return the values of a tensor of a condensed model; None if they were dropped."""
    return None if is_dropped(tensor) else numpy_helper.to_array(tensor)


def size_of(tensor: TensorProto) -> int:
    """Return the size of a tensor's data in bytes; types of less than a byte are packed."""
    elements: int = math.prod(tensor.dims)
    bits = _BITS.get(TensorProto.DataType.Name(tensor.data_type))
    if bits is not None:
        return math.ceil(elements * bits / 8)
    return elements * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def load_data(tensor: TensorProto, candidate: TestedFile) -> TensorProto:
    """Return a tensor with its external data loaded; links of data files are followed.

    Raises OSError, ValueError and OnnxFileError."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return tensor
    result = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    files = candidate.subject.external_data
    result.raw_data = _external_bytes(tensor, candidate.path.parent, files)
    return result


def _external_bytes(tensor: TensorProto, folder: Path, files: tuple[str, ...]) -> bytes:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = PurePosixPath(entries.get("location", "").replace("\\", "/")).as_posix()
    if location not in files:
        raise OnnxFileError(
            f"the tensor {tensor.name} reads its data from {location!r}, expected one of the "
            f"hashed data files {list(files)}. The file was changed. Measure it again."
        )
    with (folder / location).open("rb") as stream:
        stream.seek(int(entries.get("offset") or 0))
        return stream.read(size_of(tensor))


def is_dropped(tensor: TensorProto) -> bool:
    """Return whether `condense` dropped the values; only then a tensor is still external."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def _clear(tensor: TensorProto) -> None:
    """Remove everything except name, dtype and shape."""
    for field, _ in tensor.ListFields():
        if field.name not in ("name", "data_type", "dims"):
            tensor.ClearField(field.name)


_COPYING = ("Identity", "Cast")


class GraphValue(NamedTuple):
    """A value, by its name and the graph that defines it, because branches may reuse names."""

    scope: int
    name: str


@dataclass(frozen=True, eq=False)
class Node:
    """A node with its values; an omitted input or output is None."""

    proto: NodeProto
    location: str
    """`op_type:name`, after the nodes whose subgraphs contain it."""
    inputs: tuple[GraphValue | None, ...]
    outputs: tuple[GraphValue | None, ...]
    branches: tuple[GraphValue, ...]
    """Values that its subgraphs return."""

    @property
    def operator(self) -> str:
        """Return the operator's name in the standard domain, else `domain::op_type`."""
        domain = self.proto.domain
        kind = self.proto.op_type
        return kind if domain in STANDARD_DOMAINS else f"{domain}::{kind}"

    def attribute(self, name: str, default: int) -> int:
        """Return an integer attribute."""
        return next((int(a.i) for a in self.proto.attribute if a.name == name), default)

    def input(self, slot: int) -> GraphValue | None:
        """Return the input in this slot; None if it is omitted."""
        return self.inputs[slot] if slot < len(self.inputs) else None


class ValueGraph:
    """All nodes of a model without functions, those of subgraphs too, in order of execution."""

    def __init__(self, model: onnx.ModelProto) -> None:
        """model: with inferred types. Raises OnnxFileError if no node computes a name."""
        self.nodes: list[Node] = []
        self.tensors: dict[GraphValue, TensorProto] = {}
        """Initializers and constants."""
        self.types: dict[GraphValue, int] = {}
        """Element types, where they are known."""
        self.producers: dict[GraphValue, Node] = {}
        self.readers: defaultdict[GraphValue, list[tuple[Node, int]]] = defaultdict(list)
        """Nodes that read a value, with the slot."""
        self.entries: list[GraphValue] = []
        """Inputs of the graph and of its subgraphs."""
        self.opset = opset_of(model) or 1
        self._scopes = 0
        names = self._add(model.graph, {}, "")
        self.outputs = [names[value.name] for value in model.graph.output]
        self.live_values = self._find_live_values()

    def live(self) -> Iterator[Node]:
        """Return the nodes on which an output of the file depends."""
        return (node for node in self.nodes if self.is_live(node))

    def live_tensors(self) -> Iterator[tuple[GraphValue, TensorProto]]:
        """Return the initializers and constants on which an output of the file depends."""
        return ((v, tensor) for v, tensor in self.tensors.items() if v in self.live_values)

    def is_live(self, node: Node) -> bool:
        """Return whether an output of the file depends on it."""
        return any(value in self.live_values for value in node.outputs)

    def constant(self, value: GraphValue | None) -> NDArray[Any] | None:
        """Return the small constant from which a value is copied or cast, or None."""
        while value is not None:
            if value in self.tensors:
                return small_values(self.tensors[value])
            producer = self.producers.get(value)
            value = producer.input(0) if producer and producer.operator in _COPYING else None
        return None

    def _add(
        self, graph: onnx.GraphProto, outer: Mapping[str, GraphValue], path: str
    ) -> dict[str, Any]:
        """Add a graph or subgraph; return the mapping from its names to values."""
        scope, self._scopes = self._scopes, self._scopes + 1
        names = dict(outer)
        sparse = [tensor.values.name for tensor in graph.sparse_initializer]
        local = [*(v.name for v in graph.input), *(t.name for t in graph.initializer), *sparse]
        names |= {name: GraphValue(scope, name) for name in local}
        self.entries += [names[v.name] for v in graph.input]
        self.tensors |= {GraphValue(scope, tensor.name): tensor for tensor in graph.initializer}
        self.types |= {GraphValue(scope, t.name): t.data_type for t in graph.initializer}
        for info in (*graph.input, *graph.output, *graph.value_info):
            if info.type.HasField("tensor_type"):
                self.types[GraphValue(scope, info.name)] = info.type.tensor_type.elem_type
        for proto in graph.node:
            self._add_node(proto, names, scope, path)
        return names

    def _add_node(
        self, proto: NodeProto, names: dict[str, GraphValue], scope: int, path: str
    ) -> None:
        inputs = tuple(_resolve(name, names) if name else None for name in proto.input)
        outputs = tuple(GraphValue(scope, name) if name else None for name in proto.output)
        label = proto.name or next((name for name in proto.output if name), "")
        location = f"{path}{proto.op_type}:{label}"
        branches = []
        for graph in subgraphs(proto):
            inner_names = self._add(graph, names, f"{location} / ")
            branches += [_resolve(value.name, inner_names) for value in graph.output]
        node = Node(proto, location, inputs, outputs, tuple(branches))
        self.nodes.append(node)
        names |= {value.name: value for value in outputs if value}
        self.producers |= {value: node for value in outputs if value}
        for slot, value in enumerate(inputs):
            if value is not None:
                self.readers[value].append((node, slot))
        constant = constant_tensor(node.proto)
        if constant is not None and outputs[0]:
            self.tensors[outputs[0]] = constant
            self.types[outputs[0]] = constant.data_type

    def _find_live_values(self) -> set[GraphValue]:
        """Return the values on which the outputs of the file depend."""
        reached: set[GraphValue] = set()
        pending = list(self.outputs)
        while pending:
            value = pending.pop()
            if value in reached:
                continue
            reached.add(value)
            producer = self.producers.get(value)
            if producer is not None:
                pending += [v for v in (*producer.inputs, *producer.branches) if v is not None]
        return reached


def _resolve(name: str, names: Mapping[str, GraphValue]) -> GraphValue:
    if name not in names:
        raise OnnxFileError(f"nothing in the graph makes {name!r}. Export the model again.")
    return names[name]
