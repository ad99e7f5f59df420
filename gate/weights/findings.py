"""Mismatched weights, zeros, non-finite values, precision, training mode."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto

from gate.onnx_file.reading import tensors_of
from gate.records.instruments import GraphCode, GraphFinding
from gate.weights.layouts import arrangements, differing, sampled_share
from gate.weights.model_tensors import ModelTensor, ReferenceObserver, Values, rounded_to
from gate.weights.value_graph import (
    FLOATS,
    DroppedContents,
    GraphValue,
    Initializers,
    Node,
    ValueGraph,
    size_of,
    small_values,
)


class _Region(NamedTuple):
    """The bytes of a data file that a tensor reads."""

    start: int
    end: int
    tensor: str


def external_data(model: onnx.ModelProto, folder: Path) -> Iterator[GraphFinding]:
    """Yield tensors with a wrong length, partly overlapping tensors, and wrong checksums of files.

    Equal regions are tied weights, and a region inside another is a slice. Bytes that no tensor
    reads may be padding or belong to another model that shares the file.
    """
    regions: dict[str, list[_Region]] = defaultdict(list)
    checksums: dict[str, set[str]] = defaultdict(set)
    for tensor in tensors_of(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        file, start = entries.get("location", ""), int(entries.get("offset") or 0)
        needed = size_of(tensor)
        stated = int(entries.get("length") or needed)
        if stated != needed:
            sizes = {"stated": stated, "needed": needed}
            yield finding("external_data", tensor.name, "wrong_length", file=file, **sizes)
        if needed:
            regions[file].append(_Region(start, start + needed, tensor.name))
        if entries.get("checksum"):
            checksums[file].add(entries["checksum"].lower())
    for file, parts in regions.items():
        yield from _overlaps(file, sorted(parts))
    for file, stated_sums in checksums.items():
        yield from _changed_files(folder / file, file, stated_sums)


def _overlaps(file: str, parts: list[_Region]) -> Iterator[GraphFinding]:
    furthest = parts[0]
    for part in parts[1:]:
        if furthest.start < part.start < furthest.end < part.end:
            shared = furthest.end - part.start
            neighbor = {"tensor": furthest.tensor, "file": file}
            yield finding("external_data", part.tensor, "overlap", count=shared, **neighbor)
        if part.end > furthest.end:
            furthest = part


def _changed_files(path: Path, file: str, stated: set[str]) -> Iterator[GraphFinding]:
    """Yield a finding if a file does not have its SHA-1 checksum, which only detects accidents."""
    with path.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha1").hexdigest()
    if stated != {actual}:
        yield finding("external_data", file, "checksum", actual=actual, stated=sorted(stated))


def finding(code: GraphCode, location: str, detail_code: str, **params: Any) -> GraphFinding:
    """Return a finding with the parameters of its text."""
    return GraphFinding(code=code, place=location, detail_code=detail_code, detail_params=params)


_RANDOM_OPERATORS = (
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
)  # fmt: skip


def training_mode(graph: ValueGraph, observer: ReferenceObserver) -> Iterator[GraphFinding]:
    """Yield live nodes in training mode, unless the reference in eval mode does the same."""
    for node in graph.live():
        detail_code = _training_code(graph, node, observer)
        if detail_code is not None:
            yield finding("training_mode", node.location, detail_code)


def _training_code(graph: ValueGraph, node: Node, observer: ReferenceObserver) -> str | None:
    """Return the code of a node's training-mode behavior, or None."""
    if node.operator == "BatchNormalization":
        trains = _trains_batch_norm(graph, node) and not observer.operator_recorder.batch_statistics
        return "batch_statistics" if trains else None
    if node.operator == "Dropout":
        code = _dropout_code(graph, node)
    else:
        code = "random" if node.operator in _RANDOM_OPERATORS else None
    # `draws` runs the reference.
    return code if code and not observer.operator_recorder.draws else None


def _trains_batch_norm(graph: ValueGraph, node: Node) -> bool:
    """Return whether a BatchNormalization node is in training mode.

    Opset 14 and later have an attribute for it, opset 7 and later further outputs, earlier ones
    `is_test`.
    """
    if graph.opset >= 14:
        return bool(node.attribute("training_mode", 0) != 0)
    if graph.opset >= 7:
        return sum(value is not None for value in node.outputs) > 1
    return bool(node.attribute("is_test", 0) == 0)


