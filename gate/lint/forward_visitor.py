"""One `ast.NodeVisitor`: statements, expressions, calls into user functions."""

from __future__ import annotations

import ast
import collections
import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import math
import operator
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gate.lint import torch_rules, values
from gate.lint.rules import RULES
from gate.lint.source import (
    UNKNOWN,
    Definition,
    FunctionSource,
    Unreadable,
    changes,
    python_function,
    reads,
    trees_of,
    writes,
)
from gate.lint.torch_rules import floor_division, is_read, tell_rewritten
from gate.lint.values import (
    NOTHING,
    Arguments,
    Frame,
    Kind,
    Local,
    Rank,
    ShapeMethod,
    Super,
    TensorMethod,
    Value,
    common_axis,
    has_items,
    join,
    keyed,
    of_object,
    python,
    ranks_differ,
    sequence,
    sliced,
    static_items,
    tensor,
    unknown,
)
from gate.lint.values import item as items_item
from gate.records.export import LintFinding, LintLevel, Strategy

_CONDITIONS_PLAIN = (
    bool,
    int,
    float,
    str,
    list,
    tuple,
    dict,
    set,
    frozenset,
    type(None),
    nn.Module,
)

_CHANGES = (ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Yield)


def decided(value: Value) -> bool | None:
    """The truth of a value that is the same for every input; None: it is not known."""
    thing = value.object
    if thing is NOTHING or value.flag:
        return None
    if isinstance(thing, torch.Tensor):
        elements = value.elements
        return bool(elements) if elements is not None and elements.numel() == 1 else None
    if isinstance(thing, _CONDITIONS_PLAIN):
        return bool(thing)
    return True if callable(thing) else None


def condition(
    value: Value,
    node: ast.expr,
    scope: Frame,
    *,
    changes: bool = True,
    guard: bool = False,
) -> None:
    """Tell of a condition that is not the same for every input.

    `changes`: the result depends on it. `guard`: it only raises or warns.
    """
    if value.flag:
        if changes and not guard:
            scope.tell(
                "TRC014",
                node,
                level="warning" if value.flag == "is_in_onnx_export" else "error",
                message=f"what {value.flag}() guards changes the result: the file does not "
                "compute what the model computes",
            )
    elif value.tensor and not value.constant:
        if guard:
            scope.tell("TRC008", node, level="note",
                       message="the file does not check this: it computes on")  # fmt: skip
        elif changes:
            scope.tell("TRC008", node)
    elif value.kind in (Kind.SIZE, Kind.SHAPE) and changes and not guard:
        scope.tell("TRC016", node)


def all_or_any(node: ast.BoolOp, parts: Sequence[Value]) -> Value:
    """The condition `and` or `or` makes of its parts, up to the one that decides."""
    stops = isinstance(node.op, ast.Or)
    found = [part for part in parts if decided(part) is None]
    if found and decided(parts[-1]) is stops:
        found.append(parts[-1])
    return all_of(found) if found else of_object(decided(parts[-1]))


def all_of(values: Sequence[Value]) -> Value:
    """A condition of several parts: what the most dangerous part is."""
    for part in values:
        if part.flag:
            return part
    for kind in (Kind.TENSOR, Kind.SIZE, Kind.UNKNOWN):
        for part in values:
            if part.kind is kind:
                return part
    return Value(Kind.PYTHON, read=any(value.read for value in values))


def negated(value: Value) -> Value:
    """The value of `not x`."""
    truth = decided(value)
    if truth is not None:
        return of_object(not truth)
    return tensor(mask=True, truth=not value.constant) if value.tensor else value


def chosen(node: ast.BoolOp, parts: Sequence[Value], scope: Frame) -> None:
    """Tell of `and`, `or` that choose a value by a tensor. Where all are truths, nothing is chosen:
    the condition that they stand in later tells of them."""
    on_tensor = any(part.tensor and not part.constant for part in parts[:-1])
    if on_tensor and any(map(_no_truth, parts)):
        scope.tell("TRC008", node)


def _no_truth(value: Value) -> bool:
    if value.tensor:
        return not value.mask and value.rank not in (None, Rank(0, 0))
    number = isinstance(value.object, int | float | str) and not isinstance(value.object, bool)
    return number or value.kind is Kind.TENSORS


def only_guards(body: Sequence[ast.stmt]) -> bool:
    """True if these statements raise, warn or log, and change nothing that is returned."""
    return not any(_changes(node) for statement in body for node in ast.walk(statement))


def _changes(node: ast.AST) -> bool:
    if isinstance(node, _CHANGES):
        return True
    in_place = (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.endswith("_")
        and not node.func.attr.endswith("__")
    )
    return in_place or isinstance(node, ast.Continue | ast.Break)


def numbers_from(node: ast.Call, arguments: Arguments, scope: Frame, *, by: str) -> Value:
    """The result of a call that computes outside of torch; `by`: its name."""
    if any(value.kind is Kind.TENSORS or (value.tensor and not value.constant)
           for value in arguments.all):  # fmt: skip
        scope.tell("TRC001", node, message=f"{by} computes outside of torch: the example's numbers "
                   "are written into the file as constants")  # fmt: skip
        return Value(Kind.PYTHON, read=True)
    sizes = [value for value in arguments.all if value.kind in (Kind.SIZE, Kind.SHAPE)]
    if sizes:
        tell_size(node, sizes, scope)
    return python()


def tell_size(
    node: ast.Call, sizes: list[Value], scope: Frame, *, rewrite: str | None = None
) -> None:
    """The example's size becomes a constant: an error for the batch axis, which is dynamic."""
    fixed = common_axis(sizes) != 0
    level: LintLevel | None = "warning" if fixed else None
    message = None
    if fixed:
        message = (
            "the example's size is written into the file as a constant: wrong where that axis "
            "is dynamic"
        )
    scope.tell("TRC004", node, level=level, message=message, rewrite=rewrite)


_Call = Callable[[ast.Call, Arguments, Frame], Value]


def _number(node: ast.Call, arguments: Arguments, scope: Frame) -> Value:
    value = arguments.positional[0] if arguments.positional else python()
    if isinstance(value.object, int | float):
        return python()
    return numbers_from(node, arguments, scope, by=_builtin_calls_name(node))


def _bool(_node: ast.Call, arguments: Arguments, _scope: Frame) -> Value:
    # The condition that it stands in tells of it, where it matters.
    value = arguments.positional[0] if arguments.positional else python()
    if value.tensor:
        return tensor(mask=True, truth=True) if not value.constant else python()
    return Value(value.kind, flag=value.flag)


def _len(node: ast.Call, arguments: Arguments, scope: Frame) -> Value:
    value = arguments.positional[0] if arguments.positional else unknown()
    if value.tensor and not value.constant:
        scope.tell("TRC005", node)
        return python()
    if isinstance(value.object, list | tuple | dict | str | torch.nn.Module):
        return of_object(len(value.object))  # type: ignore[arg-type]
    return python()


def _range(node: ast.Call, arguments: Arguments, scope: Frame) -> Value:
    bounds = [value.object for value in arguments.positional]
    if any(value.tensor for value in arguments.positional):
        scope.tell("TRC008", node, message="the loop has as many turns in the file as the "
                   "example's number asked for")  # fmt: skip
        return Value(Kind.PYTHON, read=True)
    if bounds and all(isinstance(one, int) for one in bounds):
        return of_object(range(*bounds))
    return Value(Kind.PYTHON, loop=any(v.kind is Kind.SIZE for v in arguments.positional))


def _iterates(node: ast.Call, arguments: Arguments, scope: Frame) -> Value:
    """A builtin that goes through what it is given: as a loop does."""
    for value in arguments.positional:
        if value.tensor and not value.constant:
            scope.tell(
                "TRC008",
                node,
                message=f"{_builtin_calls_name(node)} loops over a tensor: the "
                "file has as many turns as the example had rows",
                rewrite="use the operation on the whole tensor: torch.sum, torch.any, torch.amax",
            )
            return (
                tensor()
                if _builtin_calls_name(node) in ("sum", "min", "max")
                else Value(Kind.TENSORS)
            )
    return unknown()


