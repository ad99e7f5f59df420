"""TRC009–011, 013, 017–020: indexing and arguments that exporters get wrong."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gate.lint.values import Arguments, Frame, Kind, Rank, Value, tensor

_WHOLE = "slice"

_UNIT = "slice of length 1"

_NEW = "None"

_ELLIPSIS = "..."


@dataclass(frozen=True)
class IndexExpression:
    """The parts of `x[a, b:c, None]`: each a value, or the word for a slice, None or `...`."""

    parts: tuple[Value | str, ...]

    @classmethod
    def of(cls, node: ast.expr, evaluate: Callable[[ast.expr], Value]) -> IndexExpression:
        """Read it; `evaluate` is called once for each expression in it."""
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        return cls(tuple(_part(part, evaluate) for part in parts))

    @property
    def tensors(self) -> tuple[Value, ...]:
        """Index tensors, and lists, which become such; masks too."""
        return tuple(p for p in self.parts if isinstance(p, Value) and _is_tensor(p))

    @property
    def gathers(self) -> tuple[Value, ...]:
        """Index tensors of integers."""
        return tuple(p for p in self.tensors if not _is_mask(p))

    def rank_of(self, indexed: Value) -> Rank | None:
        """The rank of what is selected; None where it is not known."""
        if indexed.rank is None:
            return None
        change, ranks = 0, []
        for part in self.parts:
            if part == _NEW:
                change += 1
            elif isinstance(part, Value) and _is_tensor(part):
                rank = _rank(part)
                if rank is None:
                    return None
                change -= rank if _is_mask(part) else 1
                ranks.append(1 if _is_mask(part) else rank)
            elif isinstance(part, Value):
                if part.kind not in (Kind.PYTHON, Kind.SIZE):
                    return None
                change -= 1
        return indexed.rank.plus(change + max(ranks, default=0))

    @property
    def unit(self) -> bool:
        """True if the selected part has an axis of size 1 by the way it is selected."""
        made = any(isinstance(part, Value) and part.unit for part in self.parts)
        return made or _NEW in self.parts or _UNIT in self.parts


def read(node: ast.Subscript, indexed: Value, index: IndexExpression, scope: Frame) -> Value:
    """Return the result of `x[…]`; report negative index tensors."""
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
    indexed: Value,
    index: IndexExpression,
    given: tuple[Value, Frame],
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
        leading = isinstance(index.parts[0], Value) or all(map(_is_row, gathers))
        scope.tell("TRC010", node, level="warning" if leading else "error",
                   message="an index tensor of rank 2 or more: behind a slice the exporter "
                   "broadcasts it against the other axes")  # fmt: skip
    if _broadcast(indexed, index, value):
        scope.tell("TRC011", node)


def _part(node: ast.expr, evaluate: Callable[[ast.expr], Value]) -> Value | str:
    if isinstance(node, ast.Slice):
        bounds = [evaluate(b) if b is not None else None for b in (node.lower, node.upper)]
        if node.step is not None:
            evaluate(node.step)
        return _UNIT if _is_unit_slice(bounds) else _WHOLE
    if isinstance(node, ast.Constant) and node.value is None:
        return _NEW
    if isinstance(node, ast.Constant) and node.value is Ellipsis:
        return _ELLIPSIS
    value = evaluate(node)
    return _NEW if value.kind is Kind.PYTHON and value.object is None else value


def _is_unit_slice(bounds: Sequence[Value | None]) -> bool:
    lower, upper = (0 if bound is None and at == 0 else bound.object if bound else None
                    for at, bound in enumerate(bounds))  # fmt: skip
    if not isinstance(lower, int):
        return False
    if upper is None:
        return lower == -1 and bounds[1] is None
    return isinstance(upper, int) and upper - lower == 1


def _is_tensor(value: Value) -> bool:
    if value.tensor or value.kind is Kind.TENSORS:
        return True
    return isinstance(value.object, list)


def _is_mask(value: Value) -> bool:
    thing = value.object
    return value.mask or (isinstance(thing, torch.Tensor) and thing.dtype is torch.bool)


def _rank(value: Value) -> int | None:
    if value.tensor:
        absolute = value.rank is not None and value.rank.base == 0
        return value.rank.offset if absolute and value.rank else None
    return torch.tensor(value.object).dim() if isinstance(value.object, list) else None


def _is_row(value: Value) -> bool:
    """True for an index of shape (1, ..., 1, n), which broadcasts as one of rank 1 does."""
    thing = value.object
    return isinstance(thing, torch.Tensor) and all(size == 1 for size in thing.shape[:-1])


def _negative(value: Value) -> bool:
    elements = torch.tensor(value.object) if isinstance(value.object, list) else value.elements
    return elements is not None and elements.numel() > 0 and bool((elements < 0).any())


def _adjacent(index: IndexExpression) -> bool:
    at = [i for i, p in enumerate(index.parts) if isinstance(p, Value) and _is_tensor(p)]
    return at == list(range(at[0], at[-1] + 1))


def _broadcast(indexed: Value, index: IndexExpression, value: Value) -> bool:
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


# Each was found by exporting it and comparing numbers (`tests/lint/hazards.py`).


_Node = ast.expr | ast.stmt


READ_ON = (
    nn.Softplus,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.PairwiseDistance,
    nn.CosineSimilarity,
    nn.LogSigmoid,
)
"""torch's own modules that hand their settings to one of these functions: their forward is read."""