def _dropout_code(graph: ValueGraph, node: Node) -> str | None:
    """Return the code of a Dropout node in training mode, or None.

    Opset 12 and later have an input for it, opset 7 and later only inference, earlier ones
    `is_test`.
    """
    if graph.opset >= 12:
        ratio = graph.constant(node.input(1))
        if node.input(2) is None or (ratio is not None and not ratio.any()):
            return None
        flag = graph.constant(node.input(2))
        if flag is None:
            return "dropout_flag"
        return "dropout" if flag.any() else None
    if graph.opset >= 7:
        mask = node.outputs[1] if len(node.outputs) > 1 else None
        return "dropout_mask" if mask in graph.live_values else None
    return "dropout" if node.attribute("is_test", 0) == 0 else None


_NARROW = {
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
}

_QUANTIZED = re.compile(r"(.*::)?(\w*[Qq]uantize\w*|Q[A-Z]\w+|\w+(Integer|NBits|Bnb4)\w*)")
"""Operators that compute with or unpack integers of at most 8 bits."""

_ROUNDED_TO_STEPS = ("QuantizeLinear", "DequantizeLinear")
"""Operators that exporters write for fake quantization."""

_BYTE_TYPES = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4)

_MOVING = (
    "Constant", "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice",
    "Split", "Concat", "Gather", "Expand",
)  # fmt: skip

_SHAPE_OPERATORS = ("Shape", "Size")

_MAX_AXES = 8
"""Maximum number of elements of constants that may be sizes or scales, one for each axis."""


def float16(graph: ValueGraph, observer: ReferenceObserver) -> Iterator[GraphFinding]:
    """Yield nodes that round float32 to 16 or 8 bits, and weights that are stored rounded."""
    for code, dtype in _NARROW.items():
        name = str(dtype).removeprefix("torch.")
        nodes = [node for node in graph.live() if _computes_type(graph, node, code)]
        stored = [
            v
            for v, t in graph.live_tensors()
            if t.data_type == code and _is_lossy(t, dtype, observer)
        ]
        if not (nodes or stored) or dtype in observer.operator_recorder.dtypes:
            continue
        if nodes:
            yield _precision_finding("float16", nodes, format=name)
        for value in stored:
            yield finding("float16", value.name, "float16_stored", format=name)


def quantized(graph: ValueGraph, observer: ReferenceObserver) -> Iterator[GraphFinding]:
    """Yield nodes that quantize floats, and weights that are stored quantized.

    A model that was traced in float32 has no such operators. A model that was quantized in PyTorch
    has them, but is not exact either. Integers of the model itself, such as masks, and its own fake
    quantization are not reported, nor are the operators of a quantized reference file.
    """
    model_sizes = observer.byte_tensor_sizes()
    nodes = [node for node in graph.live() if _QUANTIZED.fullmatch(node.operator)]
    rounded = [node for node in nodes if node.operator in _ROUNDED_TO_STEPS]
    if rounded and observer.operator_recorder.fake_quantizes:
        nodes = [node for node in nodes if node not in rounded]
    if nodes and not any(map(_QUANTIZED.fullmatch, observer.onnx_operators())):
        yield _precision_finding("quantized", nodes)
    for value, tensor in graph.live_tensors():
        is_unpacked = any(node.operator == "Cast" for node, _ in graph.readers[value])
        elements = math.prod(tensor.dims)
        is_new = (
            tensor.data_type in _BYTE_TYPES and elements > _MAX_AXES and elements not in model_sizes
        )
        if is_new and is_unpacked:
            yield finding("quantized", value.name, "quantized_stored")


def float64(graph: ValueGraph, observer: ReferenceObserver) -> Iterator[GraphFinding]:
    """Yield nodes that compute with samples or weights in float64; shape arithmetic is ignored."""
    data = _data_values(graph)
    nodes = [
        node
        for node in graph.live()
        if _computes_type(graph, node, TensorProto.DOUBLE)
        and node.operator != "Cast"
        and any(value in data for value in node.outputs)
    ]
    if nodes and torch.float64 not in observer.operator_recorder.dtypes:
        yield _precision_finding("float64", nodes)


