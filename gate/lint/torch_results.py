"""Results of torch functions and Python operators for abstract values."""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch

from gate.lint.values import (
    NOTHING,
    PYTHON,
    SCALAR,
    UNKNOWN,
    Arguments,
    Kind,
    Rank,
    Value,
    common_axis,
    from_object,
    shift,
    tensor,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PYTHON = _names(
    """dim ndimension element_size get_device is_contiguous is_floating_point is_complex is_signed
    is_tensor is_storage stride storage_offset data_ptr requires_grad_ typename finfo iinfo device
    get_default_dtype is_grad_enabled is_autocast_enabled promote_types result_type can_cast
    no_grad enable_grad inference_mode autocast _assert compiler_is_compiling"""
)

_SEQUENCE = _names(
    """chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind meshgrid
    broadcast_tensors topk sort kthvalue mode cummax cummin var_mean std_mean aminmax
    frexp slogdet svd eigh qr unique unique_consecutive nonzero_tuple"""
)

_SAME_RANK = _names(
    """abs add add_ addcmul atan bool ceil celu clamp clamp_ clamp_max clamp_min clip clone
    contiguous cos cpu cuda cumsum detach div div_ double dropout elu erf exp expm1 fill_ flip
    float floor floor_divide gelu half hardsigmoid hardswish hardtanh index_copy index_fill int
    layer_norm leaky_relu log log1p log_softmax logical_and logical_not logical_or long
    masked_fill masked_fill_ maximum minimum mish movedim mul mul_ nan_to_num neg normalize
    ones_like permute pow rand_like reciprocal relu relu6 relu_ remainder requires_grad_ roll
    round rsqrt rsub scatter scatter_add selu sigmoid sign silu sin softmax softplus sqrt square
    sub sub_ swapaxes swapdims t tan tanh to transpose tril triu true_divide type type_as where
    zero_ zeros_like full_like empty_like randn_like"""
)

_REDUCTIONS = _names(
    """all amax amin any argmax argmin count_nonzero logsumexp max mean median min nanmean
    nansum norm prod quantile std sum var"""
)

_WITH_INDICES = frozenset({"max", "min", "median"})

_MASKS = _names(
    """eq ne lt le gt ge isnan isinf isfinite isclose logical_and logical_or logical_not
    logical_xor bool"""
)

_SUBTRACTIONS = frozenset({"sub", "sub_", "neg", "rsub"})

_FILLED = frozenset({"zeros", "ones", "empty", "full", "rand", "randn"})

_RESHAPING = _names("reshape view expand repeat new_zeros new_ones new_full new_empty")

_FACTORIES: dict[str, Callable[..., torch.Tensor]] = {
    "tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "LongTensor": torch.tensor,
    "IntTensor": torch.tensor,
    "arange": torch.arange,
}

_PURE = frozenset({"unsqueeze", "reshape", "view", "flatten", "long", "int", "t", "to", "tolist"})
"""Methods that are computed where tensor and arguments are known."""

_MAX_ELEMENTS = 4096
"""Elements of a tensor that is computed."""


def torch_result(name: str, arguments: Arguments) -> Value:
    """Return the result of `torch.name(*arguments)`; a tensor's method has the tensor as first
    argument."""
    first = arguments.first
    if name in _PYTHON or name in _SEQUENCE:
        return PYTHON if name in _PYTHON else Value(Kind.TENSORS)
    if name in _FACTORIES or (name in _PURE and first.constant):
        computed = _compute_constant(name, arguments)
        if computed is not None:
            return computed
    if first.tensor:
        return _of_tensor(name, first, arguments)
    if name in ("cat", "concat", "stack") and first.kind is Kind.TENSORS:
        rank = first.items[0].rank if 0 in first.items else None
        return tensor(shift(rank, 1 if name == "stack" else 0))
    if name in _FILLED and arguments.positional:
        return _with_sizes(arguments.positional[: 1 if name == "full" else None])
    return tensor()


def _compute_constant(name: str, arguments: Arguments) -> Value | None:
    """Return the tensor itself, if all operands are known; None if it is large."""
    operands = [value.object for value in arguments.positional]
    if arguments.spread or any(each is NOTHING for each in operands):
        return tensor(Rank(0, 1) if name == "arange" else None)
    if any(isinstance(each, torch.Tensor) and each.numel() > _MAX_ELEMENTS for each in operands):
        return None
    with contextlib.suppress(Exception), torch.no_grad():
        compute = _FACTORIES.get(name) or getattr(torch.Tensor, name)
        result = compute(*operands)
        if isinstance(result, list) or result.numel() <= _MAX_ELEMENTS:
            return from_object(result)
    return tensor()


def _of_tensor(name: str, first: Value, arguments: Arguments) -> Value:
    rest = Arguments(arguments.positional[1:], arguments.keywords, arguments.spread)
    result = tensor()
    if name in _REDUCTIONS:
        result = _reduce(name, first, rest)
    elif name == "unsqueeze":
        result = tensor(shift(first.rank, 1), unit=True, lowered=first.lowered)
    elif name in ("squeeze", "select", "diagonal") and rest.positional:
        result = tensor(shift(first.rank, -1), lowered=first.lowered)
    elif name == "flatten":
        start, end = rest.get(0, "start_dim"), rest.get(1, "end_dim")
        axis = start.object if start else 0
        absolute = isinstance(axis, int) and axis >= 0 and end is None
        result = tensor(Rank(0, axis + 1) if absolute else None)
    elif name in _RESHAPING:
        result = _with_sizes(rest.positional[: 1 if name == "new_full" else None])
        result.unit = result.unit and name != "expand"
    elif name in _SAME_RANK or name in _MASKS:
        result = tensor(first.rank, unit=first.unit, lowered=name in _SUBTRACTIONS)
    result.mask = name in _MASKS
    result.fixed = _is_fixed(arguments.all)
    return result


def _is_fixed(operands: tuple[Value, ...]) -> bool:
    """True if what is computed from these is the same for every input."""
    return all(value.constant if value.tensor else value.kind is Kind.PYTHON for value in operands)


def _reduce(name: str, first: Value, rest: Arguments) -> Value:
    axes = rest.get(0, "dim") or rest.keywords.get("axis")
    if axes is None:
        return tensor(SCALAR)
    if axes.tensor:  # torch.max(x, y)
        return tensor(first.rank)
    keep = rest.keywords.get("keepdim") or rest.get(1, "keepdim")
    kept = keep is not None and keep.object is True
    if isinstance(axes.object, tuple | list):
        count = len(axes.object)
    else:
        count = 1 if isinstance(axes.object, int) else len(axes.items)
    rank = first.rank if kept else shift(first.rank, -count) if count else None
    result = tensor(rank, unit=kept)
    if name in _WITH_INDICES:
        return Value(Kind.TENSORS, items={0: result, 1: result})
    return result


def _with_sizes(sizes: tuple[Value, ...]) -> Value:
    """Return a tensor of these sizes, which may be a single sequence."""
    if len(sizes) != 1:
        return tensor(Rank(0, len(sizes)))
    (only,) = sizes
    if only.kind is Kind.SIZE or isinstance(only.object, int):
        return tensor(Rank(0, 1))
    listed = only.object if isinstance(only.object, tuple | list) else ()
    count = 0 if only.kind is Kind.SHAPE else len(only.items or listed)
    return tensor(Rank(0, count) if count else None)


# --- operators ------------------------------------------------------------------------------------

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

_SIMPLE = (bool, int, float, str, type(None))


def arithmetic(operation: ast.operator, left: Value, right: Value) -> Value:
    """Return the value of an arithmetic operation."""
    sides = (left, right)
    kinds = {left.kind, right.kind}
    if Kind.TENSOR in kinds:
        result = _compute(operation, left, right)
        return _element_wise(operation, sides) if result is NOTHING else from_object(result)
    for kind in (Kind.SHAPE, Kind.SIZE):
        if kind in kinds:
            return Value(kind, axis=common_axis(value for value in sides if value.kind is kind))
    if Kind.TENSORS in kinds:
        return Value(Kind.TENSORS if kinds <= {Kind.TENSORS, Kind.PYTHON} else Kind.UNKNOWN)
    return _of_objects(operation, left, right)


def negated(value: Value, *, minus: bool) -> Value:
    """Return the value of `-x`, else of `+x` and `~x`."""
    if minus and (isinstance(value.object, int | float) or value.elements is not None):
        return from_object(-value.object)
    if value.tensor:
        return tensor(value.rank, unit=value.unit, mask=value.mask, lowered=minus,
                      fixed=value.constant)  # fmt: skip
    return Value(value.kind, axis=value.axis) if value.kind is Kind.SIZE else PYTHON


def comparison(operation: ast.cmpop, left: Value, right: Value) -> Value:
    """Return the value of a comparison."""
    if isinstance(operation, ast.Is | ast.IsNot | ast.In | ast.NotIn):
        relation = _is if isinstance(operation, ast.Is | ast.IsNot) else _in
        truth = relation(left, right)
        positive = isinstance(operation, ast.Is | ast.In)
        return PYTHON if truth is None else from_object(truth is positive)
    if left.tensor or right.tensor:
        return tensor(_wider(left, right), mask=True)
    if left.sized or right.sized:
        return Value(Kind.SIZE)
    return _of_objects(operation, left, right)


def _element_wise(operation: ast.operator, sides: tuple[Value, Value]) -> Value:
    tensors = [value for value in sides if value.tensor]
    return tensor(
        _wider(*sides),
        unit=all(value.unit for value in tensors),
        mask=all(value.mask for value in tensors),
        fixed=_is_fixed(sides),
        lowered=isinstance(operation, ast.Sub) or any(value.lowered for value in tensors),
    )


def _wider(first: Value, second: Value) -> Rank | None:
    """Return the rank of an element-wise operation; None where it is not known."""
    ranks = [value.rank for value in (first, second) if value.tensor]
    left, right = ranks[0], ranks[-1]
    if left is None or right is None:
        return None
    if left == right or right.below(left) or right == SCALAR:
        return left
    return right if left.below(right) or left == SCALAR else None


def _of_objects(operation: ast.AST, left: Value, right: Value) -> Value:
    if not left.kind is right.kind is Kind.PYTHON:
        return UNKNOWN
    result = _compute(operation, left, right)
    return Value(Kind.PYTHON, object=result, read=left.read or right.read)


def _compute(operation: ast.AST, left: Value, right: Value) -> Any:
    """Return the result, where both sides are known and small; else NOTHING."""
    compute = _OPERATORS.get(type(operation))
    comparable = (*_SIMPLE, tuple) if isinstance(operation, ast.cmpop) else ()
    if compute and all(_is_small(v) or isinstance(v.object, comparable) for v in (left, right)):
        with contextlib.suppress(Exception):
            return compute(left.object, right.object)
    return NOTHING


def _is_small(value: Value) -> bool:
    elements = value.elements
    return isinstance(value.object, int | float) or (
        elements is not None and elements.numel() <= _MAX_ELEMENTS
    )


def _in(left: Value, right: Value) -> bool | None:
    if isinstance(left.object, _SIMPLE) and isinstance(right.object, list | tuple | dict | str):
        with contextlib.suppress(TypeError):
            return left.object in right.object
    return None


def _is(left: Value, right: Value) -> bool | None:
    if left.object is not NOTHING and right.object is not NOTHING:
        return left.object is right.object
    for first, second in ((left, right), (right, left)):
        if first.object is None and second.kind not in (Kind.PYTHON, Kind.UNKNOWN):
            return False
    return None
