"""ONNX operators as PyTorch functions, selected by domain, operator and opset."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional

from gate.errors import ModelError

Value = Any
"""A tensor, an array of strings (dtype object), a list of values (a sequence), or None."""

Tensor = torch.Tensor

DTYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32, TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.INT8: torch.int8, TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32, TensorProto.INT64: torch.int64,
    TensorProto.UINT8: torch.uint8, TensorProto.UINT16: torch.uint16,
    TensorProto.UINT32: torch.uint32, TensorProto.UINT64: torch.uint64,
    TensorProto.BOOL: torch.bool,
    TensorProto.COMPLEX64: torch.complex64, TensorProto.COMPLEX128: torch.complex128,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn, TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    TensorProto.INT4: torch.int8, TensorProto.UINT4: torch.uint8,
    TensorProto.INT2: torch.int8, TensorProto.UINT2: torch.uint8,
}  # fmt: skip
"""PyTorch has no 2-bit and 4-bit integers, so they are stored in 8 bits."""

FLOAT8 = {dtype for dtype in DTYPES.values() if dtype.is_floating_point and dtype.itemsize == 1}

RANGES: dict[int, tuple[int, int]] = {
    TensorProto.INT4: (-8, 7), TensorProto.UINT4: (0, 15),
    TensorProto.INT2: (-2, 1), TensorProto.UINT2: (0, 3),
}  # fmt: skip

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""PyTorch has these types, but few operators support them."""


@dataclass(frozen=True)
class OperatorCall:
    """The node being computed: operator, opset of its domain, attributes with the schema's
    defaults."""

    operator: str
    domain: str
    opset: int
    attributes: Mapping[str, Any]
    outputs: int
    """Number of outputs of the node, including those without a name."""
    output_types: tuple[int, ...] = ()
    """ONNX element type of each output; 0: unknown."""
    input_types: tuple[int, ...] = ()
    """ONNX element type of each input; 0: unknown."""
    derived: dict[str, Any] = field(default_factory=dict)
    """Values that a function derives once from the attributes."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or the default if neither the node nor the schema has a value."""
        value = self.attributes.get(name)
        return default if value is None else value


Operator = Callable[..., Value]

TABLE: dict[tuple[str, str], list[tuple[int, Operator]]] = {}
"""Functions by domain and operator, each with the first opset that it supports."""


def operator(*names: str, since: int = 1, domain: str = "") -> Callable[[Operator], Operator]:
    """Register a function for an operator. Use as a decorator.

    The function is called with the `OperatorCall` and the inputs; absent inputs are None, or
    omitted at the end.
    """

    def register(function: Operator) -> Operator:
        for name in names:
            TABLE.setdefault((domain, name), []).append((since, function))
        return function

    return register


def find_operator(domain: str, name: str, opset: int) -> Operator | None:
    """Return the function of an operator at an opset, None if the table has none."""
    candidates = [each for each in TABLE.get((domain, name), ()) if each[0] <= opset]
    return max(candidates, key=lambda each: each[0])[1] if candidates else None


def tensor_from_proto(proto: TensorProto) -> Value:
    """Return a tensor of the same values, or an array of strings."""
    array = numpy_helper.to_array(proto)
    if proto.data_type == TensorProto.STRING:
        return np.vectorize(_text, otypes=[object])(array) if array.size else array.astype(object)
    return from_numpy(array, proto.data_type)


def from_numpy(array: np.ndarray[Any, Any], elem_type: int = 0) -> Tensor:
    """Return a tensor of an array, including the dtypes of ml_dtypes."""
    dtype = DTYPES.get(elem_type)
    if dtype in FLOAT8:
        return torch.from_numpy(array.view(np.uint8).copy()).view(dtype)
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(dtype)
    if array.dtype.kind not in "biufc":
        array = array.astype(np.int8 if elem_type in (TensorProto.INT4, TensorProto.INT2)
                             else np.uint8 if dtype == torch.uint8 else np.float32)  # fmt: skip
    copied = np.array(array, copy=True, order="C")
    # ONNX Runtime returns uint64 as ulonglong, which torch does not take.
    return torch.from_numpy(copied.view(np.uint64) if copied.dtype == np.uint64 else copied)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def to_numpy(value: Value) -> np.ndarray[Any, Any]:
    """Return the array of a tensor; strings are unchanged."""
    if isinstance(value, np.ndarray):
        return value
    if value.dtype == torch.bfloat16 or value.dtype in FLOAT8:
        value = value.float()
    array: np.ndarray[Any, Any] = value.detach().cpu().contiguous().numpy()
    return array


def integers(value: Value) -> list[int]:
    """Return the elements of a tensor or attribute as ints; an empty list for None."""
    if value is None:
        return []
    if isinstance(value, Tensor):
        return [int(each) for each in value.reshape(-1).tolist()]
    return [int(each) for each in value]


def scalar(value: Value) -> Any:
    """Return the only element of a tensor or array."""
    return value.reshape(-1)[0].item() if isinstance(value, Tensor) else value.reshape(-1)[0]


def is_text(value: Value) -> bool:
    """Return True for an array of strings."""
    return isinstance(value, np.ndarray)


