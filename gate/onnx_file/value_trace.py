"""Values inside an ONNX file: a NaN that a runtime loses, and results that ONNX leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

from gate.onnx_file.reading import attributes
from gate.onnx_file.tested_file import EditableFile, TestedFile
from gate.storage.arrays import OutputArray

Feed = Mapping[str, OutputArray]

_LOSING = {
    "Clip", "Elu", "Erf", "Gelu", "GlobalMaxPool", "HardSigmoid", "HardSwish", "LeakyRelu",
    "LogSoftmax", "Max", "MaxPool", "Min", "Mish", "PRelu", "ReduceMax", "ReduceMin", "Relu",
    "Selu", "Sigmoid", "Softmax", "Softplus", "Tanh", "TopK",
}  # fmt: skip
"""Operators that may return a number for NaN, because they compare or clamp in their kernel."""

_SOFTMAX = {"Softmax", "LogSoftmax"}

_RECURRENT = {"GRU", "LSTM", "RNN"}
"""Operators of several steps: infinities in their input become NaN in a product inside."""


class _Traced:
    """A session that returns what goes into some nodes of the main graph, and what comes out."""

    def __init__(self, file: EditableFile, nodes: list[NodeProto]) -> None:
        self.nodes = nodes
        produced = {name for node in file.model.graph.node for name in node.output}
        self._session: Any = None
        if not nodes:
            return
        edited = onnx.ModelProto()
        edited.CopyFrom(file.model)
        stated = {value.name for value in edited.graph.output}
        self._names = [
            name
            for name in dict.fromkeys(n for node in nodes for n in (*node.input, *node.output))
            if name in produced
        ]
        edited.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in self._names if name not in stated
        )
        self._session = file.session(edited)

    def run(self, feed: Feed) -> dict[str, OutputArray]:
        """Return the tensors by name. Raises what ONNX Runtime raises."""
        if self._session is None:
            return {}
        arrays = self._session.run(self._names, dict(feed))
        return {**feed, **dict(zip(self._names, arrays, strict=True))}


class NanTrace:
    """Tells whether a runtime loses a NaN that the file computes. Raises what onnx raises."""

    def __init__(self, candidate: TestedFile) -> None:
        file, losing = EditableFile(candidate), _LOSING | _RECURRENT
        self._traced = _Traced(file, [n for n in file.model.graph.node if n.op_type in losing])

    def loses_nan(self, feed: Feed) -> bool:
        """Return True if an operator returns numbers where its input makes NaN: a NaN, an infinity
        in a softmax or recurrent operator, or nothing but -inf in a softmax.

        Raises what ONNX Runtime raises.
        """
        arrays = self._traced.run(feed)
        return any(_loses(node, arrays) for node in self._traced.nodes if arrays)


def _loses(node: NodeProto, arrays: Mapping[str, OutputArray]) -> bool:
    given, returned = arrays.get(node.input[0]), arrays.get(node.output[0])
    if given is None or returned is None or given.dtype.kind != "f" or returned.dtype.kind != "f":
        return False
    if node.op_type in _RECURRENT:
        return not np.isfinite(given).all() and not np.isnan(returned).any()
    if given.shape != returned.shape:
        return bool(np.isnan(given).any() and not np.isnan(returned).any())
    lost = np.isnan(given)
    if node.op_type in _SOFTMAX and given.ndim:
        axis = attributes(node).get("axis", -1)
        lost = lost | (given == -np.inf).all(axis=axis, keepdims=True)
        lost = lost | (given == np.inf).any(axis=axis, keepdims=True)
    return bool((lost & ~np.isnan(returned)).any())


@dataclass(frozen=True)
class OpenCast:
    """A conversion of floats that the integer type does not hold: ONNX leaves its result open."""

    node: str
    dtype: np.dtype[Any]
    open: NDArray[np.bool_]
    """Which elements."""


_VARIANTS = 6
"""Results that are tried in the place of those that ONNX leaves open."""


class OpenCasts:
    """Finds the conversions whose result ONNX leaves open, and what depends on it."""

    def __init__(self, candidate: TestedFile) -> None:
        """Raises what onnx raises."""
        self._file = EditableFile(candidate)
        nodes = [n for n in self._file.model.graph.node if n.op_type == "Cast" and _target(n)]
        self._traced = _Traced(self._file, nodes)

    @property
    def exist(self) -> bool:
        """Return True if the main graph converts anything to an integer type."""
        return bool(self._traced.nodes)

    def on(self, feed: Feed) -> list[OpenCast]:
        """Return the conversions with such elements. Raises what ONNX Runtime raises."""
        arrays = self._traced.run(feed)
        return [cast for node in self._traced.nodes if arrays for cast in _open(node, arrays)]

    def variants(self, feed: Feed, casts: list[OpenCast], *, seed: int) -> list[list[OutputArray]]:
        """Return the outputs of the file with other results of these conversions, drawn for each
        element. Raises what ONNX Runtime raises."""
        edited = onnx.ModelProto()
        edited.CopyFrom(self._file.model)
        arrays = self._traced.run(feed)
        nodes, of_casts = list(edited.graph.node), {cast.node: cast for cast in casts}
        made: list[NodeProto] = []
        for node in nodes:
            cast = of_casts.get(node.output[0])
            if cast is not None and node.op_type == "Cast":
                mask, value, mended = (f"{node.output[0]}@{part}" for part in ("o", "v", "m"))
                floats = helper.np_dtype_to_tensor_dtype(arrays[node.input[0]].dtype)
                edited.graph.input.extend([
                    helper.make_tensor_value_info(mask, TensorProto.BOOL, cast.open.shape),
                    helper.make_tensor_value_info(value, floats, cast.open.shape),
                ])  # fmt: skip
                made.append(helper.make_node("Where", [mask, value, node.input[0]], [mended]))
                node.input[0] = mended
            made.append(node)
        edited.graph.ClearField("node")
        edited.graph.node.extend(made)
        inputs = {node.output[0]: node.input[0] for node in self._traced.nodes}
        session = self._file.session(edited)
        runs = []
        for number in range(_VARIANTS):
            random = np.random.default_rng([seed, number])
            given = dict(feed)
            for name, cast in of_casts.items():
                dtype = arrays[inputs[name]].dtype
                given[f"{name}@o"] = cast.open
                given[f"{name}@v"] = _values(number, cast, random).astype(dtype)
            runs.append(session.run(None, given))
        return runs


def _values(number: int, cast: OpenCast, random: np.random.Generator) -> NDArray[np.float64]:
    """Zeros, ones, then any numbers that the integer type holds."""
    if number < 2:
        return np.full(cast.open.shape, float(number))
    limits = np.iinfo(cast.dtype)
    return np.round(random.uniform(float(limits.min), float(limits.max) * 0.99, cast.open.shape))


def _target(node: NodeProto) -> np.dtype[Any] | None:
    """The integer type that a Cast returns; None of others."""
    to = attributes(node).get("to", TensorProto.UNDEFINED)
    if to in (TensorProto.UNDEFINED, TensorProto.STRING):
        return None
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(to))
    return dtype if dtype.kind in "iu" else None


def _open(node: NodeProto, arrays: Mapping[str, OutputArray]) -> Iterator[OpenCast]:
    given, dtype = arrays.get(node.input[0]), _target(node)
    if given is not None and dtype is not None and given.dtype.kind == "f":
        beyond = not_held(given, dtype)
        if beyond.any():
            yield OpenCast(node.output[0], dtype, beyond)


def not_held(
    values: OutputArray, dtype: np.dtype[Any], *, margin: float = 0.0
) -> NDArray[np.bool_]:
    """Return which floats an integer type does not hold after truncation; NaN among them.

    `margin`: share of a float by which it may be larger or smaller.
    """
    limits = np.iinfo(dtype)
    with np.errstate(invalid="ignore"):
        real = values.astype(np.float64)
        low, high = (np.trunc(real + sign * margin * np.abs(real)) for sign in (-1.0, 1.0))
        return np.asarray(~((low >= float(limits.min)) & (high < float(int(limits.max) + 1))))
