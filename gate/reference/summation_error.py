"""Error caused by a different order of summation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gate.records.instruments import EPSILON
from gate.reference.error_models import ROUNDING, Terms

# Adding one by one rounds every partial sum s_k: the error is the sum of s_k delta_k, whose
# variance is that of one rounding times the sum of s_k^2. With known total y and sum of squares T
# of the terms, the partial sums are a bridge from 0 to y, so that their squares add up to about n
# (y^2 + T / 2) / 3: small where terms of one sign are added, large beside the result where they
# cancel. What adds in several lanes or blocks does that in each of them, and again over their
# totals. (N. Higham and T. Mary, "A new approach to probabilistic rounding error analysis", SIAM J.
# Sci. Comput. 41, 2019.)
#
# Errors here are in units of 2^-24, drawn with the rms of such a walk.


_BLOCK = 256
"""Terms that a product of matrices adds in one go (MLAS, measured)."""

_LANES = 8.0
"""Partial sums that a vectorized mean of one row has (measured; one by one it would be 1)."""

_FAR = 2.0
"""So many rms a random walk seldom goes."""

_OWN = math.sqrt(0.5)
"""Half of a product's variance comes on top: the run holds PyTorch's own roundings as well."""


Draw = Callable[[tuple[int, ...]], torch.Tensor]
"""Standard normal numbers of a shape."""


@dataclass(frozen=True)
class Operation:
    """An operator as it was called."""

    operator: Callable[..., Any]
    name: str
    """Of aten, bare: without overload, without the underscore of an in-place variant."""
    arguments: Mapping[str, Any]
    """By their names in the schema."""

    @classmethod
    def of(
        cls, operator: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Operation:
        """Names the positional arguments as the operator's schema does."""
        names = (argument.name for argument in operator._schema.arguments)
        return cls(operator, name, {**dict(zip(names, args, strict=False)), **kwargs})

    @property
    def argument(self) -> Any:
        """The first one."""
        return next(iter(self.arguments.values()), None)

    def factor(self, y: torch.Tensor) -> torch.Tensor:
        """The part of the first argument that the result, shape of `y`, is elementwise made of."""
        x: torch.Tensor = self.argument
        if x.shape == y.shape:
            return x
        return torch.chunk(x, 2, self.arguments.get("dim", -1))[0]  # glu

    def again(self, argument: torch.Tensor, **replaced: Any) -> torch.Tensor:
        """The result with another first argument, and others that are named."""
        others = dict(list(self.arguments.items())[1:])
        result: torch.Tensor = self.operator(argument, **{**others, **replaced})
        return result


ROUNDED: frozenset[Terms] = frozenset({"reduced", "contracted", "window"})
"""Where the last rounding of the result is in the walk."""


def walk(
    total: torch.Tensor,
    squares: torch.Tensor,
    n: float,
    *,
    lanes: float = 1.0,
    last: bool = False,
) -> torch.Tensor:
    """The rms error of adding n terms in `lanes` partial sums. `squares`: their sum of squares.

    `last`: the result is rounded once more.
    """
    length, over = n / lanes, lanes if lanes > 1.0 else 0.0
    of_total = (length / lanes + over) / 3.0 + last
    of_squares = (length * (1.5 - 1.0 / lanes) + over / 2.0) / 3.0
    variance = squares * (of_squares * ROUNDING**2)
    return torch.addcmul(variance, total, total, value=of_total * ROUNDING**2).sqrt_()