def _list(node: ast.Call, arguments: Arguments, scope: Frame) -> Value:
    value = arguments.positional[0] if arguments.positional else Value(Kind.PYTHON, object=[])
    if value.tensor:
        return _iterates(node, arguments, scope)
    return Value(value.kind, object=value.object, axis=value.axis, items=value.items,
                 loop=value.loop)  # fmt: skip


def _extreme(node: ast.Call, arguments: Arguments, scope: Frame) -> Value:
    """`min` and `max` of sizes compare them, so the example decides."""
    sizes = [v for v in arguments.positional if v.kind in (Kind.SIZE, Kind.SHAPE)]
    if sizes:
        scope.tell(
            "TRC016",
            node,
            message=f"{_builtin_calls_name(node)} of sizes is decided by the "
            "example: wrong where an axis is dynamic",
        )
        return Value(Kind.SIZE, axis=common_axis(sizes))
    several = len(arguments.positional) > 1
    if several and any(v.tensor and not v.constant for v in arguments.positional):
        scope.tell(
            "TRC008",
            node,
            message=f"{_builtin_calls_name(node)} of tensors is decided by the example",
            rewrite="use torch.minimum or torch.maximum",
        )
        return tensor()
    numbers = [v.object for v in arguments.positional]
    if several and all(isinstance(one, int | float) for one in numbers):
        return of_object(min(numbers) if _builtin_calls_name(node) == "min" else max(numbers))
    return _iterates(node, arguments, scope)


def _round(node: ast.Call, arguments: Arguments, scope: Frame) -> Value:
    value = arguments.positional[0] if arguments.positional else python()
    if value.kind is Kind.SIZE:
        tell_size(node, [value], scope)
    return value if value.tensor else python()


def _enumerate(node: ast.Call, arguments: Arguments, scope: Frame) -> Value:
    turns = Arguments((python(), *arguments.positional[:1]))
    return _zip(node, turns, scope)


def _zip(node: ast.Call, arguments: Arguments, scope: Frame) -> Value:
    for value in arguments.positional:
        if value.tensor and not value.constant:
            _iterates(node, Arguments((value,)), scope)
    turn = Value(Kind.UNKNOWN, items=dict(enumerate(map(_first_of, arguments.positional))))
    loop = any(value.loop for value in arguments.positional)
    return Value(Kind.UNKNOWN, loop=loop, items={0: turn})


def _first_of(value: Value) -> Value:
    if value.kind in (Kind.TENSOR, Kind.TENSORS):
        return tensor()
    if isinstance(value.object, list | tuple) and value.object:
        return of_object(value.object[0])
    if isinstance(value.object, torch.nn.Module):
        return next(iter(map(of_object, value.object.children())), unknown())
    return python() if value.kind is Kind.PYTHON and not value.items else unknown()


def _isinstance(_node: ast.Call, arguments: Arguments, _scope: Frame) -> Value:
    if len(arguments.positional) != 2:
        return python()
    value, against = arguments.positional
    classes = against.object if isinstance(against.object, tuple) else (against.object,)
    if not all(isinstance(cls, type) for cls in classes):
        return python()
    if value.tensor:
        return of_object(any(issubclass(torch.Tensor, cls) for cls in classes))
    if value.kind is Kind.PYTHON and value.object is not NOTHING:
        return of_object(isinstance(value.object, classes))
    return python()


def _hasattr(_node: ast.Call, arguments: Arguments, _scope: Frame) -> Value:
    if len(arguments.positional) == 2:
        value, name = arguments.positional
        if isinstance(value.object, torch.nn.Module) and isinstance(name.object, str):
            return of_object(hasattr(value.object, name.object))
    return python()


def _getattr(_node: ast.Call, _arguments: Arguments, _scope: Frame) -> Value:
    return unknown()


def _same(_node: ast.Call, arguments: Arguments, _scope: Frame) -> Value:
    return arguments.positional[-1] if arguments.positional else unknown()


def _nothing(_node: ast.Call, _arguments: Arguments, _scope: Frame) -> Value:
    return Value(Kind.PYTHON, object=None)


def _builtin_calls_name(node: ast.Call) -> str:
    return ast.unparse(node.func)


BUILTINS: dict[Any, _Call] = {
    int: _number,
    float: _number,
    complex: _number,
    bool: _bool,
    len: _len,
    range: _range,
    list: _list,
    tuple: _list,
    reversed: _list,
    iter: _list,
    sorted: _iterates,
    set: _iterates,
    sum: _iterates,
    any: _iterates,
    all: _iterates,
    min: _extreme,
    max: _extreme,
    round: _round,
    enumerate: _enumerate,
    zip: _zip,
    isinstance: _isinstance,
    hasattr: _hasattr,
    getattr: _getattr,
    print: _nothing,
    warnings.warn: _nothing,
    typing.cast: _same,
    copy.copy: _same,
    importlib.import_module: _getattr,
}
"""The function to what it returns."""


def split_names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


_OPERATIONS_PYTHON = split_names(
    """dim ndimension element_size get_device is_contiguous is_floating_point is_complex is_signed
    is_tensor is_storage stride storage_offset data_ptr requires_grad_ typename finfo iinfo device
    get_default_dtype is_grad_enabled is_autocast_enabled promote_types result_type can_cast
    no_grad enable_grad inference_mode autocast _assert compiler_is_compiling"""
)

_SEQUENCE = split_names(
    """chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind meshgrid
    broadcast_tensors topk sort kthvalue mode cummax cummin var_mean std_mean aminmax
    frexp slogdet svd eigh qr unique unique_consecutive nonzero_tuple"""
)

