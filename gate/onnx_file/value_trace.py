"""Trace values inside an ONNX file: NaNs that a runtime loses, and undefined results of Cast."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

from gate.onnx_file.reading import add_outputs, attributes
from gate.onnx_file.tested_file import EditableFile, TestedFile
from gate.storage.arrays import OutputArray

Feed = Mapping[str, OutputArray]

_NAN_DROPPING = {
    "Clip", "Elu", "Erf", "Gelu", "GlobalMaxPool", "HardSigmoid", "HardSwish", "LeakyRelu",
    "LogSoftmax", "Max", "MaxPool", "Min", "Mish", "PRelu", "ReduceMax", "ReduceMin", "Relu",
    "Selu", "Sigmoid", "Softmax", "Softplus", "Tanh", "TopK",
}  # fmt: skip
"""Operators that may return a number for NaN, because their kernels compare or clamp."""

_SOFTMAX = {"Softmax", "LogSoftmax"}

_RECURRENT = {"GRU", "LSTM", "RNN"}
"""Operators of several steps, which turn infinite inputs into NaN in an inner product."""


class _Traced:
    """A session that returns the inputs and outputs of some nodes of the main graph."""

    def __init__(self, file: EditableFile, nodes: list[NodeProto]) -> None:
        self.nodes = nodes
        computed = {name for node in file.model.graph.node for name in node.output}
        self._session: Any = None
        if not nodes:
            return
        edited = copy.deepcopy(file.model)
        read = dict.fromkeys(name for node in nodes for name in (*node.input, *node.output))
        self._names = [name for name in read if name in computed]
        add_outputs(edited.graph, self._names)
        self._session = file.session(edited)

    def run(self, feed: Feed) -> dict[str, OutputArray]:
        """Return the tensors by name. Raises the exceptions of ONNX Runtime."""
        if self._session is None:
            return {}
        arrays = self._session.run(self._names, dict(feed))
        return {**feed, **dict(zip(self._names, arrays, strict=True))}


class NanTrace:
    """Detects NaNs that a runtime loses. Raises the exceptions of onnx."""

    def __init__(self, candidate: TestedFile) -> None:
        file, losing = EditableFile(candidate), _NAN_DROPPING | _RECURRENT
        self._traced = _Traced(file, [n for n in file.model.graph.node if n.op_type in losing])

    def loses_nan(self, feed: Feed) -> bool:
        """Return whether an operator returns a number where its input should result in NaN.

        Such inputs are NaN, infinities in a softmax or recurrent operator, and rows of -inf in a
        softmax. Raises the exceptions of ONNX Runtime.
        """
        arrays = self._traced.run(feed)
        return any(_drops_nan(node, arrays) for node in self._traced.nodes if arrays)


def _drops_nan(node: NodeProto, arrays: Mapping[str, OutputArray]) -> bool:
    x, y = arrays.get(node.input[0]), arrays.get(node.output[0])
    if x is None or y is None or x.dtype.kind != "f" or y.dtype.kind != "f":
        return False
    if node.op_type in _RECURRENT:
        return not np.isfinite(x).all() and not np.isnan(y).any()
    if x.shape != y.shape:
        return bool(np.isnan(x).any() and not np.isnan(y).any())
    expected = np.isnan(x)
    if node.op_type in _SOFTMAX and x.ndim:
        axis = attributes(node).get("axis", -1)
        expected = expected | (x == -np.inf).all(axis=axis, keepdims=True)
        expected = expected | (x == np.inf).any(axis=axis, keepdims=True)
    return bool((expected & ~np.isnan(y)).any())


@dataclass(frozen=True)
class OpenCast:
    """A Cast of floats outside of the range of the integer type, whose result ONNX leaves open."""

    node: str
    dtype: np.dtype[Any]
    open: NDArray[np.bool_]
    """Mask of the elements with an undefined result."""


_VARIANT_RUNS = 6
"""Number of runs with other values in the place of undefined results."""


class OpenCasts:
    """Finds the Cast nodes with undefined results, and the outputs that depend on them."""

    def __init__(self, candidate: TestedFile) -> None:
        """Raises the exceptions of onnx."""
        self._file = EditableFile(candidate)
        nodes = [n for n in self._file.model.graph.node if n.op_type == "Cast" and _integer_type(n)]
        self._traced = _Traced(self._file, nodes)

    @property
    def exist(self) -> bool:
        """Return whether the main graph has a Cast to an integer type."""
        return bool(self._traced.nodes)

    def on(self, feed: Feed) -> list[OpenCast]:
        """Return the casts with undefined results. Raises the exceptions of ONNX Runtime."""
        arrays = self._traced.run(feed)
        return [cast for node in self._traced.nodes if arrays for cast in _open_casts(node, arrays)]

    def variants(self, feed: Feed, casts: list[OpenCast], *, seed: int) -> list[list[OutputArray]]:
        """Return the outputs of the file for several random results of these casts.

        Raises the exceptions of ONNX Runtime."""
        edited = copy.deepcopy(self._file.model)
        arrays = self._traced.run(feed)
        nodes, casts_by_name = list(edited.graph.node), {cast.node: cast for cast in casts}
        edited_nodes: list[NodeProto] = []
        for node in nodes:
            cast = casts_by_name.get(node.output[0])
            if cast is not None and node.op_type == "Cast":
                mask, value, replaced = (f"{node.output[0]}@{part}" for part in ("o", "v", "m"))
                floats = helper.np_dtype_to_tensor_dtype(arrays[node.input[0]].dtype)
                edited.graph.input.extend([
                    helper.make_tensor_value_info(mask, TensorProto.BOOL, cast.open.shape),
                    helper.make_tensor_value_info(value, floats, cast.open.shape),
                ])  # fmt: skip
                edited_nodes.append(
                    helper.make_node("Where", [mask, value, node.input[0]], [replaced])
                )
                node.input[0] = replaced
            edited_nodes.append(node)
        edited.graph.ClearField("node")
        edited.graph.node.extend(edited_nodes)
        inputs = {node.output[0]: node.input[0] for node in self._traced.nodes}
        session = self._file.session(edited)
        runs = []
        for number in range(_VARIANT_RUNS):
            random = np.random.default_rng([seed, number])
            variant = dict(feed)
            for name, cast in casts_by_name.items():
                dtype = arrays[inputs[name]].dtype
                variant[f"{name}@o"] = cast.open
                variant[f"{name}@v"] = _draw_values(number, cast, random).astype(dtype)
            runs.append(session.run(None, variant))
        return runs


def _draw_values(number: int, cast: OpenCast, random: np.random.Generator) -> NDArray[np.float64]:
    """Return zeros for run 0, ones for run 1, then random numbers in the integer's range."""
    if number < 2:
        return np.full(cast.open.shape, float(number))
    limits = np.iinfo(cast.dtype)
    return np.round(random.uniform(float(limits.min), float(limits.max) * 0.99, cast.open.shape))