def is_read(module: nn.Module) -> bool:
    """Return True for a module of torch's own whose forward is read."""
    limited = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    return limited or type(module) in READ_ON


_SOFT = 8.0
"""softplus(t) is t to seven digits and more from here on, so that a threshold hardly shows."""

_SMALL = 1e-5
"""An epsilon up to here hardly shows in float32."""


def tell_rewritten(name: str, node: _Node, arguments: Arguments, scope: Frame) -> None:
    """Look at a call of torch's function, or of the tensor's method, of this name."""
    own = _DYNAMO if scope.walk.strategy == "dynamo" else _TORCHSCRIPT
    look = _EVERYWHERE.get(name) or own.get(name)
    if look is not None and not arguments.spread:
        look(node, arguments, scope)


def floor_division(node: ast.BinOp | ast.AugAssign, sides: Iterable[Value], scope: Frame) -> None:
    """Look at an operator, if it is `//` and one side is a tensor."""
    computed = any(value.tensor and not value.constant for value in sides)
    if computed and isinstance(node.op, ast.FloorDiv) and scope.walk.strategy != "dynamo":
        _floor_divide(node, Arguments(), scope)


def _softplus(node: _Node, arguments: Arguments, scope: Frame) -> None:
    threshold = _number(arguments, 2, "threshold")
    if threshold is not None and threshold < _SOFT:
        scope.tell(
            "TRC017", node, message=f"threshold={threshold:g} is dropped: above it torch returns x "
            "itself, the file log(1 + exp(x))", rewrite="torch.where(x * beta > threshold, x, "
            "softplus(x))",
        )  # fmt: skip


def _avg_pool(node: _Node, arguments: Arguments, scope: Frame) -> None:
    divisor = _number(arguments, 6, "divisor_override")
    if divisor is not None:
        scope.tell(
            "TRC017", node, message=f"divisor_override={divisor:g} is dropped: the file divides "
            "by the size of the window", rewrite="pool without it, then multiply by window / "
            "divisor (with count_include_pad=True)",
        )  # fmt: skip


def _cdist(node: _Node, arguments: Arguments, scope: Frame) -> None:
    power = _number(arguments, 2, "p")
    if power is not None and not _even(power):
        _tell_power(node, power, scope)


def _pairwise_distance(node: _Node, arguments: Arguments, scope: Frame) -> None:
    power, epsilon = _number(arguments, 2, "p"), _number(arguments, 3, "eps")
    if power is not None and not _even(power):
        _tell_power(node, power, scope)
    elif epsilon is not None and epsilon > _SMALL:
        scope.tell(
            "TRC017", node, message=f"eps={epsilon:g} is dropped: torch adds it to each difference",
            rewrite="torch.linalg.vector_norm(x - y + eps, ord=2, dim=-1)",
        )  # fmt: skip


def _tell_power(node: _Node, power: float, scope: Frame) -> None:
    scope.tell(
        "TRC017", node, message=f"p={power:g} is taken of the difference instead of its absolute "
        "value: NaN, or another number", rewrite="torch.linalg.vector_norm(x - y, ord=p, dim=-1), "
        "with x[..., :, None, :] - y[..., None, :, :] for all pairs",
    )  # fmt: skip


def _cosine_similarity(node: _Node, arguments: Arguments, scope: Frame) -> None:
    epsilon = _number(arguments, 3, "eps")
    if epsilon is not None and epsilon > _SMALL:
        scope.tell(
            "TRC018", node, message=f"eps={epsilon:g} bounds the product of both lengths in the "
            "file, in torch each of them: wrong for vectors that are shorter",
            rewrite="F.normalize(x, eps=eps) times F.normalize(y, eps=eps), summed",
        )  # fmt: skip


def _spread(node: _Node, arguments: Arguments, scope: Frame) -> None:
    correction = _number(arguments, -1, "correction")
    if correction is not None and correction != int(correction):
        scope.tell(
            "TRC017", node, message=f"correction={correction:g} is rounded to a whole number",
            rewrite="(x - x.mean(dim, keepdim=True)).square().sum(dim) / (n - correction)",
        )  # fmt: skip