_SAME_RANK = split_names(
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

_REDUCTIONS = split_names(
    """all amax amin any argmax argmin count_nonzero logsumexp max mean median min nanmean
    nansum norm prod quantile std sum var"""
)

_WITH_INDICES = frozenset({"max", "min", "median"})

_MASKS = split_names(
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


def operation(name: str, arguments: Arguments) -> Value:
    """Return what `torch.name(*arguments)` returns; a tensor's method has the tensor as first
    argument."""
    if name in _OPERATIONS_PYTHON or name in _SEQUENCE:
        return python() if name in _OPERATIONS_PYTHON else Value(Kind.TENSORS)
    made = _operations_made(name, arguments)
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


def _of_tensor(name: str, first: Value, arguments: Arguments) -> Value:
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


def _operations_made(name: str, arguments: Arguments) -> Value | None:
    """The tensor itself, where all that it is made of is known."""
    values = arguments.positional
    maker = _MAKERS.get(name)
    if maker is None and not (name in _PURE and values and values[0].constant):
        return Value(Kind.TENSOR, rank=Rank(0, 1)) if name == "arange" else None
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


def _reduced(name: str, first: Value, rest: Arguments) -> Value:
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
        return Value(Kind.TENSORS, items={0: result, 1: result})
    return result


def _count(given: Value) -> int | None:
    if isinstance(given.object, int):
        return 1
    if isinstance(given.object, tuple | list):
        return len(given.object)
    return len(given.items) or None


def _sized(sizes: tuple[Value, ...]) -> Value:
    if len(sizes) == 1:
        (only,) = sizes
        if only.kind is Kind.SHAPE or (
            not only.items and not isinstance(only.object, tuple | list)
        ):
            is_number = only.kind is Kind.SIZE or isinstance(only.object, int)
            return tensor(Rank(0, 1) if is_number else None)
        sizes = tuple(only.items.values()) or tuple(map(of_object, only.object))
    return tensor(Rank(0, len(sizes)))


def wider(one: Value, other: Value) -> Rank | None:
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


_NUMBERS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
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

_ARITHMETIC_SIMPLE = (bool, int, float, str, type(None))


def combine(operation: ast.operator, left: Value, right: Value) -> Value:
    """The value of an arithmetic operation."""
    if left.tensor or right.tensor:
        return _of_tensors(operation, left, right)
    kinds = {left.kind, right.kind}
    for kind in (Kind.SHAPE, Kind.SIZE):
        if kind in kinds:
            sizes = [value for value in (left, right) if value.kind is kind]
            return Value(kind, axis=common_axis(sizes))
    if Kind.TENSORS in kinds:
        return Value(Kind.TENSORS if kinds <= {Kind.TENSORS, Kind.PYTHON} else Kind.UNKNOWN)
    if kinds == {Kind.PYTHON}:
        return Value(Kind.PYTHON, object=_computed(operation, left, right),
                     read=left.read or right.read)  # fmt: skip
    return unknown()


def _of_tensors(operation: ast.operator, left: Value, right: Value) -> Value:
    result = _computed(operation, left, right)
    if result is not NOTHING:
        return of_object(result)
    tensors = [value for value in (left, right) if value.tensor]
    minus = isinstance(operation, ast.Sub)
    others = all(value.tensor or value.kind is Kind.PYTHON for value in (left, right))
    return tensor(
        wider(left, right),
        unit=all(value.unit for value in tensors),
        mask=all(value.mask for value in tensors),
        fixed=others and all(value.constant for value in tensors),
        lowered=minus or any(value.lowered for value in tensors),
    )


def _computed(operation: ast.AST, left: Value, right: Value) -> Any:
    """The result, where both sides are known and small."""
    compute = _NUMBERS.get(type(operation))
    small = [isinstance(v.object, int | float) or _few(v) for v in (left, right)]
    texts = isinstance(operation, ast.cmpop) and all(
        isinstance(v.object, (*_ARITHMETIC_SIMPLE, tuple)) for v in (left, right)
    )
    if compute is None or not (all(small) or texts):
        return NOTHING
    try:
        return compute(left.object, right.object)
    except Exception:
        return NOTHING


def signed(value: Value, *, minus: bool) -> Value:
    """The value of `-x`, else of `+x` and `~x`."""
    if minus and isinstance(value.object, int | float):
        return of_object(-value.object)
    if minus and value.elements is not None:
        return of_object(-value.elements)
    if value.tensor:
        return tensor(value.rank, unit=value.unit, mask=value.mask, lowered=minus,
                      fixed=value.constant)  # fmt: skip
    return Value(value.kind, axis=value.axis) if value.kind is Kind.SIZE else python()


def compared(operation: ast.cmpop, left: Value, right: Value) -> Value:
    """The value of a comparison."""
    if isinstance(operation, ast.Is | ast.IsNot | ast.In | ast.NotIn):
        relation = _is if isinstance(operation, ast.Is | ast.IsNot) else _in
        truth = relation(left, right)
        positive = isinstance(operation, ast.Is | ast.In)
        return python() if truth is None else of_object(truth is positive)
    if left.tensor or right.tensor:
        return tensor(wider(left, right), mask=True)
    kinds = {left.kind, right.kind}
    if Kind.SIZE in kinds or Kind.SHAPE in kinds:
        return Value(Kind.SIZE)
    if kinds != {Kind.PYTHON}:
        return unknown()
    return Value(
        Kind.PYTHON, object=_computed(operation, left, right), read=left.read or right.read
    )


def _few(value: Value) -> bool:
    return value.elements is not None and value.elements.numel() <= FEW


def _in(left: Value, right: Value) -> bool | None:
    if isinstance(left.object, _ARITHMETIC_SIMPLE) and isinstance(
        right.object, list | tuple | dict | str
    ):
        with contextlib.suppress(TypeError):
            return left.object in right.object
    return None


def _is(left: Value, right: Value) -> bool | None:
    if left.object is not NOTHING and right.object is not NOTHING:
        return left.object is right.object
    for one, other in ((left, right), (right, left)):
        if one.object is None and other.kind not in (Kind.PYTHON, Kind.UNKNOWN):
            return False
    return None


_TENSORS = frozenset({"T", "mT", "H", "mH", "real", "imag", "grad", "values", "indices"})

_ATTRIBUTES_PYTHON = split_names(
    """ndim dtype device layout is_cuda is_sparse is_quantized is_leaf requires_grad grad_fn
    is_meta is_nested is_mkldnn names itemsize nbytes"""
)

_NO_ATTRIBUTE = object()


def of_tensor(value: Value, name: str) -> Value:
    """An attribute of a tensor, `data` among them."""
    if name == "shape":
        return shape_of(value)
    if name == "data":
        return tensor(value.rank, unit=value.unit)
    if name in _ATTRIBUTES_PYTHON:
        return python()
    if name in _TENSORS:
        return tensor()
    return Value(Kind.PYTHON, object=TensorMethod(value, name))


def shape_of(value: Value) -> Value:
    """The shape of a tensor: numbers that are known for weights, sizes of the input else."""
    if value.constant:
        stored = isinstance(value.object, torch.Tensor)
        return of_object(tuple(value.object.shape)) if stored else python()
    return Value(Kind.SHAPE, axis=0)


def of_other(value: Value, name: str, scope: Frame) -> Value:
    """An attribute of anything but a tensor."""
    if value.kind in (Kind.SHAPE, Kind.SIZE):
        return Value(Kind.PYTHON, object=ShapeMethod(value, name))
    if value.object is NOTHING:
        return unknown()
    if isinstance(value.object, Super):
        return _of_super(value.object, name)
    if isinstance(value.object, nn.Module):
        return _attributes_of_module(value.object, name, scope)
    return _of_object(value.object, name)


def _attributes_of_module(module: nn.Module, name: str, scope: Frame) -> Value:
    if name == "training":
        return of_object(False)  # exports are made in eval mode
    for own in (module.__dict__, module._parameters, module._buffers, module._modules):
        if name in own:
            return of_object(own[name])
    found = inspect.getattr_static(type(module), name, _NO_ATTRIBUTE)
    if isinstance(found, property) and found.fget is not None:
        return scope.walk.follow(found.fget, Arguments((of_object(module),)), scope)
    return _bound(found, module)


def _of_super(parent: Super, name: str) -> Value:
    classes = type(parent.owner).__mro__
    behind = classes[classes.index(parent.after) + 1 :] if parent.after in classes else ()
    for cls in behind:
        if name in vars(cls):
            return _bound(vars(cls)[name], parent.owner)
    return unknown()


def _bound(found: Any, owner: Any) -> Value:
    if found is _NO_ATTRIBUTE:
        return unknown()
    if isinstance(found, staticmethod):
        return of_object(found.__func__)
    if isinstance(found, classmethod):
        return of_object(types.MethodType(found.__func__, type(owner)))
    if isinstance(found, types.FunctionType) or python_function(found) is not None:
        return of_object(types.MethodType(found, owner))
    return of_object(found) if not hasattr(type(found), "__get__") else unknown()


def _of_object(thing: Any, name: str) -> Value:
    if isinstance(thing, types.ModuleType | type):
        try:
            return of_object(getattr(thing, name))
        except Exception:  # modules may load what is missing
            return unknown()
    found = inspect.getattr_static(thing, name, _NO_ATTRIBUTE)
    if isinstance(found, types.MemberDescriptorType):
        return of_object(getattr(thing, name, None))
    if isinstance(found, property):
        return python()
    if isinstance(found, types.MethodDescriptorType | types.BuiltinMethodType):
        return of_object(getattr(thing, name))
    return _bound(found, thing)


# By names alone, and never hopeful: what is returned, decides a branch or is given to a call for
# its effect is followed back through all assignments; an attribute counts wherever a function that
# a forward can reach reads one of this name.


_ENDS = (
    ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Break, ast.Continue, ast.Delete,
    ast.Global, ast.Nonlocal,
)  # fmt: skip

_OUTPUTS_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)


@dataclass(frozen=True)
class Guarded:
    """The statements that a condition guards in a function, and the rest of the function."""

    definition: Definition
    statements: tuple[ast.stmt, ...]
    """They run only while the model is exported, or only while it is not."""
    left_out: tuple[ast.AST, ...]
    """Nodes that are no part of the rest."""

    @classmethod
    def of(cls, node: ast.If | ast.IfExp, definition: Definition) -> Guarded | None:
        """None: what is guarded is itself a part of something that is more than an assignment."""
        if isinstance(node, ast.IfExp):
            statement = _statement(node, definition)
            if isinstance(statement, _OUTPUTS_SIMPLE):
                return cls(definition, (statement,), (statement,))
            return None
        early = _early_return(node, definition)
        if early is not None:
            return cls(definition, (*node.body[:-1], *early), (node, *early))
        return cls(definition, (*node.body, *node.orelse), (node,))

    def written(self) -> frozenset[str] | None:
        """Names and attributes (`self.x`) that are written; None: it may end the function, or
        change what others hold."""
        nodes = [inner for one in self.statements for inner in ast.walk(one)]
        if any(isinstance(inner, _ENDS) for inner in nodes):
            return None
        places = {place for inner in nodes for place in writes(inner, self._owner)[0]}
        changed = {place for inner in nodes for place in changes(inner, self._owner)}
        flows = [writes(inner, self._owner) for inner in ast.walk(self.definition)]
        named = [
            writes(inner, self._owner)
            for inner in ast.walk(self.definition)
            if not isinstance(inner, ast.AugAssign | ast.Call)
        ]
        while True:  # what was assigned may be another name of the same thing
            more = {p for to, sources in named if changed & to for p in sources} - changed
            if not more:
                break
            changed |= more
        own = {place for to, _ in flows for place in to} - self._parameters
        foreign = {place for place in changed if "." not in place and place not in own}
        return None if foreign or UNKNOWN in places else frozenset(places | changed)

    def reaching(self) -> frozenset[str]:
        """Names and attributes whose values the rest of the function returns or acts on."""
        rest = list(_outside(self.definition, self.left_out))
        live = {place for node in rest for place in _acted_on(node, self._owner)}
        flows = [writes(node, self._owner) for node in rest]
        while True:
            more = {source for to, sources in flows if live & to for source in sources} - live
            if not more:
                return frozenset(live)
            live |= more

    @property
    def _owner(self) -> str:
        arguments = [*self.definition.args.posonlyargs, *self.definition.args.args]
        return arguments[0].arg if arguments else ""

    @property
    def _parameters(self) -> set[str]:
        """Return the parameters of the function and of the functions in it, which share their
        values."""
        return {node.arg for node in ast.walk(self.definition) if isinstance(node, ast.arg)}


def attributes_read(trees: Iterable[ast.Module], *, left_out: Iterable[ast.AST]) -> frozenset[str]:
    """Names of attributes that functions read which a `forward` may reach, by their names."""
    skipped, bodies = tuple(left_out), dict[str, list[ast.AST]]()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                bodies.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Lambda):  # whoever holds it calls it by any name
                bodies.setdefault("forward", []).append(node)
    found: set[str] = set()
    ahead = ["forward", "__call__"]
    while ahead:
        for body in bodies.pop(ahead.pop(), ()):
            nodes = list(_outside(body, skipped))
            read = set(_attributes(nodes))
            found |= read
            ahead += [*read, *(node.id for node in nodes if isinstance(node, ast.Name))]
    return frozenset(found)