def _computes_type(graph: ValueGraph, node: Node, code: int) -> bool:
    """Return whether a node computes values of this type or rounds to it, not only moves them."""
    if node.operator in _MOVING:
        return False
    return any(value is not None and graph.types.get(value) == code for value in node.outputs)


def _is_lossy(tensor: TensorProto, dtype: torch.dtype, observer: ReferenceObserver) -> bool:
    """Return whether no tensor of the model of that size is exact in this format."""
    elements = math.prod(tensor.dims)
    return not any(
        stored.numel() == elements and torch.equal(stored.to(dtype).to(stored.dtype), stored)
        for _, stored in observer.tensors()
    )


def _data_values(graph: ValueGraph) -> set[GraphValue]:
    """Return the values that come from samples or weights, not from shapes and single numbers."""
    data = set(graph.entries)
    for value, tensor in graph.tensors.items():
        few = small_values(tensor)
        if few is None or few.size > _MAX_AXES:
            data.add(value)
    for node in graph.nodes:
        has_branches = bool(node.branches)  # values have other names inside of a subgraph
        reads_data = has_branches or any(value in data for value in node.inputs)
        if reads_data and node.operator not in _SHAPE_OPERATORS:
            data |= {value for value in node.outputs if value is not None}
    return data


def _precision_finding(code: GraphCode, nodes: list[Node], **params: Any) -> GraphFinding:
    """Return one finding for all nodes, located at the first node."""
    operators = most_common(Counter(node.operator for node in nodes))
    counts = {"count": len(nodes), "operators": operators}
    return finding(code, nodes[0].location, f"{code}_nodes", **counts, **params)


def most_common(operators: Counter[str]) -> list[str]:
    """Return the five most frequent operators with their counts: `3 Add`."""
    return [f"{count} {kind}" for kind, count in operators.most_common(5)]


HALF = 0.5

_MIN_SAMPLED_SHARE = 0.25
"""Minimum share of equal elements in a sample for a comparison of all elements."""

_MAX_DRIFT = 0.05
"""Maximum relative difference (rms) of the same weights in a format of few bits."""

_GRID = 1024.0
"""Multiples of 1 / 1024 do not identify a tensor: they may be masks, grids or counts."""


@dataclass(frozen=True)
class WeightMismatch:
    """A constant of the file that is the model's tensor `name` except for `wrong` elements."""

    constant: str
    name: str
    wrong: int
    size: int
    first: tuple[int, ...]
    """Index of the first different element in the file's tensor."""
    largest: float
    """Largest difference; infinite or NaN if one of the elements is."""
    format: str | None = None
    """Format to which the whole tensor was rounded."""
    drift: float | None = None
    """Change of the whole tensor relative to its RMS, if it is small."""

    @property
    def is_mostly_wrong(self) -> bool:
        """Return whether more than half of the elements differ."""
        return self.wrong > HALF * self.size

    @property
    def is_rounded(self) -> bool:
        """Return whether the whole tensor was rounded or changed slightly."""
        return self.format is not None or self.drift is not None

    def finding(self) -> GraphFinding:
        """Return the finding of a report."""
        name = "" if self.constant == self.name else self.name
        if self.format is not None:
            params = {"name": name, "format": self.format}
            return finding("rounded_weights", self.constant, "rounded", **params)
        if self.drift is not None:
            return finding("rounded_weights", self.constant, "moved", name=name, share=self.drift)
        return finding(
            "other_weights",
            self.constant,
            "differs",
            name=name,
            wrong=self.wrong,
            size=self.size,
            first=list(self.first),
            largest=self.largest,
        )


def weight_mismatch(
    constant: str, name: str, values: Values, expected: NDArray[Any]
) -> WeightMismatch:
    """Return how a constant differs from its expected values, which have the constant's shape."""
    return mismatch_at(constant, name, (values, expected), differing(values, expected))