# Elementwise.

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Neg": torch.neg, "Sign": torch.sign, "Floor": torch.floor,
    "Ceil": torch.ceil, "Round": torch.round, "Sqrt": torch.sqrt, "Exp": torch.exp,
    "Log": torch.log, "Sin": torch.sin, "Cos": torch.cos, "Tan": torch.tan, "Asin": torch.asin,
    "Acos": torch.acos, "Atan": torch.atan, "Sinh": torch.sinh, "Cosh": torch.cosh,
    "Asinh": torch.asinh, "Acosh": torch.acosh, "Atanh": torch.atanh, "Erf": torch.erf,
    "Reciprocal": torch.reciprocal, "Not": torch.logical_not, "IsNaN": torch.isnan,
    "Sigmoid": torch.sigmoid, "Softsign": functional.softsign, "Tanh": torch.tanh,
    "Relu": torch.relu, "HardSwish": functional.hardswish, "Mish": functional.mish,
    "BitwiseNot": torch.bitwise_not, "Det": torch.linalg.det,
}  # fmt: skip

_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "And": torch.logical_and,
    "Or": torch.logical_or, "Xor": torch.logical_xor, "Greater": torch.gt, "Less": torch.lt,
    "GreaterOrEqual": torch.ge, "LessOrEqual": torch.le, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor, "MatMul": torch.matmul,
}  # fmt: skip

_VARIADIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add,
}  # fmt: skip

_WITH_ATTRIBUTES: dict[str, Operator] = {
    "Mod": lambda call, a, b: torch.fmod(a, b) if call.get("fmod", 0) else torch.remainder(a, b),
    "LeakyRelu": lambda call, x: functional.leaky_relu(x, call.get("alpha", 0.01)),
    "PRelu": lambda _call, x, slope: torch.where(x < 0, x * slope, x),
    "ThresholdedRelu": lambda call, x: torch.where(
        x > call.get("alpha", 1.0), x, torch.zeros_like(x)
    ),
    "HardSigmoid": lambda call, x: (call.get("alpha", 0.2) * x + call.get("beta", 0.5)).clamp(
        0.0, 1.0
    ),
    "Elu": lambda call, x: functional.elu(x, call.get("alpha", 1.0)),
    "Celu": lambda call, x: functional.celu(x, call.get("alpha", 1.0)),
    "Gelu": lambda call, x: functional.gelu(x, approximate=call.get("approximate", "none")),
    "Swish": lambda call, x: x * torch.sigmoid(call.get("alpha", 1.0) * x),
}
"""Other operators that are one expression."""


def _register_elementwise() -> None:
    for name, unary in _UNARY.items():
        operator(name)(lambda _call, x, f=unary: f(x))
    for name, binary in _BINARY.items():
        operator(name)(lambda _call, a, b, f=binary: f(a, b))
    for name, variadic in _VARIADIC.items():
        operator(name)(lambda _call, *values, f=variadic: reduce(f, values))
    for name, function in _WITH_ATTRIBUTES.items():
        operator(name)(function)


_register_elementwise()


@operator("Softplus")
def softplus(_call: OperatorCall | None, x: Tensor) -> Tensor:
    """Return log(1 + exp(x)). Beyond 40 it equals x even in float64; from 89 on, exp overflows."""
    return functional.softplus(x, threshold=40.0)


@operator("Equal")
def _equal(_call: OperatorCall, a: Value, b: Value) -> Tensor:
    return torch.from_numpy(np.asarray(a == b, bool)) if is_text(a) else torch.eq(a, b)


@operator("Div")
def _div(_call: OperatorCall, a: Tensor, b: Tensor) -> Tensor:
    are_integers = not a.is_floating_point() and not a.is_complex()
    return torch.div(a, b, rounding_mode="trunc" if are_integers else None)


@operator("Pow")
def _pow(_call: OperatorCall, a: Tensor, b: Tensor) -> Tensor:
    if not a.is_floating_point() and not b.is_floating_point() and bool((b < 0).any()):
        b = b.double()
    return torch.pow(a, b).to(a.dtype)


@operator("BitShift")
def _bit_shift(call: OperatorCall, a: Tensor, b: Tensor) -> Tensor:
    left = call.get("direction") == "LEFT"
    return torch.bitwise_left_shift(a, b) if left else torch.bitwise_right_shift(a, b)


@operator("Mean")
def _mean(_call: OperatorCall, *values: Tensor) -> Tensor:
    return reduce(torch.add, values) / len(values)


@operator("Selu")
def _selu(call: OperatorCall, x: Tensor) -> Tensor:
    alpha, gamma = call.get("alpha"), call.get("gamma")
    return torch.where(x > 0, gamma * x, gamma * alpha * torch.expm1(x.clamp(max=0.0)))


@operator("Shrink")
def _shrink(call: OperatorCall, x: Tensor) -> Tensor:
    bias, edge = call.get("bias", 0.0), call.get("lambd", 0.5)
    shrunk = torch.where(x < -edge, x + bias, torch.where(x > edge, x - bias, torch.zeros_like(x)))
    return shrunk.to(x.dtype)