def _attributes(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Those that are read, and texts that are given to calls, such as `getattr`."""
    for node in nodes:
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                yield name
            case ast.Call(args=given):
                for part in given:
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.value


def _outside(node: ast.AST, left_out: tuple[ast.AST, ...]) -> Iterator[ast.AST]:
    if any(node is one for one in left_out):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside(child, left_out)


def _acted_on(node: ast.AST, owner: str) -> Iterator[str]:
    """Yield what a node outside of the guard returns, branches on, or passes to a call for its
    effect."""
    match node:
        case ast.Return(value=value) | ast.Yield(value=value) if value is not None:
            yield from reads(value, owner)
        case ast.YieldFrom(value=value) | ast.Expr(value=ast.Call() as value):
            yield from reads(value, owner)
        case ast.If(test=test) if not only_guards([*node.body, *node.orelse]):
            yield from reads(test, owner)
        case ast.While(test=decides) | ast.For(iter=decides) | ast.Match(subject=decides):
            yield from reads(decides, owner)


def _statement(node: ast.expr, definition: Definition) -> ast.AST:
    """The innermost statement around an expression."""
    found: ast.AST = definition
    for statement in ast.walk(definition):  # outer ones first
        if isinstance(statement, ast.stmt) and any(inner is node for inner in ast.walk(statement)):
            found = statement
    return found


def _early_return(node: ast.If, definition: Definition) -> tuple[ast.stmt, ...] | None:
    """Return the statements between `if guard: return x` and the same `return x` at the end."""
    block = [] if isinstance(definition, ast.Lambda) else definition.body
    place = next((number for number, one in enumerate(block) if one is node), None)
    if place is None or node.orelse or place + 1 == len(block):
        return None
    *between, last = block[place + 1 :]
    own = node.body[-1]
    if isinstance(own, ast.Return) and ast.dump(own) == ast.dump(last):
        return tuple(between)
    return None


_READS = {
    "item": "TRC002",
    "tolist": "TRC003",
    "numpy": "TRC001",
    "__array__": "TRC001",
    "__float__": "TRC001",
    "__int__": "TRC001",
    "__index__": "TRC001",
    "__bool__": "TRC008",
    "__len__": "TRC005",
}

_DROPOUTS: dict[Any, int] = {
    functional.dropout: 2,
    functional.dropout1d: 2,
    functional.dropout2d: 2,
    functional.dropout3d: 2,
    functional.alpha_dropout: 2,
    functional.feature_alpha_dropout: 2,
    torch.dropout: 2,
}
"""To the position of `training`."""

_ASKS = ("is_", "are_", "get_", "has_", "set_", "_is_", "_has_", "_get_", "_log_")

_COMPUTES = (
    "torch._C",
    "torch.nn",
    "torch.functional",
    "torch._tensor",
    "torch._jit_internal",
    "torch.linalg",
    "torch.fft",
    "torch.special",
    "torch._linalg_utils",
    "torch._lowrank",
)
"""Modules of torch whose functions return tensors; the others may return anything."""

_OFF_BY_DEFAULT = (functional.alpha_dropout, functional.feature_alpha_dropout)


def of_torch(node: ast.Call, callee: Any, arguments: Arguments, scope: Frame) -> Value:
    """Return the result of a function of torch."""
    name = callee.__name__
    owner = getattr(callee, "__self__", None)
    if isinstance(owner, nn.Module):
        return _torch_calls_of_module(owner, name)
    if callee in _DROPOUTS:
        _dropout(node, callee, arguments, scope)
    tell_rewritten(name, node, arguments, scope)
    if name == "tensor":
        first = arguments.get(0, "data")
        if first is not None and _from_tensors(first):
            scope.tell("TRC001", node, message="torch.tensor copies the example's numbers into the"
                       " file as a constant", rewrite="use the tensor itself, torch.stack for "
                       "several, x.clone() for a copy")  # fmt: skip
        sizes = list(_sizes(first)) if first is not None else []
        if sizes:
            tell_size(node, sizes, scope, rewrite="use torch.as_tensor, or the size as it is")
    if name == "is_nonzero":
        return tensor(mask=True)
    if name.startswith(_ASKS):
        return python()
    home = str(getattr(callee, "__module__", None) or "torch")
    computes = home == "torch" or home.startswith(_COMPUTES)
    return operation(name, arguments) if computes else unknown()


def _torch_calls_of_module(owner: nn.Module, name: str) -> Value:
    """Return the result of a method that torch gives every module."""
    if name in ("forward", "__call__"):
        return tensor()
    if name in ("values", "children", "modules"):
        return of_object(owner)  # to loop over
    if name in ("items", "named_children", "named_modules"):
        child = next(map(of_object, owner.children()), unknown())
        turn = Value(Kind.UNKNOWN, items={0: python(), 1: child})
        return Value(Kind.UNKNOWN, items={0: turn})
    return unknown()


def tensor_method(
    node: ast.Call, method: TensorMethod, arguments: Arguments, scope: Frame
) -> Value:
    """Return the result of a tensor's method."""
    owner, name = method.tensor, method.name
    if name in _READS:
        if not owner.constant:
            scope.tell(_READS[name], node)
        return Value(Kind.PYTHON, read=True)
    if name in ("size", "numel", "nelement"):
        return python() if owner.constant else _size(name, arguments)
    if name in ("index_put", "index_put_"):
        _index_put(node, arguments, scope)
    whole = arguments.after(owner)
    if not owner.constant or name in ("index_add", "index_add_"):  # of zeros, mostly
        tell_rewritten(name, node, whole, scope)
    return operation(name, whole)


def _size(name: str, arguments: Arguments) -> Value:
    axis = arguments.get(0, "dim")
    if axis is None:
        return Value(Kind.SHAPE if name == "size" else Kind.SIZE, axis=0)
    number = axis.object if axis is not None else None
    return Value(Kind.SIZE, axis=number if isinstance(number, int) else None)


def _index_put(node: ast.Call, arguments: Arguments, scope: Frame) -> None:
    indices = arguments.get(0, "indices")
    items = list(indices.items.values()) if indices is not None else []
    ranks = [item.rank.offset for item in items if item.rank and item.rank.base == 0]
    if items and items[0].object is None and any(rank > 1 for rank in ranks):
        scope.tell("TRC010", node)


def shape_method(node: ast.Call, method: ShapeMethod, _arguments: Arguments, scope: Frame) -> Value:
    """Return the result of a method of a shape, or of one of its numbers."""
    if method.name in ("numel", "item", "__int__", "__float__", "__index__"):
        tell_size(node, [method.shape], scope)
        return python()
    return unknown()


def _dropout(
    node: ast.Call, callee: Callable[..., Any], arguments: Arguments, scope: Frame
) -> None:
    if arguments.spread:
        return
    given = arguments.get(_DROPOUTS[callee], "train" if callee is torch.dropout else "training")
    if given is None and callee in _OFF_BY_DEFAULT:
        return
    share = arguments.get(1, "p")
    if share is not None and share.object in (0, 0.0):
        return
    if given is None:
        scope.tell("TRC013", node)
    elif given.kind is Kind.PYTHON and given.object is True:
        scope.tell("TRC013", node, message="this drops in eval mode too")


def _from_tensors(value: Value) -> bool:
    if value.tensor:
        return not value.constant
    return value.kind is Kind.TENSORS or any(map(_from_tensors, value.items.values()))


def _sizes(value: Value) -> Iterator[Value]:
    """The sizes in it, and in its items."""
    if value.kind in (Kind.SIZE, Kind.SHAPE):
        yield value
    else:
        for item in value.items.values():
            yield from _sizes(item)


_NUMERIC = ("numpy", "math", "cmath", "statistics")

_CALLS_PLAIN = (type, types.FunctionType, types.BuiltinFunctionType)

_Answer = Callable[[ast.Call, Any, Arguments, Frame], Value]

_BY_STRATEGY: dict[str, tuple[str, ...]] = {
    "traced": ("is_tracing", "_is_tracing", "_get_tracing_state", "is_in_onnx_export"),
    "scripted": ("is_scripting", "is_in_onnx_export"),
    "dynamo": ("is_compiling", "is_dynamo_compiling", "is_exporting", "is_in_onnx_export"),
}

_FLAGS = frozenset(name for names in _BY_STRATEGY.values() for name in names)
"""Functions of torch and torchvision that tell whether the model is being exported."""

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)


