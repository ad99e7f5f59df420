"""Arguments that an exporter drops, and functions that it writes otherwise than torch has them.

Each was found by exporting it and comparing numbers (`tests/lint/hazards.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from gate.lint.scope import Arguments, FunctionScope
from gate.lint.value import StaticValue

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

_SOFT = 8.0
"""softplus(t) is t to seven digits and more from here on, so that a threshold hardly shows."""
_SMALL = 1e-5
"""An epsilon up to here hardly shows in float32."""


def tell_rewritten(name: str, node: _Node, arguments: Arguments, scope: FunctionScope) -> None:
    """Look at a call of torch's function, or of the tensor's method, of this name."""
    own = _DYNAMO if scope.walk.strategy == "dynamo" else _TORCHSCRIPT
    look = _EVERYWHERE.get(name) or own.get(name)
    if look is not None and not arguments.spread:
        look(node, arguments, scope)


def floor_division(
    node: ast.BinOp | ast.AugAssign, sides: Iterable[StaticValue], scope: FunctionScope
) -> None:
    """Look at an operator, if it is `//` and one side is a tensor."""
    computed = any(value.tensor and not value.constant for value in sides)
    if computed and isinstance(node.op, ast.FloorDiv) and scope.walk.strategy != "dynamo":
        _floor_divide(node, Arguments(), scope)


def _softplus(node: _Node, arguments: Arguments, scope: FunctionScope) -> None:
    threshold = _number(arguments, 2, "threshold")
    if threshold is not None and threshold < _SOFT:
        scope.tell(
            "TRC017", node, message=f"threshold={threshold:g} is dropped: above it torch returns x "
            "itself, the file log(1 + exp(x))", rewrite="torch.where(x * beta > threshold, x, "
            "softplus(x))",
        )  # fmt: skip


def _avg_pool(node: _Node, arguments: Arguments, scope: FunctionScope) -> None:
    divisor = _number(arguments, 6, "divisor_override")
    if divisor is not None:
        scope.tell(
            "TRC017", node, message=f"divisor_override={divisor:g} is dropped: the file divides "
            "by the size of the window", rewrite="pool without it, then multiply by window / "
            "divisor (with count_include_pad=True)",
        )  # fmt: skip


def _cdist(node: _Node, arguments: Arguments, scope: FunctionScope) -> None:
    power = _number(arguments, 2, "p")
    if power is not None and not _even(power):
        _tell_power(node, power, scope)


def _pairwise_distance(node: _Node, arguments: Arguments, scope: FunctionScope) -> None:
    power, epsilon = _number(arguments, 2, "p"), _number(arguments, 3, "eps")
    if power is not None and not _even(power):
        _tell_power(node, power, scope)
    elif epsilon is not None and epsilon > _SMALL:
        scope.tell(
            "TRC017", node, message=f"eps={epsilon:g} is dropped: torch adds it to each difference",
            rewrite="torch.linalg.vector_norm(x - y + eps, ord=2, dim=-1)",
        )  # fmt: skip


def _tell_power(node: _Node, power: float, scope: FunctionScope) -> None:
    scope.tell(
        "TRC017", node, message=f"p={power:g} is taken of the difference instead of its absolute "
        "value: NaN, or another number", rewrite="torch.linalg.vector_norm(x - y, ord=p, dim=-1), "
        "with x[..., :, None, :] - y[..., None, :, :] for all pairs",
    )  # fmt: skip


def _cosine_similarity(node: _Node, arguments: Arguments, scope: FunctionScope) -> None:
    epsilon = _number(arguments, 3, "eps")
    if epsilon is not None and epsilon > _SMALL:
        scope.tell(
            "TRC018", node, message=f"eps={epsilon:g} bounds the product of both lengths in the "
            "file, in torch each of them: wrong for vectors that are shorter",
            rewrite="F.normalize(x, eps=eps) times F.normalize(y, eps=eps), summed",
        )  # fmt: skip


def _spread(node: _Node, arguments: Arguments, scope: FunctionScope) -> None:
    correction = _number(arguments, -1, "correction")
    if correction is not None and correction != int(correction):
        scope.tell(
            "TRC017", node, message=f"correction={correction:g} is rounded to a whole number",
            rewrite="(x - x.mean(dim, keepdim=True)).square().sum(dim) / (n - correction)",
        )  # fmt: skip


def _batch_norm(node: _Node, arguments: Arguments, scope: FunctionScope) -> None:
    training, mean = arguments.get(5, "training"), arguments.get(1, "running_mean")
    always = training is not None and training.object is True
    if always and mean is not None and mean.object is not None:
        scope.tell(
            "TRC017", node, message="training=True is dropped: the file normalizes by the running "
            "statistics, torch by those of the batch", rewrite="give None for running_mean and "
            "running_var, or training=self.training",
        )  # fmt: skip


def _scatter_reduce(node: _Node, arguments: Arguments, scope: FunctionScope) -> None:
    how = arguments.get(4, "reduce")
    if how is not None and how.object == "mean":
        scope.tell(
            "TRC017", node, message="reduce='mean' is dropped: of several values for one place the "
            "file has one", rewrite="scatter_add of the values, divided by scatter_add of ones",
        )  # fmt: skip


def _index_put(node: _Node, arguments: Arguments, scope: FunctionScope) -> None:
    adds = arguments.get(3, "accumulate")
    if adds is not None and adds.object is True:
        scope.tell(
            "TRC018", node, message="where indices repeat the file adds one of the values, torch "
            "all of them", rewrite="scatter_add, or index_add with one axis",
        )  # fmt: skip


def _mean(node: _Node, arguments: Arguments, scope: FunctionScope) -> None:
    if "dtype" in arguments.keywords and arguments.keywords["dtype"].object is not None:
        scope.tell(
            "TRC018", node, message="the mean is taken in the input's own dtype and cast "
            "afterwards: wrong for integers", rewrite="x.to(dtype).mean(...)",
        )  # fmt: skip


def _logaddexp(node: _Node, _arguments: Arguments, scope: FunctionScope) -> None:
    scope.tell(
        "TRC018", node, message="the file computes log(exp(x) + exp(y)): infinite from 89 on",
        rewrite="torch.logsumexp(torch.stack([x, y]), 0)",
    )  # fmt: skip


def _floor_divide(node: _Node, _arguments: Arguments, scope: FunctionScope) -> None:
    scope.tell(
        "TRC018", node, message="the file rounds the quotient towards zero, torch down: wrong "
        "where it is negative", rewrite="torch.div(a, b, rounding_mode='floor')",
    )  # fmt: skip


def _log_sigmoid(node: _Node, _arguments: Arguments, scope: FunctionScope) -> None:
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


_Look = Callable[[_Node, Arguments, FunctionScope], None]
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
}
_DYNAMO: dict[str, _Look] = {
    "batch_norm": _batch_norm,
    "scatter_reduce": _scatter_reduce,
    "scatter_reduce_": _scatter_reduce,
    "mean": _mean,
    "logaddexp": _logaddexp,
}