def _integer_type(node: NodeProto) -> np.dtype[Any] | None:
    """Return the integer type of a Cast; None for other types."""
    to = attributes(node).get("to", TensorProto.UNDEFINED)
    if to in (TensorProto.UNDEFINED, TensorProto.STRING):
        return None
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(to))
    return dtype if dtype.kind in "iu" else None


def _open_casts(node: NodeProto, arrays: Mapping[str, OutputArray]) -> Iterator[OpenCast]:
    x, dtype = arrays.get(node.input[0]), _integer_type(node)
    if x is not None and dtype is not None and x.dtype.kind == "f":
        mask = overflows(x, dtype)
        if mask.any():
            yield OpenCast(node.output[0], dtype, mask)


def overflows(
    values: OutputArray, dtype: np.dtype[Any], *, margin: float = 0.0
) -> NDArray[np.bool_]:
    """Return the mask of floats that an integer type can't represent after truncation, or NaN.

    margin: relative amount by which a float may be larger or smaller.
    """
    limits = np.iinfo(dtype)
    with np.errstate(invalid="ignore"):
        real = values.astype(np.float64)
        low, high = (np.trunc(real + sign * margin * np.abs(real)) for sign in (-1.0, 1.0))
        return np.asarray(~((low >= float(limits.min)) & (high < float(int(limits.max) + 1))))