@operator("IsInf")
def _is_inf(call: OperatorCall, x: Tensor) -> Tensor:
    below = call.get("detect_negative", 1) == 1
    above = call.get("detect_positive", 1) == 1
    return torch.isinf(x) & (((x > 0) & above) | ((x < 0) & below))


@operator("Clip")
def _clip_by_attributes(call: OperatorCall, x: Tensor) -> Tensor:
    low, high = call.attributes.get("min"), call.attributes.get("max")
    return x if low is None and high is None else torch.clamp(x, low, high)


@operator("Clip", since=11)
def _clip(
    _call: OperatorCall, x: Tensor, low: Tensor | None = None, high: Tensor | None = None
) -> Tensor:
    if low is not None:
        x = torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


@operator("Where")
def _where(_call: OperatorCall, condition: Tensor, a: Value, b: Value) -> Value:
    if is_text(a):
        return np.where(condition.numpy(), a, b)
    return torch.where(condition, a, b)


def cast(x: Value, elem_type: int, *, saturate: bool = True) -> Value:  # noqa: PLR0911
    """Return a value converted to another ONNX element type."""
    if elem_type == TensorProto.STRING:
        return x if is_text(x) else _to_text(x)
    dtype = DTYPES.get(elem_type)
    if dtype is None:
        raise ModelError(f"PyTorch has no type for {TensorProto.DataType.Name(elem_type)}.")
    if is_text(x):
        kind = np.float64 if dtype.is_floating_point else np.int64
        numbers = [(float if kind is np.float64 else int)(each) for each in x.reshape(-1)]
        return torch.from_numpy(np.array(numbers, kind).reshape(x.shape)).to(dtype)
    if dtype == torch.bool:
        return x != 0
    if dtype in FLOAT8:
        return _to_float8(x, dtype, saturate=saturate)
    if elem_type in RANGES:
        low, high = RANGES[elem_type]
        wide = x.to(torch.int64)
        return ((wide - low) % (high - low + 1) + low).to(dtype)
    if x.is_floating_point() and dtype in UNSIGNED:
        return x.to(torch.int64).to(dtype)
    return x.to(dtype)


def _to_float8(x: Tensor, dtype: torch.dtype, *, saturate: bool) -> Tensor:
    most = torch.finfo(dtype).max
    wide = x.float()
    rounded = wide.clamp(-most, most) if saturate else wide
    return torch.where(wide.isnan(), wide, rounded).to(dtype)


def _to_text(x: Tensor) -> np.ndarray[Any, Any]:
    array = to_numpy(x)
    text = [_number(each) for each in array.reshape(-1).tolist()]
    return np.array(text, object).reshape(array.shape)


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "NaN"
    return f"{value:.8g}".upper() if math.isinf(value) else f"{value:.8g}"


@operator("Cast")
def _cast(call: OperatorCall, x: Value) -> Value:
    return cast(x, call.get("to"), saturate=bool(call.get("saturate", 1)))


@operator("CastLike")
def _cast_like(call: OperatorCall, x: Value, like: Value) -> Value:
    if call.input_types[1:] and call.input_types[1]:
        return cast(x, call.input_types[1], saturate=bool(call.get("saturate", 1)))
    return x.to(like.dtype)


@operator("BitCast")
def _bit_cast(call: OperatorCall, x: Tensor) -> Tensor:
    stated = DTYPES.get(call.input_types[0]) if call.input_types else None
    x = x if stated is None else x.to(stated)  # the float64 reference widens it
    return x.view(DTYPES[call.get("to")])


# Shapes.


@operator("Identity", "Dropout", "Optional", "OptionalGetElement")
def _identity(_call: OperatorCall, x: Value = None) -> Value:
    return x


@operator("Dropout", since=7)
def _dropout(
    call: OperatorCall, x: Tensor, _ratio: Tensor | None = None, training: Tensor | None = None
) -> Value:
    if training is not None and scalar(training) and (_ratio is None or scalar(_ratio) != 0):
        raise ModelError("Dropout in training mode draws random numbers, so no two runs agree.")
    mask = torch.ones(x.shape, dtype=torch.bool if call.opset >= 10 else x.dtype)
    return (x, mask)[: max(call.outputs, 1)]


@operator("Shape")
def _shape(call: OperatorCall, x: Value) -> Tensor:
    sizes = list(x.shape)[call.get("start", 0) : call.get("end", len(x.shape))]
    return torch.tensor(sizes, dtype=torch.int64)


@operator("Size")
def _size(_call: OperatorCall, x: Value) -> Tensor:
    return torch.tensor(math.prod(x.shape), dtype=torch.int64)


@operator("Reshape")
def _reshape(call: OperatorCall, x: Value, shape: Tensor) -> Value:
    sizes = integers(shape)
    if not call.get("allowzero", 0):
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(tuple(sizes))


@operator("Flatten")
def _flatten(call: OperatorCall, x: Value) -> Value:
    axis = call.get("axis", 1)
    axis = axis + len(x.shape) if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Transpose")
def _transpose(call: OperatorCall, x: Value) -> Value:
    order = call.get("perm") or range(len(x.shape) - 1, -1, -1)
    return np.transpose(x, tuple(order)) if is_text(x) else x.permute(tuple(order))


