"""Error caused by a different order of summation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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


@cache
def _argument_names(operator: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in operator._schema.arguments)


@dataclass(frozen=True)
class Operation:
    """An operator as it was called."""

    operator: Callable[..., Any]
    name: str
    """Of aten, bare: without overload, without the underscore of an in-place variant."""
    arguments: Mapping[str, Any]
    """By their names in the schema."""
    output: int = 0
    """Index of the result that is meant, where there are several."""

    @classmethod
    def of(
        cls, operator: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Operation:
        """Names the positional arguments as the operator's schema does."""
        named = dict(zip(_argument_names(operator), args, strict=False))
        return cls(operator, name, {**named, **kwargs})

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


# A random walk assumes independent roundings. Terms that are equal, or small against the partial
# sum, are all rounded in the same direction, and the error grows with n instead of its root: ONNX
# Runtime's mean of 102 400 equal numbers is off by 3.4e-4. So the very terms are added here as its
# CPU kernels add them (1.31, measured by benchmarks.operators: most sums agree to the bit).


_Rows = NDArray[Any]
"""Terms in order, shape (results, terms): float32, or float64 for the truth."""

_Add = Callable[[_Rows], _Rows]
"""Sums of rows."""


def _in_lanes(lanes: int) -> _Add:
    """Adds one by one, in so many partial sums that are added pairwise at the end."""

    def add(rows: _Rows) -> _Rows:
        steps = rows.shape[-1] // lanes
        sums = rows[:, :0]
        if steps:
            parts = rows[:, : steps * lanes].reshape(len(rows), steps, lanes)
            sums = np.add.accumulate(parts, axis=1)[:, -1]
        while sums.shape[-1] > 1:
            half = sums.shape[-1] // 2
            sums = sums[:, :half] + sums[:, half:]
        rest: _Rows = np.concatenate([sums, rows[:, steps * lanes :]], axis=1)
        return np.add.accumulate(rest, axis=1)[:, -1]

    return add


def _in_blocks(size: int) -> _Add:
    """Adds one by one within blocks of terms, and then their sums."""

    def add(rows: _Rows) -> _Rows:
        padded = np.pad(rows, ((0, 0), (0, -rows.shape[-1] % size)))
        blocks = padded.reshape(len(rows), -1, size)
        sums = np.add.accumulate(blocks, axis=2)[..., -1]
        return np.add.accumulate(sums, axis=1)[:, -1]

    return add


_LAST_AXES = (_in_lanes(4), _in_lanes(8))
"""Partial sums of GlobalAveragePool (4), of ReduceSum, ReduceMean and norms over last axes (8)."""

_OTHER_AXES = (_in_lanes(1), _in_lanes(4))
"""Partial sums over leading axes (1), and over axes between others (4)."""

_ONE_BY_ONE = (_in_lanes(1),)
"""ReduceL2, ReduceLogSumExp, whatever the axes."""

_COLUMNS: tuple[_Add, ...] = (_in_blocks(128), _in_blocks(256))
"""MatMul and Gemm."""

_FEW, _FEW_COLUMNS = 16, (*_COLUMNS, _in_blocks(1024))
"""The same where both are computed and the second one has so few columns."""

_ONE_SIGN = 0.5
"""y^2 / (n T) from which on most products have one sign; it is 1 where all are equal."""

_LISTED = 1 << 20
"""So many products are added one by one; more would cost more than the operator."""

_BIASED = 1.5
"""Beyond so many rms of a walk the roundings of these terms are not independent."""


_LONG = 512
"""Terms of a product, a softmax or a normalization from which on they are added. Of fewer, lanes
and blocks make little more than the error model allows (4e-7 at 512 equal terms in 8 lanes)."""

_SHARE = 4.0
"""Units that softmax may be off anyway."""


def _own_error(
    compute: Callable[[_Rows, _Add], _Rows], rows: _Rows, orders: Sequence[_Add]
) -> torch.Tensor:
    """What these orders make of `compute`, in units: the farthest one from float64."""
    with np.errstate(all="ignore"):
        exact = compute(rows.astype(np.float64), lambda terms: terms.sum(-1))
        errors = [compute(rows, add) - exact for add in orders]
        farthest = max(errors, key=lambda error: float(np.nan_to_num(np.square(error)).sum()))
    return torch.from_numpy((farthest / EPSILON).astype(np.float32))