def summation_error(
    terms: Terms, operation: Operation, returned: torch.Tensor, *, draw: Draw
) -> torch.Tensor | None:
    """An error of accumulating the terms of `returned`, or None where they can't be counted."""
    if not returned.numel():
        return None
    x = operation.argument
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32 or "out" in operation.arguments:
        return None
    error = _RULES[terms](operation, returned, draw)
    # Squares overflow where masks of finfo.min are among the terms.
    return None if error is None else error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _reduced(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    x = operation.argument
    squares = operation.again(x.square())
    if operation.name == "sum":
        return walk(y, squares, _count(x, y), last=True).mul_(draw(y.shape))
    n = _window(operation) or _count(x, y)
    return walk(n * y, n * squares, n, last=True).div_(n).mul_(draw(y.shape))


def _squares(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    root = 1.0 if operation.name.startswith("var") else 0.5
    return y * (root * ROUNDING * math.sqrt(_count(operation.argument, y) / 3.0)) * draw(y.shape)


def _exponentials(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    return ROUNDING * math.sqrt(_count(operation.argument, y) / 3.0) * draw(y.shape)


def _factors(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    return y * (ROUNDING * math.sqrt(_count(operation.argument, y))) * draw(y.shape)


def _prefix(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    """What is summed up are the roundings of the partial sums, which are the results before. Terms
    that come again, as steps of time do, are rounded the same way each time: where that leads
    farther than a walk does, the error is that of adding these very terms one by one."""
    dim = operation.arguments["dim"]
    error = (ROUNDING * y * draw(y.shape)).cumsum(dim)
    if not y.dim():
        return error
    one_by_one = np.add.accumulate(operation.argument.detach().numpy(), axis=dim)
    own = (torch.from_numpy(one_by_one) - y) / EPSILON
    usual = ROUNDING * y.square().cumsum(dim).sqrt()
    return torch.where(own.abs() > _FAR * usual, own, error)


def _prefix_factors(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    return y * (ROUNDING * draw(y.shape)).cumsum(operation.arguments["dim"])


def _prefix_exponentials(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    dim = operation.arguments["dim"]
    count = torch.ones(y.shape).cumsum(dim)
    return ROUNDING * (count / 3.0).sqrt() * draw(y.shape)


def _contracted(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor | None:
    tensors = [t for t in operation.arguments.values() if isinstance(t, torch.Tensor)]
    first = 1 if operation.name.startswith(("addm", "baddbmm", "addbmm")) else 0
    if len(tensors) < first + 2:
        return None
    a, b = tensors[first : first + 2]
    n = a.shape[-1]
    rows = a.square().sum(-1)
    over = -1 if operation.name in ("linear", "inner") or b.dim() == 1 else -2
    columns = b.square().sum(over)
    if a.dim() > 1 and b.dim() > 1:
        rows, columns = rows.unsqueeze(-1), columns.unsqueeze(-2 if columns.dim() > 1 else 0)
    squares = rows * (columns / max(n, 1))
    return _product(y, squares, n, draw)


def _window_products(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Squares of the channels' mean, so that counting them costs little beside the products."""
    x, weight = operation.argument, operation.arguments["weight"]
    groups = operation.arguments.get("groups", 1)
    transposed = operation.arguments.get("transposed", "transpose" in operation.name)
    axis = 1 - weight.dim()
    channels, kernel = x.shape[axis] // groups, tuple(weight.shape[2:])
    power = operation.again(
        x.square().unflatten(axis, (groups, channels)).mean(axis),
        weight=torch.ones(groups, 1, *kernel),
        bias=None,
    )
    if transposed:
        weights = weight.square().unflatten(0, (groups, channels)).flatten(3).mean((1, 3)).flatten()
        stride = operation.arguments.get("stride", 1)
        steps = stride if isinstance(stride, int) else math.prod(stride)
    else:
        norms = torch.linalg.vector_norm(weight.flatten(1), dim=1)
        weights, steps = norms.square_().div_(weight[0].numel()), 1
    n = max(channels * math.prod(kernel) / max(steps, 1), 1.0)
    if groups not in (1, y.shape[axis]):
        power = power.repeat_interleave(y.shape[axis] // groups, dim=axis)
    squares = power * (channels * weights).reshape(-1, *[1] * len(kernel))
    return _product(y, squares, n, draw)


def _product(y: torch.Tensor, squares: torch.Tensor, n: float, draw: Draw) -> torch.Tensor:
    rms = walk(y, squares, n, lanes=max(1, math.ceil(n / _BLOCK)), last=True)
    return rms.mul_(draw(y.shape)).mul_(_OWN)


def _normalized(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor | None:
    """One error of the mean and one of the variance for all elements that share them."""
    x, named = operation.argument, operation.arguments
    if y.shape != x.shape:
        return None
    weight, layer = named.get("weight"), "layer" in operation.name
    if layer:
        rows = x.flatten(x.dim() - len(named["normalized_shape"]))
    else:
        rows = x.reshape(x.shape[0], named.get("num_groups", named.get("group", x.shape[1])), -1)
    n = rows.shape[-1]
    mean, squares = rows.mean(-1, keepdim=True), rows.square().mean(-1, keepdim=True)
    spread = (rows.var(-1, correction=0, keepdim=True) + named.get("eps", 1e-5)).sqrt()
    shift = walk(n * mean, n * squares, n, lanes=_LANES) / n + ROUNDING * mean.abs()
    stretch = ROUNDING * math.sqrt(n / 3.0) / _LANES / 2.0
    error: torch.Tensor = (
        shift * draw(mean.shape) + stretch * (rows - mean) * draw(mean.shape)
    ) / spread
    error = error.reshape(x.shape)
    if weight is None:
        return error
    scale: torch.Tensor = weight if layer else weight.reshape(-1, *[1] * (x.dim() - 2))
    return error * scale


def _centred(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor | None:
    """What is subtracted from the scaled input is rounded once for a whole channel."""
    named = operation.arguments
    mean, variance = named.get("running_mean"), named.get("running_var")
    if mean is None or variance is None or named.get("training") or y.dim() < 2:
        return None
    shift: torch.Tensor = mean / (variance + named.get("eps", 1e-5)).sqrt()
    if named.get("weight") is not None:
        shift = shift * named["weight"]
    error = ROUNDING * shift * draw(shift.shape)
    return error.reshape(-1, *[1] * (y.dim() - 2)).expand(y.shape).clone()


_RULES: Mapping[Terms, Callable[[Operation, torch.Tensor, Draw], torch.Tensor | None]] = {
    "reduced": _reduced,
    "squares": _squares,
    "exponentials": _exponentials,
    "factors": _factors,
    "contracted": _contracted,
    "window": _window_products,
    "prefix": _prefix,
    "prefix factors": _prefix_factors,
    "prefix exponentials": _prefix_exponentials,
    "normalized": _normalized,
    "centred": _centred,
}


def _count(x: torch.Tensor, y: torch.Tensor) -> float:
    return max(float(x.numel()) / y.numel(), 1.0)


def _window(operation: Operation) -> float | None:
    """Terms under the kernel of a pooling; None for everything else."""
    size = operation.arguments.get("kernel_size")
    if size is None:
        return None
    sides = [size] if isinstance(size, int) else list(size)
    axes = int(operation.name[-2])
    return float(math.prod(sides * axes if len(sides) == 1 else sides))