def resolve_axes(call: OperatorCall, axes: Value) -> list[int] | None:
    """Return the axes, from an input or an attribute; None if neither is present."""
    if axes is not None:
        return integers(axes)
    stated = call.attributes.get("axes")
    return None if stated is None else integers(stated)


@operator("Squeeze")
def _squeeze(call: OperatorCall, x: Value, axes: Tensor | None = None) -> Value:
    stated = resolve_axes(call, axes)
    rank = len(x.shape)
    squeezed = stated or [i for i in range(rank) if x.shape[i] == 1]
    gone = {axis % rank for axis in squeezed}
    return x.reshape([size for i, size in enumerate(x.shape) if i not in gone])


@operator("Unsqueeze")
def _unsqueeze(call: OperatorCall, x: Value, axes: Tensor | None = None) -> Value:
    added = resolve_axes(call, axes) or []
    rank = len(x.shape) + len(added)
    new, sizes = {axis % rank for axis in added}, iter(x.shape)
    return x.reshape([1 if i in new else next(sizes) for i in range(rank)])


@operator("Expand")
def _expand(_call: OperatorCall, x: Value, shape: Tensor) -> Value:
    target_shape = np.broadcast_shapes(tuple(x.shape), tuple(integers(shape)))
    return np.broadcast_to(x, target_shape) if is_text(x) else x.expand(target_shape)


@operator("Tile")
def _tile(_call: OperatorCall, x: Value, repeats: Tensor) -> Value:
    return np.tile(x, integers(repeats)) if is_text(x) else x.tile(integers(repeats))


@operator("Concat")
def _concat(call: OperatorCall, *values: Value) -> Value:
    axis = call.get("axis", 1)
    return np.concatenate(values, axis) if is_text(values[0]) else torch.cat(values, axis)


@operator("Split")
def _split(call: OperatorCall, x: Value, split: Tensor | None = None) -> Value:
    axis = call.get("axis", 0)
    sizes = integers(split) or integers(call.get("split"))
    if not sizes:
        count = call.get("num_outputs") or call.outputs
        step = -(-x.shape[axis] // count)
        sizes = [max(min(step, x.shape[axis] - i * step), 0) for i in range(count)]
    if is_text(x):
        return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))
    return tuple(torch.split(x, sizes, axis))


@operator("Slice")
def _slice(
    call: OperatorCall,
    x: Value,
    starts: Value = None,
    ends: Value = None,
    axes: Value = None,
    steps: Value = None,
) -> Value:
    first, last = (
        integers(call.get(name) if value is None else value)
        for name, value in (("starts", starts), ("ends", ends))
    )
    stated_axes = resolve_axes(call, axes)
    strides = integers(steps) or [1] * len(first)
    sliced_axes = list(range(len(first))) if stated_axes is None else stated_axes
    cuts: list[Any] = [slice(None)] * len(x.shape)
    flips: list[int] = []
    for axis, start, stop, step in zip(sliced_axes, first, last, strides, strict=True):
        axis = axis % len(x.shape)  # noqa: PLW2901
        size = x.shape[axis]
        if step > 0 or is_text(x):
            cuts[axis] = slice(start, None if step < 0 and stop < -size else stop, step)
            continue
        chosen = range(size)[slice(start, None if stop < -size else stop, step)]
        # PyTorch has no negative steps, so the same elements are sliced forward and flipped.
        cuts[axis] = slice(chosen[-1], chosen[0] + 1, -step) if chosen else slice(0, 0)
        flips.append(axis)
    cut = x[tuple(cuts)]
    return cut.flip(flips) if flips else cut


def _nonnegative(index: Tensor, size: int) -> Tensor:
    """Return nonnegative indices; negative ones count from the end."""
    index = index.to(torch.int64)
    return torch.where(index < 0, index + size, index)


@operator("Gather")
def _gather(call: OperatorCall, x: Value, index: Tensor) -> Value:
    axis = call.get("axis", 0) % len(x.shape)
    kept = _nonnegative(index, x.shape[axis])
    if is_text(x):
        return np.take(x, kept.numpy(), axis)
    selected = torch.index_select(x, axis, kept.reshape(-1))
    return selected.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


@operator("GatherElements")
def _gather_elements(call: OperatorCall, x: Value, index: Tensor) -> Value:
    axis = call.get("axis", 0) % len(x.shape)
    kept = _nonnegative(index, x.shape[axis])
    if is_text(x):
        return np.take_along_axis(x, kept.numpy(), axis)
    return torch.gather(x, axis, kept)


@operator("GatherND")
def _gather_nd(call: OperatorCall, x: Value, index: Tensor) -> Value:
    outer, depth = call.get("batch_dims", 0), index.shape[-1]
    batch = tuple(x.shape[:outer])
    kept = index.to(torch.int64).reshape(math.prod(batch), -1, depth)
    flat = x.reshape(math.prod(batch), *x.shape[outer:])
    rows = torch.arange(kept.shape[0]).reshape(-1, 1).expand(kept.shape[:2])
    indices = [rows, *kept.unbind(-1)]
    selected = flat[tuple(each.numpy() for each in indices) if is_text(x) else tuple(indices)]
    return selected.reshape((*index.shape[:-1], *x.shape[outer + depth :]))