def _biased(
    error: torch.Tensor, usual: torch.Tensor, own: torch.Tensor | None, *, beyond: float = _BIASED
) -> torch.Tensor:
    """Return the error of a walk of rms `usual`, and the terms' `own` error where it exceeds
    `beyond` rms. `own`: None where it is not known."""
    if own is None:
        return error
    own = own.reshape(usual.shape)
    return torch.where(own.abs() > beyond * usual, own, error)


def _axes(operation: Operation) -> list[int] | None:
    """The axes that are added up; None where PyTorch adds one by one itself (pooling)."""
    rank = operation.argument.dim()
    if "pool" in operation.name:
        size = operation.arguments.get("output_size")
        sides = [size] if isinstance(size, int) else list(size or ())
        return list(range(rank - int(operation.name[-2]), rank)) if set(sides) == {1} else None
    dim = operation.arguments.get("dim")
    axes = [dim] if isinstance(dim, int) else list(dim or range(rank))
    return sorted(axis % rank for axis in axes) if rank else None


def _own_sum(
    operation: Operation,
    compute: Callable[[_Rows, _Add], _Rows],
    orders: Sequence[_Add] = (),
) -> torch.Tensor | None:
    """`_own_error` of a reduction, one number a result; None where nothing is added up."""
    x, axes = operation.argument, _axes(operation)
    if axes is None or not x.numel():
        return None
    kept = [axis for axis in range(x.dim()) if axis not in axes]
    n = math.prod(x.shape[axis] for axis in axes)
    last = [*kept, *axes] == list(range(x.dim()))
    orders = orders or (_LAST_AXES if last else _OTHER_AXES)
    return _own_error(compute, x.detach().permute(*kept, *axes).reshape(-1, n).numpy(), orders)