def call(node: ast.Call, function: Value, arguments: Arguments, scope: Frame) -> Value:
    """Return the result of a call."""
    callee = function.object
    if callee is NOTHING:
        return unknown()
    if isinstance(callee, _CALLS_PLAIN) and callee in BUILTINS:
        return BUILTINS[callee](node, arguments, scope)
    answer = next(
        (answer for kind, answer in _CALLS_BY_TYPE if isinstance(callee, kind)), _calls_function
    )
    return answer(node, callee, arguments, scope)


def _calls_function(node: ast.Call, callee: Any, arguments: Arguments, scope: Frame) -> Value:
    package = _home(python_function(callee) or callee).partition(".")[0]
    name = str(getattr(callee, "__name__", ""))
    if name in _FLAGS and package in ("torch", "torchvision"):
        return _flag(name, scope)
    if package == "torch":
        return of_torch(node, callee, arguments, scope)
    if package in _NUMERIC and callee is not math.prod:
        return numbers_from(node, arguments, scope, by=f"{package}.{name}")
    if package in sys.stdlib_module_names:
        return unknown()
    if python_function(callee) is None:
        called = python_function(vars(type(callee)).get("__call__"))
        if called is None:
            scope.walk.unread(callee, "it is compiled code, without Python source")
            return unknown()
        callee = types.MethodType(called, callee)
    return scope.walk.follow(callee, arguments, scope)


def _local(_node: ast.Call, callee: Local, arguments: Arguments, scope: Frame) -> Value:
    return scope.walk.call_local(callee, arguments)


def _module(_node: ast.Call, callee: nn.Module, arguments: Arguments, scope: Frame) -> Value:
    return scope.walk.call_module(callee, arguments, scope)


def _class(_node: ast.Call, callee: type, arguments: Arguments, scope: Frame) -> Value:
    return _super(arguments, scope) if callee is super else _calls_made(callee, arguments)


def _super(arguments: Arguments, scope: Frame) -> Value:
    if arguments.positional:
        after = arguments.positional[0].object
        return of_object(Super(scope.owner, after)) if isinstance(after, type) else unknown()
    function = scope.code.function
    for cls in type(scope.owner).__mro__:
        if python_function(vars(cls).get(function.__name__)) is function:
            return of_object(Super(scope.owner, cls))
    return unknown()


def _calls_made(cls: type, arguments: Arguments) -> Value:
    if issubclass(cls, _DICTS):
        return Value(Kind.DICT)
    if issubclass(cls, torch.Size):
        return Value(Kind.SHAPE)
    if issubclass(cls, torch.Tensor):
        return operation(cls.__name__, arguments)
    if cls.__module__.split(".")[0] == "torch":
        return tensor() if issubclass(cls, torch.autograd.Function) else python()
    return unknown()


def _home(thing: Any) -> str:
    """The module that a function belongs to, `torch` for torch's builtins."""
    name = str(getattr(thing, "__name__", ""))
    home = getattr(thing, "__module__", None)
    if home is None:
        if getattr(torch, name, None) is thing:
            return "torch"
        home = getattr(getattr(thing, "__self__", None), "__name__", None)
        home = home or type(getattr(thing, "__self__", None)).__module__
    if isinstance(thing, torch.jit.ScriptFunction):
        return "torch"
    return str(home)


_CALLS_BY_TYPE: tuple[tuple[type, _Answer], ...] = (
    (TensorMethod, tensor_method),
    (ShapeMethod, shape_method),
    (Local, _local),
    (nn.Module, _module),
    (type, _class),
)


def _flag(name: str, scope: Frame) -> Value:
    """Return the result of the function of this name: False, or what only an export makes true."""
    strategy = "traced" if scope.walk.strategy == "direct" else scope.walk.strategy
    if name in _BY_STRATEGY[strategy]:
        return Value(Kind.PYTHON, flag=name)
    return of_object(False)


def evaluate(node: ast.expr, scope: Frame) -> Value:
    """The value of an expression. Never raises for valid syntax."""
    handler = _EXPRESSIONS_BY_TYPE.get(type(node))
    if handler is not None:
        return handler(node, scope)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            evaluate(child, scope)
    return python() if isinstance(node, ast.JoinedStr | ast.FormattedValue) else unknown()


def evaluate_test(node: ast.expr, scope: Frame) -> Value:
    """The value of an expression of which only the truth is asked: whoever asks tells of it."""
    if isinstance(node, ast.BoolOp):
        return all_or_any(node, _parts(node, scope, evaluate_test))
    return evaluate(node, scope)


def assign(target: ast.expr, value: Value, scope: Frame) -> None:
    """Bind names, unpack tuples, and look at what is written through an index."""
    if isinstance(target, ast.Name):
        scope.names[target.id] = value
    elif isinstance(target, ast.Starred):
        assign(target.value, unknown(), scope)
    elif isinstance(target, ast.Tuple | ast.List):
        for position, part in enumerate(target.elts):
            assign(part, items_item(value, position), scope)
    elif isinstance(target, ast.Subscript):
        indexed = evaluate(target.value, scope)
        index = torch_rules.IndexExpression.of(target.slice, lambda part: evaluate(part, scope))
        if indexed.tensor:
            torch_rules.write(target, indexed, index, (value, scope))
    elif isinstance(target, ast.Attribute):
        owner = evaluate(target.value, scope)
        if target.attr == "data" and owner.tensor:
            scope.tell("TRC006", target)
        elif isinstance(owner.object, nn.Module):
            scope.names[ast.unparse(target)] = value  # `self.last` is no other name


