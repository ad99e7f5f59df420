"""TRC009–011, 013, 017–020: indexing and arguments that exporters get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gate.lint import rules
from gate.lint.rules import Hazard
from gate.lint.values import SCALAR, Arguments, Kind, Rank, Value, shift, tensor
from gate.records.export import Strategy

# --- indexing -------------------------------------------------------------------------------------

SLICE, UNIT, NEW, ELLIPSIS = "slice", "slice of length 1", "None", "..."


@dataclass(frozen=True)
class IndexExpression:
    """The parts of `x[a, b:c, None]`: each a value, or SLICE, UNIT, NEW, ELLIPSIS."""

    parts: tuple[Value | str, ...]

    @property
    def tensors(self) -> list[Value]:
        """Index tensors, masks, and lists, which become index tensors."""
        return [part for part in self.parts if isinstance(part, Value) and _is_tensor(part)]

    @property
    def gathers(self) -> list[Value]:
        """Index tensors of integers."""
        return [part for part in self.tensors if not _is_mask(part)]

    @property
    def unit(self) -> bool:
        """True if the index adds or keeps an axis of size 1."""
        has_unit = any(isinstance(part, Value) and part.unit for part in self.parts)
        return has_unit or NEW in self.parts or UNIT in self.parts

    @property
    def is_adjacent(self) -> bool:
        """True if no slice, number or None stands between two index tensors."""
        at = [i for i, part in enumerate(self.parts) if part in self.tensors]
        return at == list(range(at[0], at[-1] + 1))

    def rank_of(self, indexed: Value) -> Rank | None:
        """Return the rank of the selection; None if unknown."""
        change, ranks = self.parts.count(NEW), [0]
        for part in self.parts:
            if isinstance(part, str):
                continue
            rank = 1
            if _is_tensor(part):
                part_rank = _rank(part)
                if part_rank is None:
                    return None
                rank = part_rank if _is_mask(part) else 1
                ranks.append(1 if _is_mask(part) else part_rank)
            elif part.kind not in (Kind.PYTHON, Kind.SIZE):
                return None
            change -= rank
        return shift(indexed.rank, change + max(ranks))

    def select(self, indexed: Value) -> Value:
        """Return the result of `x[…]`."""
        keeps_axes = all(part in (SLICE, UNIT, ELLIPSIS, NEW) for part in self.parts)
        return tensor(
            self.rank_of(indexed),
            unit=self.unit or (indexed.unit and keeps_axes),
            mask=indexed.mask,
            fixed=indexed.constant and all(value.constant for value in self.tensors),
            lowered=indexed.lowered or _is_negative(indexed),
        )


def read_hazards(index: IndexExpression) -> Iterator[Hazard]:
    """Yield the hazards of reading `x[…]`: negative index tensors."""
    gathers = index.gathers
    if any(map(_is_negative, gathers)):
        yield Hazard("TRC009") if len(gathers) > 1 else rules.SINGLE_NEGATIVE_INDEX
    elif len(gathers) > 1 and any(value.lowered for value in gathers):
        yield rules.MAYBE_NEGATIVE_INDEX


def write_hazards(indexed: Value, index: IndexExpression, value: Value) -> Iterator[Hazard]:
    """Yield the hazards of `x[…] = value`."""
    gathers = index.gathers
    if NEW in index.parts:
        yield rules.WRITE_BEHIND_NONE
    if len(gathers) > 1 and not index.is_adjacent:
        yield rules.SEPARATE_INDEX_TENSORS
    elif any((_rank(gather) or 0) > 1 for gather in gathers):
        leading = isinstance(index.parts[0], Value) or all(map(_is_row, gathers))
        yield rules.INDEX_OF_RANK_TWO._replace(level="warning" if leading else "error")
    if _is_broadcast(indexed, index, value):
        yield Hazard("TRC011")


def _is_tensor(value: Value) -> bool:
    return value.kind in (Kind.TENSOR, Kind.TENSORS) or isinstance(value.object, list)


def _is_mask(value: Value) -> bool:
    elements = value.object
    return value.mask or (isinstance(elements, torch.Tensor) and elements.dtype is torch.bool)


def _rank(value: Value) -> int | None:
    if value.tensor:
        return value.rank.offset if value.rank is not None and value.rank.base == 0 else None
    return torch.tensor(value.object).dim() if isinstance(value.object, list) else None


def _is_row(value: Value) -> bool:
    """True for an index of shape (1, ..., 1, n), which broadcasts as one of rank 1 does."""
    elements = value.object
    return isinstance(elements, torch.Tensor) and all(size == 1 for size in elements.shape[:-1])


def _is_negative(value: Value) -> bool:
    elements = torch.tensor(value.object) if isinstance(value.object, list) else value.elements
    return elements is not None and bool((elements < 0).any())


def _is_broadcast(indexed: Value, index: IndexExpression, value: Value) -> bool:
    """True if the value is known to have another shape than the places it is written to."""
    if not value.computed:
        return False  # numbers and constants are expanded at the export
    if value.rank == SCALAR:
        # A scalar is expanded; a mask over some axes only is not.
        masks = [part.rank for part in index.tensors if _is_mask(part)]
        return any(rank is not None and rank.below(indexed.rank) for rank in masks)
    if value.unit and not index.unit and not indexed.unit:
        return True
    return value.rank is not None and value.rank.below(index.rank_of(indexed))


# --- arguments ------------------------------------------------------------------------------------
# Each hazard was found by exporting the call and comparing numbers (`tests/lint/rule_examples.py`).

_READ = (
    nn.Softplus,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.PairwiseDistance,
    nn.CosineSimilarity,
    nn.LogSigmoid,
)

_SMALL = 1e-5
"""An epsilon of at most this has almost no effect in float32."""

_SOFT = 8.0
"""softplus(t) is t to seven digits from here on, so a larger threshold has no effect."""


def is_read(module: nn.Module) -> bool:
    """Return True for a torch module whose forward passes settings to a function of the tables
    below."""
    limited = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    return limited or type(module) in _READ


_FindHazards = Callable[[Arguments], Iterator[Hazard]]


def _argument(
    position: int | None,
    name: str,
    is_wrong: Callable[[Any], bool],
    code: str,
    *,
    message: str = "",
    rewrite: str | None = None,
) -> _FindHazards:
    """Return the rule for an argument that the exporter drops or changes.

    is_wrong: whether its value makes a difference; that of an argument that is not passed is None.
    """

    def find(arguments: Arguments) -> Iterator[Hazard]:
        value = arguments.get(position, name)
        obj = None if value is None else value.object
        if is_wrong(obj):
            yield Hazard(code, message=message, rewrite=rewrite).format(obj)

    return find


def _always(code: str, *, message: str, rewrite: str) -> _FindHazards:
    return lambda _: iter((Hazard(code, message=message, rewrite=rewrite),))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_passed(value: Any) -> bool:
    return value is not None


def _is_large(epsilon: Any) -> bool:
    return _is_number(epsilon) and epsilon > _SMALL


def _is_odd_power(power: Any) -> bool:
    return _is_number(power) and (power <= 0 or power % 2 != 0)


_DISTANCE_POWER = _argument(
    2, "p", _is_odd_power, "TRC017",
    message="p={:g} is taken of the difference instead of its absolute value: NaN, or another "
    "number",
    rewrite="torch.linalg.vector_norm(x - y, ord=p, dim=-1), with x[..., :, None, :] - "
    "y[..., None, :, :] for all pairs",
)  # fmt: skip

_DISTANCE_EPSILON = _argument(
    3, "eps", _is_large, "TRC017",
    message="eps={:g} is dropped: torch adds it to each difference",
    rewrite="torch.linalg.vector_norm(x - y + eps, ord=2, dim=-1)",
)  # fmt: skip

_POOL_DIVISOR = _argument(
    6, "divisor_override", _is_number, "TRC017",
    message="divisor_override={:g} is dropped: the file divides by the size of the window",
    rewrite="pool without it, then multiply by window / divisor (with count_include_pad=True)",
)  # fmt: skip

_SOFTPLUS_THRESHOLD = _argument(
    2, "threshold", lambda threshold: _is_number(threshold) and threshold < _SOFT, "TRC017",
    message="threshold={:g} is dropped: above it torch returns x itself, the file "
    "log(1 + exp(x))",
    rewrite="torch.where(x * beta > threshold, x, softplus(x))",
)  # fmt: skip

_COSINE_EPSILON = _argument(
    3, "eps", _is_large, "TRC018",
    message="eps={:g} bounds the product of both lengths in the file, in torch each of them: "
    "wrong for vectors that are shorter",
    rewrite="F.normalize(x, eps=eps) times F.normalize(y, eps=eps), summed",
)  # fmt: skip

_CORRECTION = _argument(
    None, "correction", lambda number: _is_number(number) and number != int(number), "TRC017",
    message="correction={:g} is rounded to a whole number",
    rewrite="(x - x.mean(dim, keepdim=True)).square().sum(dim) / (n - correction)",
)  # fmt: skip

_SCATTER_MEAN = _argument(
    4, "reduce", lambda reduce: reduce == "mean", "TRC017",
    message="reduce='mean' is dropped: of several values for one place the file has one",
    rewrite="scatter_add of the values, divided by scatter_add of ones",
)  # fmt: skip

_ACCUMULATE = _argument(
    3, "accumulate", lambda adds: adds is True, "TRC018",
    message="where indices repeat the file adds one of the values, torch all of them",
    rewrite="scatter_add, or index_add with one axis",
)  # fmt: skip

_MEAN_DTYPE = _argument(
    None, "dtype", _is_passed, "TRC018",
    message="the mean is taken in the input's own dtype and cast afterwards: wrong for "
    "integers",
    rewrite="x.to(dtype).mean(...)",
)  # fmt: skip

_MAX_NORM = _argument(3, "max_norm", _is_passed, "TRC019")

_FLOOR_DIVISION = _always(
    "TRC018",
    message="the file rounds the quotient towards zero, torch down: wrong where it is negative",
    rewrite="torch.div(a, b, rounding_mode='floor')",
)

_LOG_SIGMOID = _always(
    "TRC018",
    message="the file computes log(sigmoid(x)): off by percents from -15 on, -inf from -18 on",
    rewrite="-F.softplus(-x)",
)

_LOG_ADD_EXP = _always(
    "TRC018",
    message="the file computes log(exp(x) + exp(y)): infinite from 89 on",
    rewrite="torch.logsumexp(torch.stack([x, y]), 0)",
)


def _pairwise_distance(arguments: Arguments) -> Iterator[Hazard]:
    yield from _DISTANCE_POWER(arguments)
    yield from _DISTANCE_EPSILON(arguments)


def _batch_norm(arguments: Arguments) -> Iterator[Hazard]:
    training, mean = arguments.get(5, "training"), arguments.get(1, "running_mean")
    always = training is not None and training.object is True
    if always and mean is not None and mean.object is not None:
        yield Hazard(
            "TRC017",
            message="training=True is dropped: the file normalizes by the running statistics, "
            "torch by those of the batch",
            rewrite="give None for running_mean and running_var, or training=self.training",
        )


def _index_add(arguments: Arguments) -> Iterator[Hazard]:
    index, added = arguments.get(2, "index"), arguments.get(3, "source")
    elements = None if index is None else index.elements
    distinct = elements is not None and len({*elements.flatten().tolist()}) == elements.numel()
    if not distinct and any(value is not None and not value.constant for value in (index, added)):
        yield Hazard("TRC020")


_EVERYWHERE: dict[str, _FindHazards] = {
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), _POOL_DIVISOR),
    **dict.fromkeys(("log_sigmoid", "logsigmoid"), _LOG_SIGMOID),
}

_TORCHSCRIPT: dict[str, _FindHazards] = {
    "softplus": _SOFTPLUS_THRESHOLD,
    "cdist": _DISTANCE_POWER,
    "pairwise_distance": _pairwise_distance,
    "cosine_similarity": _COSINE_EPSILON,
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), _CORRECTION),
    **dict.fromkeys(("floor_divide", "floor_divide_"), _FLOOR_DIVISION),
    **dict.fromkeys(("index_put", "index_put_"), _ACCUMULATE),
    **dict.fromkeys(("embedding", "embedding_bag"), _MAX_NORM),
    **dict.fromkeys(("index_add", "index_add_"), _index_add),
}

_DYNAMO: dict[str, _FindHazards] = {
    "batch_norm": _batch_norm,
    "mean": _MEAN_DTYPE,
    "logaddexp": _LOG_ADD_EXP,
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_"), _SCATTER_MEAN),
}


def call_hazards(name: str, arguments: Arguments, strategy: Strategy) -> Iterator[Hazard]:
    """Yield the hazards of a call of the torch function or tensor method of this name."""
    by_strategy = _DYNAMO if strategy == "dynamo" else _TORCHSCRIPT
    find = _EVERYWHERE.get(name) or by_strategy.get(name)
    if find is not None and not arguments.spread:
        yield from find(arguments)


_OFF_BY_DEFAULT = (functional.alpha_dropout, functional.feature_alpha_dropout)

_DROPOUTS = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    torch.dropout,
    *_OFF_BY_DEFAULT,
)


def dropout_hazards(callee: Any, arguments: Arguments) -> Iterator[Hazard]:
    """Yield the hazards of a call of functional dropout, which drops in eval mode too."""
    if callee not in _DROPOUTS or arguments.spread:
        return
    training = arguments.get(2, "train" if callee is torch.dropout else "training")
    share = arguments.get(1, "p")
    if share is not None and share.object == 0:
        return
    if training is None and callee not in _OFF_BY_DEFAULT:
        yield Hazard("TRC013")
    elif training is not None and training.object is True:
        yield rules.ACTIVE_DROPOUT
