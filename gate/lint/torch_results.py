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
    SCALAR,
    Arguments,
    Kind,
    Rank,
    Value,
    common_axis,
    from_object,
    python,
    tensor,
    unknown,
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
    if name in _PYTHON or name in _SEQUENCE:
        return Value(Kind.PYTHON if name in _PYTHON else Kind.TENSORS)
    if name in _FACTORIES or (name in _PURE and arguments.first.constant):
        computed = _compute_constant(name, arguments)
        if computed is not None:
            return computed
    first = arguments.first
    if first.tensor:
        return _of_tensor(name, first, arguments)
    if name in ("cat", "concat", "stack") and first.kind is Kind.TENSORS:
        rank = first.items[0].rank if 0 in first.items else None
        return tensor(rank.plus(1) if rank and name == "stack" else rank)
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
        factory = _FACTORIES.get(name) or operator.methodcaller(name, *operands[1:])
        result = factory(*operands) if name in _FACTORIES else factory(operands[0])
        if isinstance(result, list) or result.numel() <= _MAX_ELEMENTS:
            return from_object(result)
    return tensor()


def _of_tensor(name: str, first: Value, arguments: Arguments) -> Value:
    rest = Arguments(arguments.positional[1:], arguments.keywords, arguments.spread)
    result = tensor()
    if name in _REDUCTIONS:
        result = _reduce(name, first, rest)
    elif name == "unsqueeze":
        result = first.with_rank(first.rank.plus(1) if first.rank else None, unit=True)
    elif name in ("squeeze", "select", "diagonal") and rest.positional:
        result = first.with_rank(first.rank.plus(-1) if first.rank else None, unit=False)
    elif name == "flatten":
        start, end = rest.get(0, "start_dim"), rest.get(1, "end_dim")
        axis = start.object if start else 0
        absolute = isinstance(axis, int) and axis >= 0 and end is None
        result = tensor(Rank(0, axis + 1) if absolute else None)
    elif name in _RESHAPING:
        result = _with_sizes(rest.positional[: 1 if name == "new_full" else None])
        result.unit = result.unit and name != "expand"
    elif name in _SAME_RANK or name in _MASKS:
        result = first.with_rank(first.rank)
        result.lowered = name in ("sub", "sub_", "neg", "rsub")
    result.mask = name in _MASKS
    result.fixed = all(v.constant if v.tensor else v.kind is Kind.PYTHON for v in arguments.all)
    return result


def _reduce(name: str, first: Value, rest: Arguments) -> Value:
    axes = rest.get(0, "dim") or rest.keywords.get("axis")
    if axes is None:
        return tensor(SCALAR)
    if axes.tensor:  # torch.max(x, y)
        return tensor(first.rank)
    keep = rest.keywords.get("keepdim") or rest.get(1, "keepdim")
    kept = keep is not None and keep.object is True
    if isinstance(axes.object, tuple | list):
        count: int | None = len(axes.object)
    else:
        count = 1 if isinstance(axes.object, int) else len(axes.items) or None
    rank = first.rank
    if rank is not None and not kept:
        rank = None if count is None else rank.plus(-count)
    result = tensor(rank, unit=kept)
    if name in _WITH_INDICES:
        return Value(Kind.TENSORS, items={0: result, 1: result})
    return result


def _with_sizes(sizes: tuple[Value, ...]) -> Value:
    """Return a tensor of these sizes, which may be a single sequence."""
    if len(sizes) == 1:
        (only,) = sizes
        listed = only.kind is not Kind.SHAPE and isinstance(only.object, tuple | list)
        if only.kind is Kind.SIZE or isinstance(only.object, int):
            return tensor(Rank(0, 1))
        if only.kind is Kind.SHAPE or not (only.items or listed):
            return tensor()
        return tensor(Rank(0, len(only.items or only.object)))
    return tensor(Rank(0, len(sizes)))


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
    if left.tensor or right.tensor:
        result = _computed(operation, left, right)
        return _element_wise(operation, sides) if result is NOTHING else from_object(result)
    kinds = {left.kind, right.kind}
    for kind in (Kind.SHAPE, Kind.SIZE):
        if kind in kinds:
            return Value(kind, axis=common_axis(value for value in sides if value.kind is kind))
    if Kind.TENSORS in kinds:
        return Value(Kind.TENSORS if kinds <= {Kind.TENSORS, Kind.PYTHON} else Kind.UNKNOWN)
    return _of_objects(operation, left, right) if kinds == {Kind.PYTHON} else unknown()


def negated(value: Value, *, minus: bool) -> Value:
    """Return the value of `-x`, else of `+x` and `~x`."""
    if minus and isinstance(value.object, int | float):
        return from_object(-value.object)
    if minus and value.elements is not None:
        return from_object(-value.elements)
    if value.tensor:
        return tensor(value.rank, unit=value.unit, mask=value.mask, lowered=minus,
                      fixed=value.constant)  # fmt: skip
    return Value(value.kind, axis=value.axis) if value.kind is Kind.SIZE else python()


def comparison(operation: ast.cmpop, left: Value, right: Value) -> Value:
    """Return the value of a comparison."""
    if isinstance(operation, ast.Is | ast.IsNot | ast.In | ast.NotIn):
        relation = _is if isinstance(operation, ast.Is | ast.IsNot) else _in
        truth = relation(left, right)
        positive = isinstance(operation, ast.Is | ast.In)
        return python() if truth is None else from_object(truth is positive)
    if left.tensor or right.tensor:
        return tensor(_wider(left, right), mask=True)
    if left.sized or right.sized:
        return Value(Kind.SIZE)
    are_python = left.kind is right.kind is Kind.PYTHON
    return _of_objects(operation, left, right) if are_python else unknown()


def _element_wise(operation: ast.operator, sides: tuple[Value, Value]) -> Value:
    tensors = [value for value in sides if value.tensor]
    return tensor(
        _wider(*sides),
        unit=all(value.unit for value in tensors),
        mask=all(value.mask for value in tensors),
        fixed=all(value.constant if value.tensor else value.kind is Kind.PYTHON for value in sides),
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
    result = _computed(operation, left, right)
    return Value(Kind.PYTHON, object=result, read=left.read or right.read)


def _computed(operation: ast.AST, left: Value, right: Value) -> Any:
    """Return the result, where both sides are known and small; else NOTHING."""
    compute = _OPERATORS.get(type(operation))
    small = all(isinstance(v.object, int | float) or _is_small(v) for v in (left, right))
    comparable = isinstance(operation, ast.cmpop) and all(
        isinstance(v.object, (*_SIMPLE, tuple)) for v in (left, right)
    )
    if compute is not None and (small or comparable):
        with contextlib.suppress(Exception):
            return compute(left.object, right.object)
    return NOTHING


def _is_small(value: Value) -> bool:
    return value.elements is not None and value.elements.numel() <= _MAX_ELEMENTS


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
