"""TRC009–011, 013, 017–020: indexing and arguments that exporters get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from gate.lint.values import SCALAR, Arguments, Kind, Rank, Value, tensor
from gate.records.export import LintLevel, Strategy


class Hazard(NamedTuple):
    """A finding, with its deviations from the level and texts of its rule."""

    code: str
    level: LintLevel | None = None
    message: str | None = None
    rewrite: str | None = None


# --- indexing -------------------------------------------------------------------------------------

SLICE, UNIT, NEW, ELLIPSIS = "slice", "slice of length 1", "None", "..."


@dataclass(frozen=True)
class IndexExpression:
    """The parts of `x[a, b:c, None]`: each a value, or SLICE, UNIT, NEW, ELLIPSIS."""

    parts: tuple[Value | str, ...]

    @property
    def tensors(self) -> tuple[Value, ...]:
        """Index tensors, masks, and lists, which become index tensors."""
        return tuple(part for part in self.parts if isinstance(part, Value) and _is_tensor(part))

    @property
    def gathers(self) -> tuple[Value, ...]:
        """Index tensors of integers."""
        return tuple(part for part in self.tensors if not _is_mask(part))

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
        return None if indexed.rank is None else indexed.rank.plus(change + max(ranks))

    def select(self, indexed: Value) -> Value:
        """Return the result of `x[…]`."""
        keeps_axes = all(part in (SLICE, UNIT, ELLIPSIS) for part in self.parts if part != NEW)
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
    if any(_is_negative(value) for value in gathers):
        single = "a single index tensor may be negative; two would be read wrongly"
        yield Hazard("TRC009") if len(gathers) > 1 else Hazard("TRC009", "note", single)
    elif len(gathers) > 1 and any(value.lowered for value in gathers):
        message = "if one of these index tensors is negative, another element is read"
        yield Hazard("TRC009", "warning", message)


def write_hazards(indexed: Value, index: IndexExpression, value: Value) -> Iterator[Hazard]:
    """Yield the hazards of `x[…] = value`."""
    gathers = index.gathers
    if NEW in index.parts:
        yield Hazard(
            "TRC010",
            message="None in an index that is written to: the exporter writes to other places",
            rewrite="leave None out, and give the value that shape: y[:, i] = v instead of "
            "y[:, None, i] = v[:, None]",
        )
    if len(gathers) > 1 and not index.is_adjacent:
        yield Hazard(
            "TRC010",
            message="index tensors that are not adjacent: the exporter refuses them, or writes to "
            "other places",
        )
    elif any((_rank(gather) or 0) > 1 for gather in gathers):
        leading = isinstance(index.parts[0], Value) or all(map(_is_row, gathers))
        message = (
            "an index tensor of rank 2 or more: behind a slice the exporter broadcasts it against "
            "the other axes"
        )
        yield Hazard("TRC010", "warning" if leading else "error", message)
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
    return elements is not None and elements.numel() > 0 and bool((elements < 0).any())


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

_POWER = (
    "p={:g} is taken of the difference instead of its absolute value: NaN, or another number",
    "torch.linalg.vector_norm(x - y, ord=p, dim=-1), with x[..., :, None, :] - y[..., None, :, :] "
    "for all pairs",
)

_FLOOR_DIVISION = Hazard(
    "TRC018",
    message="the file rounds the quotient towards zero, torch down: wrong where it is negative",
    rewrite="torch.div(a, b, rounding_mode='floor')",
)

_LOG_SIGMOID = Hazard(
    "TRC018",
    message="the file computes log(sigmoid(x)): off by percents from -15 on, -inf from -18 on",
    rewrite="-F.softplus(-x)",
)

_LOG_ADD_EXP = Hazard(
    "TRC018",
    message="the file computes log(exp(x) + exp(y)): infinite from 89 on",
    rewrite="torch.logsumexp(torch.stack([x, y]), 0)",
)


def is_read(module: nn.Module) -> bool:
    """Return True for a torch module whose forward passes settings to a function of the tables
    below."""
    limited = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    return limited or type(module) in _READ


@dataclass(frozen=True)
class _Argument:
    """An argument that the exporter drops or changes.

    is_wrong: whether the value that is passed makes a difference. message: `{}` is the value.
    """

    position: int | None
    name: str
    is_wrong: Callable[[Any], bool]
    message: str
    rewrite: str
    code: str = "TRC017"

    def hazards(self, arguments: Arguments) -> Iterator[Hazard]:
        value = arguments.get(self.position, self.name)
        obj = None if value is None else value.object
        if self.is_wrong(obj):
            message = self.message.format(obj) if "{" in self.message else self.message
            yield Hazard(self.code, message=message, rewrite=self.rewrite)


def _number(is_wrong: Callable[[float], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and is_wrong(value)


_is_odd_power = _number(lambda power: power <= 0 or power % 2 != 0)

_SOFTPLUS = _Argument(
    2, "threshold", _number(lambda threshold: threshold < _SOFT),
    "threshold={:g} is dropped: above it torch returns x itself, the file log(1 + exp(x))",
    "torch.where(x * beta > threshold, x, softplus(x))",
)  # fmt: skip

_POOL_DIVISOR = _Argument(
    6, "divisor_override", _number(lambda _: True),
    "divisor_override={:g} is dropped: the file divides by the size of the window",
    "pool without it, then multiply by window / divisor (with count_include_pad=True)",
)  # fmt: skip

_DISTANCE_POWER = _Argument(2, "p", _is_odd_power, *_POWER)

_DISTANCE_EPSILON = _Argument(
    3, "eps", _number(lambda epsilon: epsilon > _SMALL),
    "eps={:g} is dropped: torch adds it to each difference",
    "torch.linalg.vector_norm(x - y + eps, ord=2, dim=-1)",
)  # fmt: skip

_COSINE_EPSILON = _Argument(
    3, "eps", _number(lambda epsilon: epsilon > _SMALL),
    "eps={:g} bounds the product of both lengths in the file, in torch each of them: wrong for "
    "vectors that are shorter",
    "F.normalize(x, eps=eps) times F.normalize(y, eps=eps), summed",
    "TRC018",
)  # fmt: skip

_CORRECTION = _Argument(
    None, "correction", _number(lambda correction: correction != int(correction)),
    "correction={:g} is rounded to a whole number",
    "(x - x.mean(dim, keepdim=True)).square().sum(dim) / (n - correction)",
)  # fmt: skip

_SCATTER_MEAN = _Argument(
    4, "reduce", lambda reduce: reduce == "mean",
    "reduce='mean' is dropped: of several values for one place the file has one",
    "scatter_add of the values, divided by scatter_add of ones",
)  # fmt: skip

_ACCUMULATE = _Argument(
    3, "accumulate", lambda adds: adds is True,
    "where indices repeat the file adds one of the values, torch all of them",
    "scatter_add, or index_add with one axis",
    "TRC018",
)  # fmt: skip


def _pairwise_distance(arguments: Arguments) -> Iterator[Hazard]:
    power = [*_DISTANCE_POWER.hazards(arguments)]
    yield from power or _DISTANCE_EPSILON.hazards(arguments)


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


def _embedding(arguments: Arguments) -> Iterator[Hazard]:
    limit = arguments.get(3, "max_norm")
    if limit is not None and limit.object is not None:
        yield Hazard("TRC019")


def _index_add(arguments: Arguments) -> Iterator[Hazard]:
    index, added = arguments.get(2, "index"), arguments.get(3, "source")
    elements = None if index is None else index.elements
    distinct = elements is not None and len({*elements.flatten().tolist()}) == elements.numel()
    if not distinct and any(value is not None and not value.constant for value in (index, added)):
        yield Hazard("TRC020")


def _mean(arguments: Arguments) -> Iterator[Hazard]:
    if "dtype" in arguments.keywords and arguments.keywords["dtype"].object is not None:
        yield Hazard(
            "TRC018",
            message="the mean is taken in the input's own dtype and cast afterwards: wrong for "
            "integers",
            rewrite="x.to(dtype).mean(...)",
        )


def _always(hazard: Hazard) -> Callable[[Arguments], Iterator[Hazard]]:
    return lambda _: iter((hazard,))


_FindHazards = Callable[[Arguments], Iterator[Hazard]]

_EVERYWHERE: dict[str, _FindHazards] = {
    "avg_pool2d": _POOL_DIVISOR.hazards,
    "avg_pool3d": _POOL_DIVISOR.hazards,
    "log_sigmoid": _always(_LOG_SIGMOID),
    "logsigmoid": _always(_LOG_SIGMOID),
}

_TORCHSCRIPT: dict[str, _FindHazards] = {
    "softplus": _SOFTPLUS.hazards,
    "cdist": _DISTANCE_POWER.hazards,
    "pairwise_distance": _pairwise_distance,
    "cosine_similarity": _COSINE_EPSILON.hazards,
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), _CORRECTION.hazards),
    **dict.fromkeys(("floor_divide", "floor_divide_"), _always(_FLOOR_DIVISION)),
    **dict.fromkeys(("index_put", "index_put_"), _ACCUMULATE.hazards),
    **dict.fromkeys(("embedding", "embedding_bag"), _embedding),
    **dict.fromkeys(("index_add", "index_add_"), _index_add),
}

_DYNAMO: dict[str, _FindHazards] = {
    "batch_norm": _batch_norm,
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_"), _SCATTER_MEAN.hazards),
    "mean": _mean,
    "logaddexp": _always(_LOG_ADD_EXP),
}


def call_hazards(name: str, arguments: Arguments, strategy: Strategy) -> Iterator[Hazard]:
    """Yield the hazards of a call of the torch function or tensor method of this name."""
    by_strategy = _DYNAMO if strategy == "dynamo" else _TORCHSCRIPT
    find = _EVERYWHERE.get(name) or by_strategy.get(name)
    if find is not None and not arguments.spread:
        yield from find(arguments)


_DROPOUTS = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
)

_OFF_BY_DEFAULT = (functional.alpha_dropout, functional.feature_alpha_dropout)


def dropout_hazards(callee: Any, arguments: Arguments) -> Iterator[Hazard]:
    """Yield the hazards of a call of functional dropout, which drops in eval mode too."""
    if callee not in _DROPOUTS or arguments.spread:
        return
    training = arguments.get(2, "train" if callee is torch.dropout else "training")
    share = arguments.get(1, "p")
    if share is not None and share.object in (0, 0.0):
        return
    if training is None:
        if callee not in _OFF_BY_DEFAULT:
            yield Hazard("TRC013")
    elif training.object is True:
        yield Hazard("TRC013", message="this dropout is active in eval mode, too")