def _reduced(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    squares = operation.again(operation.argument.square())
    n = _window(operation) or _count(operation.argument, y)
    total = n if operation.name != "sum" else 1.0
    usual = walk(total * y, total * squares, n, last=True).div_(total)
    own = _own_sum(operation, lambda rows, add: add(rows) / rows.dtype.type(total))
    error = usual * draw(y.shape)
    return _biased(error, usual, own)


def _squares(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    root = 0.5 if "norm" in operation.name or operation.name.startswith("std") else 1.0
    usual = y.abs() * (root * ROUNDING * math.sqrt(_count(operation.argument, y) / 3.0))
    error, named = usual * draw(y.shape), operation.arguments
    if "norm" not in operation.name:
        correction = named.get("correction", named.get("unbiased"))
        degrees = _count(operation.argument, y) - (1.0 if correction is None else correction)

        def compute(rows: _Rows, add: _Add) -> _Rows:
            mean, squares = _moments(rows, add)
            variance = squares / rows.dtype.type(degrees)
            return mean if operation.output else variance if root == 1.0 else np.sqrt(variance)

        own = _own_sum(operation, compute)
    elif named.get("ord", named.get("p", 2)) in (2, None):
        own = _own_sum(operation, lambda rows, add: np.sqrt(add(rows * rows)), _ONE_BY_ONE)
    else:
        return error
    return _biased(error, usual, own)


def _moments(rows: _Rows, add: _Add) -> tuple[_Rows, _Rows]:
    """The mean, and the sum of squared deviations from it."""
    mean = add(rows) / rows.dtype.type(rows.shape[-1])
    return mean, add(np.square(rows - mean[:, None]))


def _exponentials(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    usual = torch.full_like(y, ROUNDING * math.sqrt(_count(operation.argument, y) / 3.0))

    def compute(rows: _Rows, add: _Add) -> _Rows:
        largest = rows.max(-1)
        logarithm: _Rows = np.log(add(np.exp(rows - largest[:, None]))) + largest
        return logarithm

    own = _own_sum(operation, compute, _ONE_BY_ONE)
    error = usual * draw(y.shape)
    return _biased(error, usual, own)


def _shares(operation: Operation, y: torch.Tensor, _: Draw) -> torch.Tensor | None:
    """One error of the sum for all elements that are divided by it, where it is larger than what
    the other part of the model allows each of them."""
    x, dim = operation.argument, operation.arguments["dim"]
    if not y.dim() or x.shape[dim] < _LONG:
        return None
    logarithm = "log" in operation.name
    rows = x.detach().movedim(dim, -1)

    def compute(rows: _Rows, add: _Add) -> _Rows:
        total = add(np.exp(rows - rows.max(-1)[:, None]))
        return -np.log(total) if logarithm else 1.0 / total

    own = _own_error(compute, rows.reshape(-1, rows.shape[-1]).numpy(), _LAST_AXES)
    own = own.reshape(*rows.shape[:-1], 1).movedim(-1, dim)
    if not logarithm:  # relative to 1 / total
        own = own * (x - x.amax(dim, keepdim=True)).exp().sum(dim, keepdim=True)
    error = torch.where(own.abs() > _SHARE, own, 0.0)
    return error.expand(y.shape).clone() if logarithm else error * y


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
    return _biased(error, usual, own, beyond=_FAR)


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
    error = _product(y, squares, n, draw)
    if n >= _LONG and (one_sign := (y.square() > _ONE_SIGN * n * squares).flatten()).any():
        # A leading axis for each operand that lacks it; terms lie on the last one.
        left = a.unsqueeze(-2) if b.dim() > 1 else a
        right = b if over == -1 else b.mT
        right = right.unsqueeze(-3) if a.dim() > 1 and right.dim() > 1 else right
        shape = (*y.shape, n)
        if np.broadcast_shapes(left.shape, right.shape) != shape:
            return error
        some = one_sign.nonzero()[: max(_LISTED // n, 1), 0]
        at = torch.unravel_index(some, y.shape)
        terms = (left.expand(shape)[at] * right.expand(shape)[at]).detach().numpy()
        orders = _COLUMNS
        if b.dim() == 1 or y.shape[-1] == 1:
            orders = (*_FEW_COLUMNS, *_LAST_AXES)  # a product with a vector
        elif operation.name != "linear" and y.shape[-1] <= _FEW:
            orders = _FEW_COLUMNS
        own = _own_error(lambda rows, add: add(rows), terms, orders)
        flat, usual = error.view(-1), ROUNDING * y.abs().flatten()[some]
        usual = usual * math.sqrt(min(n, _BLOCK) / 3.0)
        flat[some] = _biased(flat[some], usual, own)
    return error


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
    eps = named.get("eps", 1e-5)
    spread = (rows.var(-1, correction=0, keepdim=True) + eps).sqrt()
    shift = walk(n * mean, n * squares, n, lanes=_LANES) / n + ROUNDING * mean.abs()
    stretch = ROUNDING * math.sqrt(n / 3.0) / _LANES / 2.0
    error: torch.Tensor = (
        shift * draw(mean.shape) + stretch * (rows - mean) * draw(mean.shape)
    ) / spread
    if n >= _LONG:
        flat = rows.detach().reshape(-1, n)
        own = _own_error(partial(_standardized, eps=eps), flat.numpy(), _LAST_AXES)
        usual = (shift.square() / spread.square() + stretch**2).sqrt().reshape(-1, 1)
        biased = own.square().mean(-1, keepdim=True).sqrt() > _BIASED * usual
        error = torch.where(biased, own, error.reshape(own.shape))
    error = error.reshape(x.shape)
    if weight is None:
        return error
    scale: torch.Tensor = weight if layer else weight.reshape(-1, *[1] * (x.dim() - 2))
    return error * scale


def _standardized(rows: _Rows, add: _Add, *, eps: float) -> _Rows:
    mean, squares = _moments(rows, add)
    variance = squares / rows.dtype.type(rows.shape[-1]) + rows.dtype.type(eps)
    standardized: _Rows = (rows - mean[:, None]) / np.sqrt(variance)[:, None]
    return standardized


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
    "shares": _shares,
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