def mismatch_at(
    constant: str, name: str, pair: tuple[Values, NDArray[Any]], wrong: NDArray[np.bool_]
) -> WeightMismatch:
    """Return the mismatch for a known mask of wrong elements."""
    values, expected = pair
    first = np.unravel_index(int(wrong.argmax()), wrong.shape)
    with np.errstate(all="ignore"):
        error = np.abs(values[wrong].astype(np.float64) - expected[wrong])
    is_mostly_wrong = wrong.sum() > HALF * wrong.size
    format_, relative_change = _rounding(values, expected) if is_mostly_wrong else (None, None)
    return WeightMismatch(
        constant=constant,
        name=name,
        wrong=int(wrong.sum()),
        size=wrong.size,
        first=tuple(int(index) for index in first),
        largest=float(error.max()) if error.size else 0.0,
        format=format_,
        drift=relative_change,
    )


def nearest_mismatch(
    constant: str, values: Values, candidates: Iterable[ModelTensor]
) -> WeightMismatch | None:
    """Return the candidate that shares at least half of the constant's elements bit for bit.

    Enough of them must be distinctive; of several, it is the one with the fewest differences.
    """
    mismatches = []
    for stored in candidates:
        for arranged in arrangements(values, stored.values):
            if sampled_share(values, arranged) < _MIN_SAMPLED_SHARE:
                continue
            wrong = differing(values, arranged)
            if wrong.mean() <= HALF and is_distinctive(values[~wrong]):
                owner = _find_owner(stored, wrong)
                mismatches.append(mismatch_at(constant, owner, (values, arranged), wrong))
    return min(mismatches, key=lambda mismatch: mismatch.wrong, default=None)


def rounded_mismatch(
    constant: str, values: Values, candidates: Iterable[ModelTensor]
) -> WeightMismatch | None:
    """Return the candidate whose rounded elements are those of the constant, or None."""
    if values.dtype.kind != "f" or not _looks_rounded(values) or not is_distinctive(values):
        return None
    for stored in candidates:
        for arranged in arrangements(values, stored.values):
            if rounded_to(values, arranged) is not None:
                return weight_mismatch(constant, stored.name, values, arranged)
    return None


def named_mismatch(constant: str, values: Values, stored: ModelTensor) -> WeightMismatch:
    """Return the mismatch with the tensor of the same name, in the most similar orientation."""
    with np.errstate(all="ignore"):
        best = min(
            arrangements(values, stored.values),
            key=lambda arranged: int(differing(values, arranged).sum()),
        )
    name = constant if constant in stored.names else stored.name
    return weight_mismatch(constant, name, values, best)


def is_distinctive(values: Values) -> bool:
    """Return whether values identify a tensor: there are two different non-round numbers."""
    if values.dtype.kind != "f":
        return False
    finite = values[np.isfinite(values)][: 1 << 16]
    scaled = finite.astype(np.float64) * _GRID
    return len(np.unique(finite[scaled != np.rint(scaled)])) > 1


def _find_owner(stored: ModelTensor, wrong: NDArray[np.bool_]) -> str:
    if wrong.shape != stored.shape or not wrong.any():
        return stored.name
    first = np.unravel_index(int(wrong.argmax()), wrong.shape)
    return stored.owner(tuple(int(i) for i in first))


def _looks_rounded(values: Values) -> bool:
    """Return whether the last 12 bits of every mantissa are zero."""
    words = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    return not bool((words[:64] & 0xFFF).any() or (words & 0xFFF).any())


def _rounding(values: Values, expected: NDArray[Any]) -> tuple[str | None, float | None]:
    """Return `WeightMismatch.format` and `WeightMismatch.drift`."""
    if values.dtype.kind != "f":
        return None, None
    name = rounded_to(values, expected.astype(np.float32))
    if name is not None:
        return name, None
    with np.errstate(all="ignore"):
        error = np.sqrt(np.mean((values.astype(np.float64) - expected) ** 2))
        size = np.sqrt(np.mean(expected.astype(np.float64) ** 2))
    return None, float(error / size) if error <= _MAX_DRIFT * size else None