def _attribute(node: ast.Attribute, scope: Frame) -> Value:
    owner = evaluate(node.value, scope)
    if isinstance(owner.object, nn.Module) and ast.unparse(node) in scope.names:
        return scope.names[ast.unparse(node)]
    if not owner.tensor:
        return of_other(owner, node.attr, scope)
    if node.attr == "data":
        scope.tell("TRC006", node, level="warning" if owner.constant else None)
    return of_tensor(owner, node.attr)


def _subscript(node: ast.Subscript, scope: Frame) -> Value:
    owner = evaluate(node.value, scope)
    if owner.tensor:
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            scope.tell("TRC012", node, message="an input is a dict: the file takes its tensors by "
                       "position, in the order of the example's keys")  # fmt: skip
            return tensor()
        index = torch_rules.IndexExpression.of(node.slice, lambda part: evaluate(part, scope))
        return torch_rules.read(node, owner, index, scope)
    if isinstance(node.slice, ast.Slice):
        ends = (node.slice.lower, node.slice.upper, node.slice.step)
        return sliced(owner, [evaluate(end, scope).object if end else None for end in ends])
    key = evaluate(node.slice, scope)
    if key.tensor and not key.constant and has_items(owner):
        scope.tell("TRC001", node.slice, message="Python takes the item that the example asks for",
                   rewrite="stack the items and index the tensor, or use torch.where")  # fmt: skip
    return keyed(owner, key)


def _sequence(node: ast.Tuple | ast.List | ast.Set, scope: Frame) -> Value:
    values = [evaluate(part, scope) for part in node.elts]
    if any(isinstance(part, ast.Starred) for part in node.elts):
        tensors = all(value.kind in (Kind.TENSOR, Kind.TENSORS) for value in values)
        return Value(Kind.TENSORS if tensors else Kind.UNKNOWN)
    return sequence(values, tuple if isinstance(node, ast.Tuple) else list)


def _dict(node: ast.Dict, scope: Frame) -> Value:
    for key in node.keys:
        if key is not None:
            evaluate(key, scope)
    values = [evaluate(value, scope) for value in node.values]
    return Value(Kind.DICT, items=dict(enumerate(values)))


def _binary(node: ast.BinOp, scope: Frame) -> Value:
    sides = [evaluate(part, scope) for part in (node.left, node.right)]
    for part, value in zip((node.left, node.right), sides, strict=True):
        if value.truth:
            scope.tell("TRC008", part, message="Python's True or False of the example is computed "
                       "with", rewrite="use the mask itself, torch.logical_not, &, |")  # fmt: skip
    floor_division(node, sides, scope)
    return combine(node.op, *sides)


def _compare(node: ast.Compare, scope: Frame) -> Value:
    left, *others = (evaluate(part, scope) for part in (node.left, *node.comparators))
    found = []
    for operation, right in zip(node.ops, others, strict=True):
        found.append(compared(operation, left, right))
        left = right
    truths = [decided(value) for value in found]
    if len(found) > 1 and (False in truths or None not in truths):
        return of_object(False not in truths)
    return found[0] if len(found) == 1 else all_of(found)


def _boolean(node: ast.BoolOp, scope: Frame) -> Value:
    parts = _parts(node, scope, evaluate)
    chosen(node, parts, scope)
    return all_or_any(node, parts)


def _parts(node: ast.BoolOp, scope: Frame, read: Callable[[ast.expr, Frame], Value]) -> list[Value]:
    """The parts up to the one that decides."""
    parts: list[Value] = []
    for part in node.values:
        parts.append(read(part, scope))
        if decided(parts[-1]) is isinstance(node.op, ast.Or):
            break
    return parts


def _unary(node: ast.UnaryOp, scope: Frame) -> Value:
    if isinstance(node.op, ast.Not):
        return negated(evaluate_test(node.operand, scope))
    return signed(evaluate(node.operand, scope), minus=isinstance(node.op, ast.USub))


def _choice(node: ast.IfExp, scope: Frame) -> Value:
    test = evaluate_test(node.test, scope)
    truth = decided(test)
    if truth is not None:
        return evaluate(node.body if truth else node.orelse, scope)
    same = ast.dump(node.body) == ast.dump(node.orelse)
    changes = not same and not (test.flag and not scope.walk.reaches(node, scope))
    condition(test, node.test, scope, changes=changes)
    one, other = evaluate(node.body, scope), evaluate(node.orelse, scope)
    if test.tensor and ranks_differ(one, other):
        scope.tell("TRC015", node)
    return join([one, other])


def _call(node: ast.Call, scope: Frame) -> Value:
    function = evaluate(node.func, scope)
    positional, keywords, spread = [], {}, False
    for part in node.args:
        given = evaluate(part, scope)
        if isinstance(part, ast.Starred):
            parts = static_items(given)
            if parts and not spread:
                positional += parts
                continue
            spread = True
            given = items_item(given, None)
        positional.append(given)
    for keyword in node.keywords:
        given = evaluate(keyword.value, scope)
        if keyword.arg is None:
            spread = True
        else:
            keywords[keyword.arg] = given
    return call(node, function, Arguments(tuple(positional), keywords, spread), scope)


def _comprehension(
    node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, scope: Frame
) -> Value:
    inner = Frame(scope.code, scope.walk, scope.path, {}, scope.owner, scope,
                  depth=scope.depth)  # fmt: skip
    for part in node.generators:
        assign(part.target, iterate(part.iter, inner), inner)
        for test in part.ifs:
            condition(evaluate_test(test, inner), test, inner)
    if isinstance(node, ast.DictComp):
        evaluate(node.key, inner)
        evaluate(node.value, inner)
        return Value(Kind.DICT)
    element = evaluate(node.elt, inner)
    kinds = {Kind.TENSOR: Kind.TENSORS, Kind.UNKNOWN: Kind.UNKNOWN}
    return Value(kinds.get(element.kind, Kind.PYTHON))


def iterate(node: ast.expr, scope: Frame) -> Value:
    """Return the item of each turn of a loop over this expression; report loops over tensors."""
    value = evaluate(node, scope)
    if value.tensor and not value.constant:
        scope.tell("TRC008", node, message="a loop over a tensor has as many turns in the file as "
                   "the example had rows", rewrite="use operations on the whole tensor, or "
                   "strategy: scripted")  # fmt: skip
    elif value.loop:
        scope.tell("TRC016", node, message="the loop has as many turns in the file as the example's"
                   " size asked for: wrong where that axis is dynamic")  # fmt: skip
    return value.items[0] if value.loop and value.items else items_item(value, None)


def _named(node: ast.NamedExpr, scope: Frame) -> Value:
    value = evaluate(node.value, scope)
    assign(node.target, value, scope)
    return value


_EXPRESSIONS_BY_TYPE: dict[type[ast.expr], Callable[[Any, Frame], Value]] = {
    ast.Name: lambda node, scope: scope.resolve(node.id),
    ast.Constant: lambda node, _scope: Value(Kind.PYTHON, object=node.value),
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    **dict.fromkeys((ast.Tuple, ast.List, ast.Set), _sequence),
    ast.Dict: _dict,
    ast.BinOp: _binary,
    ast.Compare: _compare,
    ast.BoolOp: _boolean,
    ast.UnaryOp: _unary,
    ast.IfExp: _choice,
    ast.Call: _call,
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp), _comprehension),
    ast.Lambda: lambda node, scope: Value(Kind.PYTHON, object=Local(node, scope)),
    ast.NamedExpr: _named,
    ast.Starred: lambda node, scope: evaluate(node.value, scope),
}


Names = dict[str, Value]


def run(body: Sequence[ast.stmt], scope: Frame) -> bool:
    """Go through statements. True if the end is never reached (return, raise, continue, break)."""
    for statement in body:
        handler = _FLOW_BY_TYPE.get(type(statement))
        if handler is not None and handler(statement, scope):
            return True
    return False


