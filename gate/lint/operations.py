"""What torch's operations return, as far as rules ask: kind and rank, by the operation's name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from gate.lint.scope import Arguments
from gate.lint.value import NOTHING, Kind, Rank, StaticValue, of_object, python, tensor


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


_PYTHON = words(
    """dim ndimension element_size get_device is_contiguous is_floating_point is_complex is_signed
    is_tensor is_storage stride storage_offset data_ptr requires_grad_ typename finfo iinfo device
    get_default_dtype is_grad_enabled is_autocast_enabled promote_types result_type can_cast
    no_grad enable_grad inference_mode autocast _assert compiler_is_compiling"""
)
_SEQUENCE = words(
    """chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind meshgrid
    broadcast_tensors topk sort kthvalue mode cummax cummin var_mean std_mean aminmax
    frexp slogdet svd eigh qr unique unique_consecutive nonzero_tuple"""
)
_SAME_RANK = words(
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
_REDUCTIONS = words(
    """all amax amin any argmax argmin count_nonzero logsumexp max mean median min nanmean
    nansum norm prod quantile std sum var"""
)
_WITH_INDICES = frozenset({"max", "min", "median"})
_MASKS = words(
    """eq ne lt le gt ge isnan isinf isfinite isclose logical_and logical_or logical_not
    logical_xor bool"""
)
_MAKERS: dict[str, Callable[..., torch.Tensor]] = {
    "tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "LongTensor": torch.tensor,
    "IntTensor": torch.tensor,
    "arange": torch.arange,
}
_PURE = frozenset({"unsqueeze", "reshape", "view", "flatten", "long", "int", "t", "to", "tolist"})
"""Methods that are computed where tensor and arguments are known."""
FEW = 4096
"""Elements of a tensor that is computed."""


def operation(name: str, arguments: Arguments) -> StaticValue:
    """What `torch.name(*arguments)` returns; a tensor's method has the tensor as first argument."""
    if name in _PYTHON or name in _SEQUENCE:
        return python() if name in _PYTHON else StaticValue(Kind.TENSORS)
    made = _made(name, arguments)
    if made is not None:
        return made
    first = arguments.positional[0] if arguments.positional else None
    if first is not None and first.tensor:
        return _of_tensor(name, first, arguments)
    if name in ("cat", "concat", "stack") and first is not None and first.kind is Kind.TENSORS:
        item = first.items.get(0)
        rank = item.rank if item else None
        return tensor(rank.plus(1) if rank and name == "stack" else rank)
    sizes = arguments.positional
    sized = name in ("zeros", "ones", "empty", "full", "rand", "randn") and sizes
    return _sized(sizes if name != "full" else sizes[:1]) if sized else tensor()


def _of_tensor(name: str, first: StaticValue, arguments: Arguments) -> StaticValue:
    rest = Arguments(arguments.positional[1:], arguments.keywords, arguments.spread)
    found = tensor()
    if name in _REDUCTIONS:
        found = _reduced(name, first, rest)
    elif name == "unsqueeze":
        found = first.with_rank(first.rank.plus(1) if first.rank else None, unit=True)
    elif name in ("squeeze", "select", "diagonal") and rest.positional:
        found = first.with_rank(first.rank.plus(-1) if first.rank else None, unit=False)
    elif name == "flatten":
        start, end = rest.get(0, "start_dim"), rest.get(1, "end_dim")
        first_axis = start.object if start else 0
        absolute = isinstance(first_axis, int) and first_axis >= 0 and end is None
        found = tensor(Rank(0, first_axis + 1) if absolute else None)
    elif name in ("reshape", "view", "expand", "repeat", "new_zeros", "new_ones", "new_full",
                  "new_empty"):  # fmt: skip
        sizes = rest.positional[:1] if name == "new_full" else rest.positional
        found = _sized(sizes)
        if name == "expand":
            found.unit = False
    elif name in _SAME_RANK or name in _MASKS:
        found = first.with_rank(first.rank)
        found.lowered = name in ("sub", "sub_", "neg", "rsub")
    found.mask = name in _MASKS
    found.fixed = all(v.constant if v.tensor else v.kind is Kind.PYTHON for v in arguments.all)
    return found


def _made(name: str, arguments: Arguments) -> StaticValue | None:
    """The tensor itself, where all that it is made of is known."""
    values = arguments.positional
    maker = _MAKERS.get(name)
    if maker is None and not (name in _PURE and values and values[0].constant):
        return StaticValue(Kind.TENSOR, rank=Rank(0, 1)) if name == "arange" else None
    if arguments.spread or any(value.object is NOTHING for value in values):
        return tensor(Rank(0, 1) if name == "arange" else None)
    operands = [value.object for value in values]
    if any(isinstance(one, torch.Tensor) and one.numel() > FEW for one in operands):
        return None
    with contextlib.suppress(Exception):
        result = _compute(name, maker, operands)
        if isinstance(result, list) or result.numel() <= FEW:
            return of_object(result)
    return tensor()


def _compute(name: str, maker: Callable[..., torch.Tensor] | None, operands: list[Any]) -> Any:
    with torch.no_grad():
        return maker(*operands) if maker else getattr(operands[0], name)(*operands[1:])


def _reduced(name: str, first: StaticValue, rest: Arguments) -> StaticValue:
    given, keep = rest.get(0, "dim"), rest.keywords.get("keepdim") or rest.get(1, "keepdim")
    given = given or rest.keywords.get("axis")
    if given is None:
        return tensor(Rank(0, 0))
    if given.tensor:  # torch.max(x, y)
        return tensor(first.rank)
    kept = keep is not None and keep.object is True
    count = _count(given)
    if kept:
        rank = first.rank
    else:
        rank = first.rank.plus(-count) if first.rank and count is not None else None
    result = tensor(rank, unit=kept)
    if name in _WITH_INDICES:
        return StaticValue(Kind.TENSORS, items={0: result, 1: result})
    return result


def _count(given: StaticValue) -> int | None:
    if isinstance(given.object, int):
        return 1
    if isinstance(given.object, tuple | list):
        return len(given.object)
    return len(given.items) or None


def _sized(sizes: tuple[StaticValue, ...]) -> StaticValue:
    if len(sizes) == 1:
        (only,) = sizes
        if only.kind is Kind.SHAPE or (
            not only.items and not isinstance(only.object, tuple | list)
        ):
            is_number = only.kind is Kind.SIZE or isinstance(only.object, int)
            return tensor(Rank(0, 1) if is_number else None)
        sizes = tuple(only.items.values()) or tuple(map(of_object, only.object))
    return tensor(Rank(0, len(sizes)))


def wider(one: StaticValue, other: StaticValue) -> Rank | None:
    """The rank of an element-wise operation; None where it is not known."""
    ranks = [v.rank for v in (one, other) if v.tensor]
    if len(ranks) == 1:
        return ranks[0]
    left, right = ranks
    if left is None or right is None:
        return None
    if left == right or right.below(left) or right == Rank(0, 0):
        return left
    return right if left.below(right) or left == Rank(0, 0) else None