# Only factors of a layer count as weights. Zeros and infinities elsewhere are common: masks of
# -inf, tables that a scatter fills, class tokens before training.
_FACTORS = {
    "Conv": (1,), "ConvTranspose": (1,), "DeformConv": (1,),
    "Gemm": (0, 1), "MatMul": (0, 1),
    "RNN": (1, 2), "GRU": (1, 2), "LSTM": (1, 2),
}  # fmt: skip

_TERMS = {
    "Conv": (2,), "ConvTranspose": (2,), "Gemm": (2,), "RNN": (3,), "GRU": (3,), "LSTM": (3,),
    "BatchNormalization": (1, 2, 3, 4), "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2), "GroupNormalization": (1, 2), "RMSNormalization": (1,),
}  # fmt: skip

_TABLES: dict[str, tuple[int, ...]] = {"Gather": (0,)}
"""Embeddings, where the samples may not reach a row with NaN."""

_REARRANGING = ("Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten")

_ADDED_PARAMETERS = ("bias", "running_mean")
"""Parameters that are added or subtracted, so that folding them never zeroes a weight."""


def zero_initializer(
    graph: ValueGraph, dropped: DroppedContents, observer: ReferenceObserver
) -> Iterator[GraphFinding]:
    """Yield weights of rank 2 or more that are all zero, unless the reference explains it."""
    for value, tensor in _used_floats(graph):
        contents = dropped.contents(tensor)
        if len(tensor.dims) < 2 or contents.elements < 2 or contents.zeros < contents.elements:
            continue
        if _feeds(graph, value, [_FACTORS]) and not _has_zeros(observer, tuple(tensor.dims)):
            shape = list(tensor.dims)
            size = contents.elements
            yield finding("zero_initializer", value.name, "zeros", size=size, shape=shape)


def nonfinite_initializer(
    graph: ValueGraph, dropped: DroppedContents, observer: ReferenceObserver
) -> Iterator[GraphFinding]:
    """Yield weights with NaN or infinity, unless a tensor of that size in the reference has any."""
    for value, tensor in _used_floats(graph):
        contents = dropped.contents(tensor)
        slots = [_FACTORS, _TERMS, *([_TABLES] if contents.nans else [])]
        if not (contents.nans or contents.infinities) or not _feeds(graph, value, slots):
            continue
        if not _has_nonfinite(observer, contents):
            yield finding(
                "nonfinite_initializer",
                value.name,
                "nonfinite",
                size=contents.elements,
                nans=contents.nans,
                infinities=contents.infinities,
            )


def _used_floats(graph: ValueGraph) -> Iterator[tuple[GraphValue, TensorProto]]:
    return ((value, t) for value, t in graph.live_tensors() if t.data_type in FLOATS)


def _feeds(graph: ValueGraph, value: GraphValue, tables: list[dict[str, tuple[int, ...]]]) -> bool:
    """Return whether the value, possibly rearranged, is the input of one of these slots."""
    pending = [value]
    while pending:
        for node, slot in graph.readers[pending.pop()]:
            if any(slot in table.get(node.operator, ()) for table in tables):
                return True
            if slot == 0 and node.operator in _REARRANGING:
                pending += [output for output in node.outputs if output is not None]
    return False


def _has_zeros(observer: ReferenceObserver, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of the reference, or a slice of one, has as many zeros, or a zero
    factor may be folded into a tensor of this shape (the scale of a BatchNorm)."""
    elements = torch.Size(shape).numel()
    for name, tensor in observer.tensors():
        may_contain = tensor.numel() >= elements and tensor.numel() % elements == 0
        multiplies = not name.endswith(_ADDED_PARAMETERS) and 1 not in tensor.shape
        may_scale = multiplies and bool(set(tensor.shape) & set(shape))
        if not (may_contain or may_scale):
            continue
        zeros = tensor.numel() - int(torch.count_nonzero(tensor))
        if (may_contain and zeros >= elements) or (may_scale and zeros == tensor.numel()):
            return True
    return False


def _has_nonfinite(observer: ReferenceObserver, contents: Initializers) -> bool:
    """Return whether a tensor of the reference that may be this one also has NaN or infinity."""
    return any(
        tensor.numel() % contents.elements == 0 and not bool(torch.isfinite(tensor).all())
        for _, tensor in observer.tensors()
    )