def _expression(node: ast.Expr, scope: Frame) -> None:
    evaluate(node.value, scope)


def _assign(node: ast.Assign, scope: Frame) -> None:
    value = evaluate(node.value, scope)
    for target in node.targets:
        assign(target, value, scope)


def _annotated(node: ast.AnnAssign, scope: Frame) -> None:
    if node.value is not None:
        assign(node.target, evaluate(node.value, scope), scope)


def _augmented(node: ast.AugAssign, scope: Frame) -> None:
    before, by = evaluate(node.target, scope), evaluate(node.value, scope)
    floor_division(node, [before, by], scope)
    value = combine(node.op, before, by)
    if before.kind is Kind.SIZE and _shared(before, node.target, scope):
        scope.tell("TRC007", node)
    assign(node.target, value, scope)


def _shared(size: Value, target: ast.expr, scope: Frame) -> bool:
    """True if somebody else holds this very size: another name, a tuple, its shape."""
    own = target.id if isinstance(target, ast.Name) else None
    for name, value in scope.names.items():
        if name != own and (value is size or value is size.shape):
            return True
        if any(item is size for item in value.items.values()):
            return True
    return False


def _if(node: ast.If, scope: Frame) -> bool:
    test = evaluate_test(node.test, scope)
    truth = decided(test)
    if truth is not None:
        return run(node.body if truth else node.orelse, scope)
    same = [ast.dump(s) for s in node.body] == [ast.dump(s) for s in node.orelse]
    guard = only_guards([*node.body, *node.orelse]) and not test.flag
    changes = not same and not (test.flag and not scope.walk.reaches(node, scope))
    condition(test, node.test, scope, changes=changes, guard=guard)
    before, returned = dict(scope.names), len(scope.returned)
    ended = run(node.body, scope)
    one, middle = scope.names, len(scope.returned)
    scope.names = dict(before)
    other_ended = run(node.orelse, scope)
    other = scope.names
    if test.tensor or test.read:
        _ranks(node, (one, other), scope)
        _returned_ranks(node, scope, (returned, middle))
    scope.names = other if ended else one if other_ended else _joined(one, other)
    return ended and other_ended


def _ranks(node: ast.If, branches: tuple[Names, Names], scope: Frame) -> None:
    one, other = branches
    for name in one.keys() & other.keys():
        left, right = one[name], other[name]
        if left.tensor and right.tensor and ranks_differ(left, right):
            scope.tell("TRC015", node.test, message=f"{name} has another rank in each branch: the "
                       "exporter takes one for both")  # fmt: skip


def _returned_ranks(node: ast.If, scope: Frame, marks: tuple[int, int]) -> None:
    start, middle = marks
    one, other = scope.returned[start:middle], scope.returned[middle:]
    if any(ranks_differ(left, right) for left in one for right in other):
        scope.tell("TRC015", node.test, message="the branches return tensors of different rank")


def _joined(one: Names, other: Names) -> Names:
    return {
        name: join([branch[name] for branch in (one, other) if name in branch])
        for name in one.keys() | other.keys()
    }


def _for(node: ast.For, scope: Frame) -> bool:
    turn = iterate(node.iter, scope)
    _loop(node.body, scope, lambda: assign(node.target, turn, scope))
    return run(node.orelse, scope)


def _while(node: ast.While, scope: Frame) -> bool:
    def test() -> None:
        value = evaluate_test(node.test, scope)
        if decided(value) is None:
            condition(value, node.test, scope)

    _loop(node.body, scope, test)
    return run(node.orelse, scope)


def _loop(body: Sequence[ast.stmt], scope: Frame, start: Callable[[], None]) -> None:
    """Two turns: what the first binds is there in the second."""
    for _ in range(2):
        before = dict(scope.names)
        start()
        run(body, scope)
        scope.names = _joined(before, scope.names)


def _with(node: ast.With, scope: Frame) -> bool:
    for part in node.items:
        value = evaluate(part.context_expr, scope)
        if part.optional_vars is not None:
            assign(part.optional_vars, value if value.tensor else unknown(), scope)
    return run(node.body, scope)


def _try(node: ast.Try, scope: Frame) -> bool:
    before = dict(scope.names)
    ended = run([*node.body, *node.orelse], scope)
    for handler in node.handlers:
        after, scope.names = scope.names, dict(before)
        if not run(handler.body, scope):
            after = scope.names if ended else _joined(after, scope.names)
            ended = False
        scope.names = after
    return run(node.finalbody, scope) or ended


def _match(node: ast.Match, scope: Frame) -> None:
    subject = evaluate(node.subject, scope)
    condition(subject, node.subject, scope)
    before, ends = dict(scope.names), []
    for case in node.cases:
        scope.names = dict(before)
        if not run(case.body, scope):
            ends.append(scope.names)
    scope.names = before
    for names in ends:
        scope.names = _joined(scope.names, names)


def _return(node: ast.Return, scope: Frame) -> bool:
    value = of_object(None) if node.value is None else evaluate(node.value, scope)
    scope.returned.append(value)
    if scope.top and node.value is not None:
        _outputs(node, value, scope)
    return True


def _outputs(node: ast.Return, value: Value, scope: Frame) -> None:
    """Treat the return values of the model itself as the outputs of the file."""
    if value.kind is Kind.DICT:
        scope.tell("TRC012", node, message="the model returns a dict: the file has its tensors in "
                   "the order in which the keys were set", rewrite="name the outputs in that order,"
                   " or return a tuple")  # fmt: skip
    texts = [one for one in (value, *value.items.values()) if isinstance(one.object, str)]
    if texts:
        scope.tell("TRC012", node, level="error", message="the model returns text: it is not in "
                   "the file", rewrite="return tensors alone; keep texts beside it")  # fmt: skip


def _ends(node: ast.stmt, scope: Frame) -> bool:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            evaluate(child, scope)
    return True


def _assert(node: ast.Assert, scope: Frame) -> None:
    value = evaluate_test(node.test, scope)
    condition(value, node.test, scope, guard=True)


def _flow_function(node: ast.FunctionDef, scope: Frame) -> None:
    scope.names[node.name] = Value(Kind.PYTHON, object=Local(node, scope))


def _import(node: ast.Import, scope: Frame) -> None:
    for alias in node.names:
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        module = sys.modules.get(name)
        scope.names[alias.asname or name] = unknown() if module is None else of_object(module)


def _import_from(node: ast.ImportFrom, scope: Frame) -> None:
    package = scope.code.function.__globals__.get("__package__") or ""
    try:
        name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        name = ""
    module = sys.modules.get(name)
    for alias in node.names:
        exists = hasattr(module, alias.name)
        value = of_object(getattr(module, alias.name)) if exists else unknown()
        scope.names[alias.asname or alias.name] = value


def _forget(node: ast.Delete, scope: Frame) -> None:
    for target in node.targets:
        if isinstance(target, ast.Name):
            scope.names.pop(target.id, None)


_FLOW_BY_TYPE: dict[type[ast.stmt], Callable[[Any, Frame], bool | None]] = {
    ast.Expr: _expression,
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.If: _if,
    ast.For: _for,
    ast.While: _while,
    ast.With: _with,
    ast.Try: _try,
    ast.Match: _match,
    ast.Return: _return,
    ast.Raise: _ends,
    ast.Continue: _ends,
    ast.Break: _ends,
    ast.Assert: _assert,
    ast.FunctionDef: _flow_function,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.Delete: _forget,
}


_DEEP = 16
"""Calls in calls: deeper ones are taken as not known."""

_TRUSTED = "torch"
"""Modules and functions of torch itself are written to be exported; not torchvision's."""