_REDUCTIONS = {"add": "sum", "mul": "prod", "min": "amin", "max": "amax"}


@operator("ScatterElements", "Scatter")
def _scatter_elements(call: OperatorCall, x: Value, index: Tensor, updates: Value) -> Value:
    axis = call.get("axis", 0) % len(x.shape)
    kept = _nonnegative(index, x.shape[axis])
    reduction = call.get("reduction", "none")
    if is_text(x):
        changed = x.copy()
        np.put_along_axis(changed, kept.numpy(), updates, axis)
        return changed
    if reduction == "none":
        return torch.scatter(x, axis, kept, updates)
    return torch.scatter_reduce(x, axis, kept, updates, _REDUCTIONS[reduction])


@operator("ScatterND")
def _scatter_nd(call: OperatorCall, x: Value, index: Tensor, updates: Value) -> Value:
    depth, reduction = index.shape[-1], call.get("reduction", "none")
    outer, inner = tuple(x.shape[:depth]), tuple(x.shape[depth:])
    sizes = [math.prod(outer[i + 1 :]) for i in range(depth)]
    kept = [_nonnegative(indices, outer[i]) for i, indices in enumerate(index.unbind(-1))]
    rows = sum((indices * size for indices, size in zip(kept, sizes, strict=True)),
               torch.zeros(index.shape[:-1], dtype=torch.int64)).reshape(-1)  # fmt: skip
    if is_text(x):
        changed = x.copy().reshape(math.prod(outer), -1)
        changed[rows.numpy()] = updates.reshape(len(rows), -1)
        return changed.reshape(x.shape)
    width = math.prod(inner)
    flat, new = x.reshape(-1, width), updates.reshape(len(rows), width)
    targets = rows.reshape(-1, 1).expand(-1, width)
    if reduction == "none":
        return torch.scatter(flat, 0, targets, new).reshape(x.shape)
    return torch.scatter_reduce(flat, 0, targets, new, _REDUCTIONS[reduction]).reshape(x.shape)


@operator("TensorScatter")
def _tensor_scatter(
    call: OperatorCall, cache: Tensor, update: Tensor, write: Tensor | None = None
) -> Tensor:
    axis, changed = call.get("axis", -2) % cache.ndim, cache.clone()
    starts = [0] * len(cache) if write is None else integers(write)
    size, count = cache.shape[axis], update.shape[axis]
    for row, start in enumerate(starts):
        positions = torch.arange(count) + start
        positions = positions % size if call.get("mode", "linear") == "circular" else positions
        changed[row].index_copy_(axis - 1, positions, update[row])
    return changed


@operator("ConstantOfShape")
def _constant_of_shape(call: OperatorCall, shape: Tensor) -> Tensor:
    value = call.get("value")
    filled = torch.zeros(1) if value is None else tensor_from_proto(value)
    return torch.full(integers(shape), scalar(filled), dtype=filled.dtype)


@operator("EyeLike")
def _eye_like(call: OperatorCall, x: Tensor) -> Tensor:
    elem_type = call.get("dtype")
    rows, columns = x.shape
    ahead = torch.arange(columns).reshape(1, -1) - torch.arange(rows).reshape(-1, 1)
    return (ahead == call.get("k", 0)).to(DTYPES[elem_type] if elem_type else x.dtype)


