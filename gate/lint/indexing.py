"""Indexing of tensors: what an index selects, and which reads and writes exporters get wrong."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gate.lint.scope import FunctionScope
from gate.lint.value import Kind, Rank, StaticValue, tensor

_WHOLE = "slice"
_UNIT = "slice of length 1"
_NEW = "None"
_ELLIPSIS = "..."


@dataclass(frozen=True)
class IndexExpression:
    """The parts of `x[a, b:c, None]`: each a value, or the word for a slice, None or `...`."""

    parts: tuple[StaticValue | str, ...]

    @classmethod
    def of(cls, node: ast.expr, evaluate: Callable[[ast.expr], StaticValue]) -> IndexExpression:
        """Read it; `evaluate` is called once for each expression in it."""
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        return cls(tuple(_part(part, evaluate) for part in parts))

    @property
    def tensors(self) -> tuple[StaticValue, ...]:
        """Index tensors, and lists, which become such; masks too."""
        return tuple(p for p in self.parts if isinstance(p, StaticValue) and _is_tensor(p))

    @property
    def gathers(self) -> tuple[StaticValue, ...]:
        """Index tensors of integers."""
        return tuple(p for p in self.tensors if not _is_mask(p))

    def rank_of(self, indexed: StaticValue) -> Rank | None:
        """The rank of what is selected; None where it is not known."""
        if indexed.rank is None:
            return None
        change, ranks = 0, []
        for part in self.parts:
            if part == _NEW:
                change += 1
            elif isinstance(part, StaticValue) and _is_tensor(part):
                rank = _rank(part)
                if rank is None:
                    return None
                change -= rank if _is_mask(part) else 1
                ranks.append(1 if _is_mask(part) else rank)
            elif isinstance(part, StaticValue):
                if part.kind not in (Kind.PYTHON, Kind.SIZE):
                    return None
                change -= 1
        return indexed.rank.plus(change + max(ranks, default=0))

    @property
    def unit(self) -> bool:
        """True if the selected part has an axis of size 1 by the way it is selected."""
        made = any(isinstance(part, StaticValue) and part.unit for part in self.parts)
        return made or _NEW in self.parts or _UNIT in self.parts


def read(
    node: ast.Subscript, indexed: StaticValue, index: IndexExpression, scope: FunctionScope
) -> StaticValue:
    """What `x[…]` gives; tells of negative index tensors."""
    gathers = index.gathers
    if any(_negative(value) for value in gathers):
        if len(gathers) > 1:
            scope.tell("TRC009", node)
        else:
            scope.tell(
                "TRC009",
                node,
                level="note",
                message="a single index tensor may be negative; two would be read wrongly",
            )
    elif len(gathers) > 1 and any(value.lowered for value in gathers):
        message = "if one of these index tensors is negative, another element is read"
        scope.tell("TRC009", node, level="warning", message=message)
    whole = all(part in (_WHOLE, _UNIT, _ELLIPSIS) for part in index.parts if part != _NEW)
    unit = index.unit or (indexed.unit and whole)
    fixed = indexed.constant and all(value.constant for value in index.tensors)
    return tensor(index.rank_of(indexed), unit=unit, mask=indexed.mask, fixed=fixed,
                  lowered=indexed.lowered or _negative(indexed))  # fmt: skip


def write(
    node: ast.Subscript,
    indexed: StaticValue,
    index: IndexExpression,
    given: tuple[StaticValue, FunctionScope],
) -> None:
    """Tells of what `x[…] = given` gets wrong."""
    value, scope = given
    gathers = index.gathers
    if _NEW in index.parts:
        scope.tell("TRC010", node, message="None in an index that is written to: the exporter "
                   "writes to other places", rewrite="leave None out, and give the value that "
                   "shape: y[:, i] = v instead of y[:, None, i] = v[:, None]")  # fmt: skip
    if len(gathers) > 1 and not _adjacent(index):
        scope.tell("TRC010", node, message="index tensors that are not adjacent: the exporter "
                   "refuses them, or writes to other places")  # fmt: skip
    elif any((_rank(gather) or 0) > 1 for gather in gathers):
        leading = isinstance(index.parts[0], StaticValue) or all(map(_is_row, gathers))
        scope.tell("TRC010", node, level="warning" if leading else "error",
                   message="an index tensor of rank 2 or more: behind a slice the exporter "
                   "broadcasts it against the other axes")  # fmt: skip
    if _broadcast(indexed, index, value):
        scope.tell("TRC011", node)


def _part(node: ast.expr, evaluate: Callable[[ast.expr], StaticValue]) -> StaticValue | str:
    if isinstance(node, ast.Slice):
        bounds = [evaluate(b) if b is not None else None for b in (node.lower, node.upper)]
        if node.step is not None:
            evaluate(node.step)
        return _UNIT if _length_one(bounds) else _WHOLE
    if isinstance(node, ast.Constant) and node.value is None:
        return _NEW
    if isinstance(node, ast.Constant) and node.value is Ellipsis:
        return _ELLIPSIS
    value = evaluate(node)
    return _NEW if value.kind is Kind.PYTHON and value.object is None else value


def _length_one(bounds: Sequence[StaticValue | None]) -> bool:
    lower, upper = (0 if bound is None and at == 0 else bound.object if bound else None
                    for at, bound in enumerate(bounds))  # fmt: skip
    if not isinstance(lower, int):
        return False
    if upper is None:
        return lower == -1 and bounds[1] is None
    return isinstance(upper, int) and upper - lower == 1


def _is_tensor(value: StaticValue) -> bool:
    if value.tensor or value.kind is Kind.TENSORS:
        return True
    return isinstance(value.object, list)


def _is_mask(value: StaticValue) -> bool:
    thing = value.object
    return value.mask or (isinstance(thing, torch.Tensor) and thing.dtype is torch.bool)


def _rank(value: StaticValue) -> int | None:
    if value.tensor:
        absolute = value.rank is not None and value.rank.base == 0
        return value.rank.offset if absolute and value.rank else None
    return torch.tensor(value.object).dim() if isinstance(value.object, list) else None


def _is_row(value: StaticValue) -> bool:
    """True for an index of shape (1, ..., 1, n), which broadcasts as one of rank 1 does."""
    thing = value.object
    return isinstance(thing, torch.Tensor) and all(size == 1 for size in thing.shape[:-1])


def _negative(value: StaticValue) -> bool:
    elements = torch.tensor(value.object) if isinstance(value.object, list) else value.elements
    return elements is not None and elements.numel() > 0 and bool((elements < 0).any())


def _adjacent(index: IndexExpression) -> bool:
    at = [i for i, p in enumerate(index.parts) if isinstance(p, StaticValue) and _is_tensor(p)]
    return at == list(range(at[0], at[-1] + 1))


def _broadcast(indexed: StaticValue, index: IndexExpression, value: StaticValue) -> bool:
    """True if the value is known to have another shape than the places it is written to."""
    if not value.tensor or value.constant:
        return False  # numbers and constants are expanded at the export
    if value.rank == Rank(0, 0):
        # A scalar is expanded; a mask over some axes only is not.
        return any(_is_mask(m) and m.rank is not None and m.rank.below(indexed.rank)
                   for m in index.tensors)  # fmt: skip
    if value.unit and not index.unit and not indexed.unit:
        return True
    return value.rank is not None and value.rank.below(index.rank_of(indexed))