def _batch_norm(node: _Node, arguments: Arguments, scope: Frame) -> None:
    training, mean = arguments.get(5, "training"), arguments.get(1, "running_mean")
    always = training is not None and training.object is True
    if always and mean is not None and mean.object is not None:
        scope.tell(
            "TRC017", node, message="training=True is dropped: the file normalizes by the running "
            "statistics, torch by those of the batch", rewrite="give None for running_mean and "
            "running_var, or training=self.training",
        )  # fmt: skip


def _scatter_reduce(node: _Node, arguments: Arguments, scope: Frame) -> None:
    how = arguments.get(4, "reduce")
    if how is not None and how.object == "mean":
        scope.tell(
            "TRC017", node, message="reduce='mean' is dropped: of several values for one place the "
            "file has one", rewrite="scatter_add of the values, divided by scatter_add of ones",
        )  # fmt: skip


def _index_put(node: _Node, arguments: Arguments, scope: Frame) -> None:
    adds = arguments.get(3, "accumulate")
    if adds is not None and adds.object is True:
        scope.tell(
            "TRC018", node, message="where indices repeat the file adds one of the values, torch "
            "all of them", rewrite="scatter_add, or index_add with one axis",
        )  # fmt: skip


def _embedding(node: _Node, arguments: Arguments, scope: Frame) -> None:
    limit = arguments.get(3, "max_norm")
    if limit is not None and limit.object is not None:
        scope.tell("TRC019", node)


def _index_add(node: _Node, arguments: Arguments, scope: Frame) -> None:
    index, added = arguments.get(2, "index"), arguments.get(3, "source")
    elements = None if index is None else index.elements
    distinct = elements is not None and len({*elements.flatten().tolist()}) == elements.numel()
    computed = any(value is not None and not value.constant for value in (index, added))
    if computed and not distinct:
        scope.tell("TRC020", node)


def _mean(node: _Node, arguments: Arguments, scope: Frame) -> None:
    if "dtype" in arguments.keywords and arguments.keywords["dtype"].object is not None:
        scope.tell(
            "TRC018", node, message="the mean is taken in the input's own dtype and cast "
            "afterwards: wrong for integers", rewrite="x.to(dtype).mean(...)",
        )  # fmt: skip


def _logaddexp(node: _Node, _arguments: Arguments, scope: Frame) -> None:
    scope.tell(
        "TRC018", node, message="the file computes log(exp(x) + exp(y)): infinite from 89 on",
        rewrite="torch.logsumexp(torch.stack([x, y]), 0)",
    )  # fmt: skip


def _floor_divide(node: _Node, _arguments: Arguments, scope: Frame) -> None:
    scope.tell(
        "TRC018", node, message="the file rounds the quotient towards zero, torch down: wrong "
        "where it is negative", rewrite="torch.div(a, b, rounding_mode='floor')",
    )  # fmt: skip


def _log_sigmoid(node: _Node, _arguments: Arguments, scope: Frame) -> None:
    scope.tell(
        "TRC018", node, message="the file computes log(sigmoid(x)): off by percents from -15 on, "
        "-inf from -18 on", rewrite="-F.softplus(-x)",
    )  # fmt: skip


def _number(arguments: Arguments, position: int, name: str) -> float | None:
    """An argument that is given, as a number that is known."""
    value = arguments.keywords.get(name) if position < 0 else arguments.get(position, name)
    thing: Any = None if value is None else value.object
    return float(thing) if isinstance(thing, int | float) else None


def _even(power: float) -> bool:
    return power > 0 and power % 2 == 0


_Look = Callable[[_Node, Arguments, Frame], None]

_EVERYWHERE: dict[str, _Look] = {
    "avg_pool2d": _avg_pool,
    "avg_pool3d": _avg_pool,
    "log_sigmoid": _log_sigmoid,
    "logsigmoid": _log_sigmoid,
}

_TORCHSCRIPT: dict[str, _Look] = {
    "softplus": _softplus,
    "cdist": _cdist,
    "pairwise_distance": _pairwise_distance,
    "cosine_similarity": _cosine_similarity,
    "std": _spread,
    "var": _spread,
    "std_mean": _spread,
    "var_mean": _spread,
    "floor_divide": _floor_divide,
    "floor_divide_": _floor_divide,
    "index_put": _index_put,
    "index_put_": _index_put,
    "embedding": _embedding,
    "embedding_bag": _embedding,
    "index_add": _index_add,
    "index_add_": _index_add,
}

_DYNAMO: dict[str, _Look] = {
    "batch_norm": _batch_norm,
    "scatter_reduce": _scatter_reduce,
    "scatter_reduce_": _scatter_reduce,
    "mean": _mean,
    "logaddexp": _logaddexp,
}