class ForwardVisitor:
    """Reads what the model runs; collects findings and what can't be read."""

    def __init__(self, model: nn.Module, strategy: Strategy) -> None:
        self.strategy: Strategy = strategy
        self.findings: dict[tuple[str, str, int, int], LintFinding] = {}
        self.not_read: dict[str, str] = {}
        self.read: set[Any] = set()
        self._model = model
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._results: dict[Any, Value] = {}
        self._open: set[Any] = set()
        self._walked: set[int] = set()

    def whole(self) -> None:
        """The model's own forward first, then those that it was not seen to call."""
        for module in self._model.modules():
            if id(module) not in self._walked:
                self.call_module(module, None, None)

    # --- what the flow asks -------------------------------------------------------------------

    def call_module(
        self, module: nn.Module, arguments: Arguments | None, scope: Frame | None
    ) -> Value:
        """See `Walk`. `arguments` None: as the forward declares them."""
        self._walked.add(id(module))
        if isinstance(module, torch.jit.ScriptModule):
            self.unread(self._paths.get(id(module), "") or str(module.original_name),
                        "it is TorchScript already: read its source as an nn.Module")  # fmt: skip
            return unknown()
        forward = inspect.getattr_static(module, "forward", None)
        function = python_function(forward)
        if function is None or (_of_torch(function) and not is_read(module)):
            return self._torch_module(module, arguments, scope)
        owner = None if inspect.ismethod(forward) or isinstance(forward, staticmethod) else module
        given = arguments
        if arguments is not None and owner is not None:
            given = arguments.after(of_object(owner))
        return self._function(function, given, (module, scope))

    def follow(self, function: Any, arguments: Arguments, scope: Frame) -> Value:
        """See `Walk`."""
        arguments = _with_partial(function, arguments)
        owner = getattr(function, "__self__", None)
        if owner is not None:
            arguments = arguments.after(of_object(owner))
        found = python_function(function)
        if found is None:
            self.unread(function, "it has no Python source")
            return unknown()
        if _of_torch(found):
            return tensor()
        owner = owner if owner is not None else scope.owner
        return self._function(found, arguments, (owner, scope))

    def call_local(self, local: Local, arguments: Arguments) -> Value:
        """See `Walk`."""
        outer, definition = local.scope, local.definition
        if outer.depth >= _DEEP or definition in self._open:
            return unknown()
        names = values.bound(definition, None, arguments)
        scope = Frame(outer.code, self, outer.path, names, outer.owner, outer,
                      depth=outer.depth + 1)  # fmt: skip
        self._open.add(definition)
        try:
            return _result(definition, scope)
        finally:
            self._open.discard(definition)

    def tell(self, scope: Frame, node: ast.expr | ast.stmt, code: str, **instead: str) -> None:
        """See `Walk`."""
        rule = RULES[code]
        if self.strategy not in rule.strategies:
            return
        place = (code, scope.code.path, node.lineno, node.col_offset)
        if place in self.findings:
            return
        fields: dict[str, Any] = {
            "level": rule.level, "message": rule.message, "rewrite": rule.rewrite, **instead
        }  # fmt: skip
        self.findings[place] = LintFinding(
            code=code,
            path=scope.code.path,
            line=node.lineno,
            module=scope.path,
            expression=scope.code.text(node),
            suppressed=scope.code.silences(code, node),
            **fields,
        )

    def unread(self, thing: Any, reason: str) -> None:
        """See `Walk`."""
        name = thing if isinstance(thing, str) else _walk_name(thing)
        self.not_read.setdefault(name, reason)

    def reaches(self, node: ast.If | ast.IfExp, scope: Frame) -> bool:
        """See `Walk`."""
        guarded = Guarded.of(node, scope.code.definition)
        written = guarded.written() if guarded is not None else None
        if guarded is None or written is None:
            return True
        attributes = {place.partition(".")[2] for place in written if "." in place}
        if not attributes and not written & guarded.reaching():
            return False
        trees = trees_of(type(module) for module in self._model.modules())
        elsewhere = attributes_read(trees, left_out=guarded.left_out) if trees else attributes
        return bool(written & guarded.reaching() or attributes & elsewhere)

    # --- functions ----------------------------------------------------------------------------

    def _function(
        self, function: Any, arguments: Arguments | None, place: tuple[Any, Frame | None]
    ) -> Value:
        owner, caller = place
        depth = caller.depth + 1 if caller else 0
        key = (function, id(owner), arguments.signature if arguments else None)
        if key in self._results:
            return self._results[key]
        if key in self._open or depth > _DEEP:
            return unknown()
        try:
            code = FunctionSource.of(function)
        except Unreadable as error:
            self.unread(function, str(error))
            return unknown()
        self.read.add(function)
        path = self._paths.get(id(owner), caller.path if caller else "")
        top = caller is None and owner is self._model
        names = self._names(code, arguments, owner)
        scope = Frame(code, self, path, names, owner, top=top, depth=depth)
        if top:
            _inputs(scope)
        self._open.add(key)
        try:
            self._results[key] = _result(code.definition, scope)
        except Exception as error:  # a model may hold anything; what stays unread is told
            self.unread(function, f"the rules can't follow it: {type(error).__name__}: {error}")
            return unknown()
        finally:
            self._open.discard(key)
        return self._results[key]

    def _names(
        self, code: FunctionSource, arguments: Arguments | None, owner: Any
    ) -> dict[str, Value]:
        if arguments is not None:
            return values.bound(code.definition, code.function, arguments)
        return values.declared(code.definition, code.function, of_object(owner))

    def _torch_module(
        self, module: nn.Module, arguments: Arguments | None, scope: Frame | None
    ) -> Value:
        """torch's own: containers are gone through, the others return tensors."""
        if not isinstance(module, nn.Sequential) or arguments is None or scope is None:
            return _from_torch(module, arguments)
        value = None
        for child in module.children():
            value = self.call_module(child, arguments, scope)
            arguments = Arguments((value,))
        return value or next(iter(arguments.positional), unknown())


def _from_torch(module: nn.Module, arguments: Arguments | None) -> Value:
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return Value(Kind.TENSORS, items={0: tensor()})
    given = arguments.get(0, "input") if arguments is not None else None
    rank = given.rank if given is not None and given.tensor else None
    if isinstance(module, nn.Embedding):
        rank = rank.plus(1) if rank else None
    elif isinstance(module, nn.Flatten | nn.Unflatten | nn.Fold | nn.Unfold):
        rank = None
    return tensor(rank)


def _result(definition: Definition, scope: Frame) -> Value:
    if isinstance(definition, ast.Lambda):
        return evaluate(definition.body, scope)
    run(definition.body, scope)
    return join(scope.returned) if scope.returned else of_object(None)


def _inputs(scope: Frame) -> None:
    """Treat the arguments of the model itself as the inputs of the file."""
    definition = scope.code.definition
    for argument in (*definition.args.posonlyargs, *definition.args.args)[1:]:
        value = scope.names.get(argument.arg)
        if value is None or not isinstance(argument, ast.arg):
            continue
        if values.is_text(argument.annotation) or _text_default(scope, argument.arg):
            _tell_input(scope, argument, "an input is text: the file has the example's in it",
                        "put the choice that it makes into __init__")  # fmt: skip
        elif value.kind is Kind.DICT:
            _tell_input(scope, argument, "an input is a dict: the file takes its tensors by "
                        "position, in the order of the example's keys", "take the tensors one by "
                        "one: forward(self, image, mask)")  # fmt: skip


def _tell_input(scope: Frame, argument: ast.arg, message: str, rewrite: str) -> None:
    node = ast.copy_location(ast.Name(id=argument.arg), argument)
    node.end_lineno, node.end_col_offset = argument.end_lineno, argument.end_col_offset
    scope.tell("TRC012", node, message=message, rewrite=rewrite)


def _text_default(scope: Frame, name: str) -> bool:
    parameters = inspect.signature(scope.code.function).parameters
    return name in parameters and isinstance(parameters[name].default, str)


def _with_partial(function: Any, arguments: Arguments) -> Arguments:
    while isinstance(function, functools.partial):
        arguments = Arguments(
            (*map(of_object, function.args), *arguments.positional),
            {**{k: of_object(v) for k, v in function.keywords.items()}, **arguments.keywords},
            arguments.spread,
        )
        function = function.func
    return arguments


def _of_torch(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] == _TRUSTED


def _walk_name(thing: Any) -> str:
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return f"{module}.{getattr(thing, '__qualname__', type(thing).__name__)}"