@operator("Range")
def _range(_call: OperatorCall, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    count = math.ceil((scalar(limit) - scalar(start)) / scalar(delta))
    return start.reshape(()) + torch.arange(max(count, 0)).to(start.dtype) * delta.reshape(())


@operator("OneHot")
def _onehot(call: OperatorCall, index: Tensor, depth: Tensor, values: Value) -> Value:
    count = int(scalar(depth))
    axis = call.get("axis", -1)
    axis = axis + index.ndim + 1 if axis < 0 else axis
    indices = index.to(torch.int64)
    kept = torch.where(indices < 0, indices + count, indices).unsqueeze(axis)
    shape = [1] * (index.ndim + 1)
    shape[axis] = count
    hot = kept == torch.arange(count).reshape(shape)
    if is_text(values):
        return np.where(hot.numpy(), values[1], values[0])
    return torch.where(hot, values[1], values[0])


@operator("Trilu")
def _trilu(call: OperatorCall, x: Tensor, k: Tensor | None = None) -> Tensor:
    diagonal = 0 if k is None else int(scalar(k))
    return torch.triu(x, diagonal) if call.get("upper", 1) else torch.tril(x, diagonal)


@operator("NonZero")
def _non_zero(_call: OperatorCall, x: Tensor) -> Tensor:
    return torch.nonzero(x if x.ndim else x.reshape(1)).T


@operator("Compress")
def _compress(call: OperatorCall, x: Value, condition: Tensor) -> Value:
    axis, kept = call.attributes.get("axis"), torch.nonzero(condition).reshape(-1)
    if axis is None:
        x, axis = x.reshape(-1), 0
    return np.take(x, kept.numpy(), axis) if is_text(x) else torch.index_select(x, axis, kept)


@operator("Unique")
def _unique(call: OperatorCall, x: Value) -> Value:
    axis = call.attributes.get("axis")
    array = to_numpy(x)
    values, first, inverse, counts = np.unique(
        array.astype(str) if is_text(x) else array, True, True, True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not call.get("sorted", 1):
        order = np.argsort(first, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        values = np.take(values, order, 0 if axis is None else axis)
        first, counts, inverse = first[order], counts[order], rank[inverse]
    unique = values.astype(object) if is_text(x) else torch.from_numpy(values)
    rest = (torch.from_numpy(each.astype(np.int64)) for each in (first, inverse, counts))
    return (unique, *rest)[: call.outputs]


@operator("DepthToSpace")
def _depth_to_space(call: OperatorCall, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b = call.get("blocksize")
    if call.get("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(x, b)
    parts = x.reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // b**2, h * b, w * b)


@operator("SpaceToDepth")
def _space_to_depth(call: OperatorCall, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b = call.get("blocksize")
    parts = x.reshape(n, c, h // b, b, w // b, b)
    order = (0, 1, 3, 5, 2, 4) if call.get("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)
    return parts.permute(*order).reshape(n, c * b * b, h // b, w // b)


@operator("ReverseSequence")
def _reverse_sequence(call: OperatorCall, x: Tensor, lengths: Tensor) -> Tensor:
    time, batch = call.get("time_axis", 0), call.get("batch_axis", 1)
    moved = x.movedim((batch, time), (0, 1))
    position = torch.arange(moved.shape[1]).reshape(1, -1)
    count = lengths.to(torch.int64).reshape(-1, 1)
    back = torch.where(position < count, count - 1 - position, position)
    rows = torch.arange(moved.shape[0]).reshape(-1, 1)
    return moved[rows, back].movedim((0, 1), (batch, time))


@operator("Pad")
def _pad(
    call: OperatorCall,
    x: Value,
    pads: Tensor | None = None,
    value: Tensor | None = None,
    axes: Tensor | None = None,
) -> Value:
    widths = integers(pads if pads is not None else call.get("pads"))
    rank = len(x.shape)
    over = [axis % rank for axis in integers(axes)] if axes is not None else list(range(rank))
    before, after = [0] * rank, [0] * rank
    for number, axis in enumerate(over):
        before[axis], after[axis] = widths[number], widths[number + len(over)]
    mode = call.get("mode", "constant")
    if mode == "constant":
        filling = call.get("value", 0.0) if value is None else scalar(value)
        flat = [w for axis in reversed(range(rank)) for w in (before[axis], after[axis])]
        if x.dtype == torch.bool:
            return functional.pad(x.to(torch.uint8), flat, value=int(filling)).bool()
        return functional.pad(x, flat, value=filling)
    for axis in range(rank):
        if before[axis] or after[axis]:
            first, last = max(-before[axis], 0), x.shape[axis] - max(-after[axis], 0)
            size = last - first
            indices = np.arange(-max(before[axis], 0), size + max(after[axis], 0))
            indices = first + _fold_indices(indices, size, mode)
            x = torch.index_select(x, axis, torch.from_numpy(indices))
    return x


def _fold_indices(indices: np.ndarray[Any, Any], size: int, mode: str) -> np.ndarray[Any, Any]:
    if mode == "edge":
        return indices.clip(0, size - 1)
    if mode == "wrap":
        return indices % size
    period = max(2 * size - 2, 1)
    folded = indices % period
    return np.where(folded < size, folded, period - folded)


@operator("CenterCropPad")
def _center_crop_pad(call: OperatorCall, x: Tensor, shape: Tensor) -> Tensor:
    over = call.get("axes") or range(x.ndim)
    for axis, target in zip(over, integers(shape), strict=True):
        extra = x.shape[axis] - target
        if extra > 0:
            x = x.narrow(axis, extra // 2, target)
        elif extra < 0:
            flat = [0] * (2 * x.ndim)
            after = 2 * (x.ndim - 1 - axis % x.ndim)
            flat[after], flat[after + 1] = -extra // 2, -extra - -extra // 2
            x = functional.pad(x, flat)
    return x


# Reductions.


def _reduce(
    call: OperatorCall, x: Tensor, axes: Value, compute: Callable[[Tensor, list[int]], Tensor]
) -> Tensor:
    """Reduce with `compute`, a function of tensor and axes that keeps reduced axes with size 1."""
    stated_axes = resolve_axes(call, axes)
    if not stated_axes:
        if call.get("noop_with_empty_axes", 0):
            return compute(x.unsqueeze(-1), [x.ndim]).squeeze(-1)
        stated_axes = list(range(x.ndim))
    over = sorted({axis % x.ndim for axis in stated_axes}) if x.ndim else []
    if not over:  # a scalar
        return compute(x.reshape(1), [0]).reshape(())
    kept = compute(x, over)
    if call.get("keepdims", 1):
        return kept
    return kept.reshape([size for i, size in enumerate(kept.shape) if i not in over])


def _reduce_extreme(x: Tensor, axes: list[int], *, largest: bool) -> Tensor:
    if x.dtype == torch.bool:
        return _reduce_extreme(x.to(torch.uint8), axes, largest=largest).bool()
    if not all(x.shape[axis] for axis in axes):
        shape = [1 if i in axes else size for i, size in enumerate(x.shape)]
        if x.is_floating_point():
            return torch.full(shape, -math.inf if largest else math.inf, dtype=x.dtype)
        limits = torch.iinfo(x.dtype)
        return torch.full(shape, limits.min if largest else limits.max, dtype=x.dtype)
    return (torch.amax if largest else torch.amin)(x, axes, keepdim=True)


def _reduce_sum(x: Tensor, axes: list[int]) -> Tensor:
    return torch.sum(x, axes, keepdim=True, dtype=None if x.is_floating_point() else x.dtype)


def _reduce_mean(x: Tensor, axes: list[int]) -> Tensor:
    if x.is_floating_point():
        return torch.mean(x, axes, keepdim=True)
    count = math.prod(x.shape[axis] for axis in axes)
    return torch.div(_reduce_sum(x.to(torch.int64), axes), count, rounding_mode="trunc").to(x.dtype)


def _reduce_prod(x: Tensor, axes: list[int]) -> Tensor:
    for axis in axes:
        x = torch.prod(x, axis, keepdim=True, dtype=x.dtype)
    return x


def _reduce_l2(x: Tensor, axes: list[int]) -> Tensor:
    squares = _reduce_sum(x * x, axes)
    return torch.sqrt(squares if x.is_floating_point() else squares.double()).to(x.dtype)


def _reduce_log_sum(x: Tensor, axes: list[int]) -> Tensor:
    total = _reduce_sum(x, axes)
    return torch.log(total if x.is_floating_point() else total.double()).to(x.dtype)


def _reduce_log_sum_exp(x: Tensor, axes: list[int]) -> Tensor:
    if not x.is_floating_point():
        return torch.logsumexp(x.double(), axes, keepdim=True).to(x.dtype)
    if not x.numel():
        return _reduce_extreme(x, axes, largest=True)
    return torch.logsumexp(x, axes, keepdim=True)


_REDUCERS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "ReduceSum": _reduce_sum, "ReduceMean": _reduce_mean, "ReduceProd": _reduce_prod,
    "ReduceMax": lambda x, over: _reduce_extreme(x, over, largest=True),
    "ReduceMin": lambda x, over: _reduce_extreme(x, over, largest=False),
    "ReduceL1": lambda x, over: _reduce_sum(x.abs(), over), "ReduceL2": _reduce_l2,
    "ReduceLogSum": _reduce_log_sum, "ReduceLogSumExp": _reduce_log_sum_exp,
    "ReduceSumSquare": lambda x, over: _reduce_sum(x * x, over),
}  # fmt: skip


def _register_reductions() -> None:
    for name, compute in _REDUCERS.items():
        operator(name)(lambda call, x, axes=None, compute=compute: _reduce(call, x, axes, compute))


_register_reductions()


@operator("ArgMax", "ArgMin")
def _arg(call: OperatorCall, x: Tensor) -> Tensor:
    axis = call.get("axis", 0) % max(x.ndim, 1)
    pick = torch.argmax if call.operator == "ArgMax" else torch.argmin
    keep = bool(call.get("keepdims", 1))
    if call.get("select_last_index", 0):
        return x.shape[axis] - 1 - pick(x.flip(axis), axis, keepdim=keep)
    return pick(x, axis, keepdim=keep)


@operator("TopK")
def _top_k(call: OperatorCall, x: Tensor, k: Tensor | None = None) -> Value:
    count = call.get("k") if k is None else int(scalar(k))
    axis = call.get("axis", -1)
    # Of equal elements the first counts, which torch.topk does not guarantee.
    largest = bool(call.get("largest", 1))
    values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


@operator("CumSum", "CumProd")
def _cumulated(call: OperatorCall, x: Tensor, axis: Tensor) -> Tensor:
    dim = int(scalar(axis)) % max(x.ndim, 1)
    sums = call.operator == "CumSum"
    x = x.flip(dim) if call.get("reverse", 0) else x
    if call.get("exclusive", 0):
        first = torch.full_like(x.narrow(dim, 0, 1), 0 if sums else 1)
        x = torch.cat([first, x.narrow(dim, 0, x.shape[dim] - 1)], dim)
    result = (torch.cumsum if sums else torch.cumprod)(x, dim, dtype=x.dtype)
    return result.flip(dim) if call.get("reverse", 0) else result


# Softmax and products.


def _flat(call: OperatorCall, x: Tensor) -> tuple[Tensor, int]:
    """Return the input to normalize and the axis.

    Before opset 13, all axes from `axis` on are flattened into one.
    """
    axis = call.get("axis", 1 if call.opset < 13 else -1)
    if call.opset >= 13:
        return x, axis
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])), 1


@operator("Softmax")
def _softmax(call: OperatorCall, x: Tensor) -> Tensor:
    flat, axis = _flat(call, x)
    return torch.softmax(flat, axis).reshape(x.shape)


@operator("LogSoftmax")
def _log_softmax(call: OperatorCall, x: Tensor) -> Tensor:
    flat, axis = _flat(call, x)
    return torch.log_softmax(flat, axis).reshape(x.shape)


@operator("Hardmax")
def _hardmax(call: OperatorCall, x: Tensor) -> Tensor:
    flat, axis = _flat(call, x)
    hot = torch.zeros_like(flat).scatter(axis, flat.argmax(axis, keepdim=True), 1.0)
    return hot.reshape(x.shape)


@operator("Gemm")
def _gemm(call: OperatorCall, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.T if call.get("transA", 0) else a
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    if not a.is_floating_point():
        alpha, beta = int(alpha), int(beta)
    if c is not None and alpha == beta == 1 and c.ndim == 1 and call.get("transB", 0):
        return functional.linear(a, b, c)
    product = a @ (b.T if call.get("transB", 0) else b)
    product = product if alpha == 1 else alpha * product
    return product if c is None else product + (c if beta == 1 else beta * c)


@operator("Einsum")
def _einsum(call: OperatorCall, *values: Tensor) -> Tensor:
    return torch.einsum(call.get("equation").replace(" ", ""), *values)


# Sequences, optional values and strings.


@operator("SequenceEmpty", "SequenceConstruct")
def _sequence_construct(_call: OperatorCall, *values: Value) -> list[Value]:
    return list(values)


@operator("SequenceAt")
def _sequence_at(_call: OperatorCall, values: list[Value], position: Tensor) -> Value:
    return values[int(scalar(position))]


@operator("SequenceLength")
def _sequence_length(_call: OperatorCall, values: list[Value]) -> Tensor:
    return torch.tensor(len(values), dtype=torch.int64)


@operator("SequenceInsert")
def _sequence_insert(
    _call: OperatorCall, values: list[Value], value: Value, position: Tensor | None = None
) -> list[Value]:
    at = len(values) if position is None else int(scalar(position))
    at = at + len(values) if at < 0 else at
    return [*values[:at], value, *values[at:]]


@operator("SequenceErase")
def _sequence_erase(
    _call: OperatorCall, values: list[Value], position: Tensor | None = None
) -> list[Value]:
    at = (-1 if position is None else int(scalar(position))) % len(values)
    return [*values[:at], *values[at + 1 :]]


@operator("SplitToSequence")
def _split_to_sequence(call: OperatorCall, x: Value, split: Tensor | None = None) -> list[Value]:
    axis = call.get("axis", 0) % len(x.shape)
    size = x.shape[axis]
    if split is None:
        sizes, squeezed = [1] * size, not call.get("keepdims", 1)
    elif split.ndim:
        sizes, squeezed = integers(split), False
    else:
        step, squeezed = int(scalar(split)), False
        sizes = [min(step, size - start) for start in range(0, size, step)]
    parts = np.split(x, np.cumsum(sizes)[:-1], axis) if is_text(x) else torch.split(x, sizes, axis)
    return [part.squeeze(axis) for part in parts] if squeezed else list(parts)


@operator("ConcatFromSequence")
def _concat_from_sequence(call: OperatorCall, values: list[Value]) -> Value:
    axis = call.get("axis")
    if is_text(values[0]):
        return (np.stack if call.get("new_axis", 0) else np.concatenate)(values, axis)
    return torch.stack(values, axis) if call.get("new_axis", 0) else torch.cat(values, axis)


@operator("OptionalHasElement")
def _optional_has_element(_call: OperatorCall, x: Value = None) -> Tensor:
    return torch.tensor(x is not None)


@operator("StringNormalizer")
def _string_normalizer(call: OperatorCall, x: Value) -> Value:
    stops, exact = call.get("stopwords") or [], bool(call.get("is_case_sensitive", 0))
    left = set(stops) if exact else {word.lower() for word in stops}
    change = {"LOWER": str.lower, "UPPER": str.upper}.get(call.get("case_change_action"), str)

    def kept(row: Sequence[str]) -> list[str]:
        return [change(word) for word in row if (word if exact else word.lower()) not in left]

    if x.ndim == 2:
        return np.array([kept(row) for row in x] if x.size else [], object).reshape(len(x), -1)
    return np.array(kept(x) or [""], object)


@operator("StringConcat")
def _string_concat(_call: OperatorCall, a: Value, b: Value) -> Value:
    return np.add(a, b)


@operator("StringSplit")
def _string_split(call: OperatorCall, x: Value) -> Value:
    most, mark = call.attributes.get("maxsplit"), call.attributes.get("delimiter") or None
    parts = [text.split(mark, -1 if most is None else most) if text else []
             for text in x.reshape(-1)]  # fmt: skip
    counts = torch.tensor([len(text) for text in parts], dtype=torch.int64).reshape(x.shape)
    width = int(counts.max()) if x.size else 0
    rows = [[*text, *[""] * (width - len(text))] for text in parts]
    return np.array(rows, object).reshape(*x.shape, width), counts


def attribute_value(attribute: onnx.AttributeProto) -> Any:
    """Return the value of an attribute: text as str, a tensor or graph as its protobuf message."""
    value = helper.get_attribute_value(attribute)
    if attribute.type == onnx.AttributeProto.STRING:
        return _text(value)
    if attribute.type == onnx.AttributeProto.STRINGS:
        return [_text(each) for each in value]
    return value
