"""Errors of results that depend on the order of summation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gate.records.instruments import EPSILON
from gate.reference.error_models import ROUNDING, Terms, named_arguments

# Adding one by one rounds every partial sum s_k: the error is the sum of s_k delta_k, whose
# variance is that of one rounding times the sum of s_k^2. Given the total y and the sum of squares
# T of the terms, the partial sums form a bridge from 0 to y whose squares add up to about n (y^2 +
# T / 2) / 3. This is small if all terms have one sign, and large relative to the result if they
# cancel. A kernel that adds in several lanes or blocks does this in each of them, and again over
# their totals. (N. Higham and T. Mary, "A new approach to probabilistic rounding error analysis",
# SIAM J. Sci. Comput. 41, 2019.)
#
# Errors here are in units of 2^-24 and drawn with the RMS of such a random walk.


_BLOCK = 256
"""Number of terms that a matrix product adds in one block (MLAS, measured)."""

_LANES = 8.0
"""Number of partial sums of a vectorized mean of one row (measured; 1 would be one by one)."""

_RARE = 2.0
"""Multiple of the RMS that a random walk rarely exceeds."""

_HALF_VARIANCE = math.sqrt(0.5)
"""Only half of a product's variance is added, because the run also has PyTorch's own roundings."""


Draw = Callable[[tuple[int, ...]], torch.Tensor]
"""Draws standard normal numbers of a shape."""


def never() -> bool:
    """Return False."""
    return False


@dataclass(frozen=True)
class Operation:
    """One call of an operator."""

    operator: Callable[..., Any]
    name: str
    """ATen name without overload and without the underscore of an in-place variant."""
    arguments: Mapping[str, Any]
    """Arguments by their names in the schema."""
    output: int = 0
    """Index of the result, if the operator returns several."""
    by_squares: Callable[[], bool] = never
    """True if the file computes the variance of groups as mean square minus squared mean."""

    @classmethod
    def from_call(
        cls,
        operator: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        by_squares: Callable[[], bool] = never,
    ) -> Operation:
        """Create an operation; positional arguments get their names from the operator's schema."""
        named = named_arguments(operator, args, kwargs)
        return cls(operator, name, named, by_squares=by_squares)

    @property
    def argument(self) -> Any:
        """The first argument."""
        return next(iter(self.arguments.values()), None)

    def factor(self, y: torch.Tensor) -> torch.Tensor:
        """Return the part of the first argument that has one element per element of `y`."""
        x: torch.Tensor = self.argument
        if x.shape == y.shape:
            return x
        return torch.chunk(x, 2, self.arguments.get("dim", -1))[0]  # glu

    def again(self, argument: torch.Tensor, **replaced: Any) -> torch.Tensor:
        """Call the operator again with another first argument and the named replacements."""
        rest = dict(list(self.arguments.items())[1:])
        result: torch.Tensor = self.operator(argument, **{**rest, **replaced})
        return result


ROUNDED: frozenset[Terms] = frozenset({"reduced", "contracted", "window"})
"""Rules whose error includes the last rounding of the result."""


def walk(
    total: torch.Tensor,
    squares: torch.Tensor,
    n: float,
    *,
    lanes: float = 1.0,
    last: bool = False,
) -> torch.Tensor:
    """Return the RMS error of adding n terms in `lanes` partial sums.

    squares: sum of squares of the terms. last: whether the result is rounded once more.
    """
    length, over = n / lanes, lanes if lanes > 1.0 else 0.0
    of_total = (length / lanes + over) / 3.0 + last
    of_squares = (length * (1.5 - 1.0 / lanes) + over / 2.0) / 3.0
    variance = squares * (of_squares * ROUNDING**2)
    return torch.addcmul(variance, total, total, value=of_total * ROUNDING**2).sqrt_()


def summation_error(
    terms: Terms, operation: Operation, returned: torch.Tensor, *, draw: Draw
) -> torch.Tensor | None:
    """Return an error of accumulating the terms of `returned`; None if they can't be counted."""
    if not returned.numel():
        return None
    x = operation.argument
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32 or "out" in operation.arguments:
        return None
    error = _RULES[terms](operation, returned, draw)
    # Squares overflow if masks of finfo.min are among the terms.
    return None if error is None else error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


# A random walk assumes independent roundings. Terms that are equal, or small against the partial
# sum, are all rounded in the same direction, and the error grows with n instead of its root: ONNX
# Runtime's mean of 102 400 equal numbers is off by 3.4e-4. Therefore these terms are added here in
# the order of its CPU kernels (1.31, measured by benchmarks.operators: most sums agree to the bit).


_Rows = NDArray[Any]
"""Terms in order, shape (results, terms): float32, or float64 for the exact result."""

_Add = Callable[[_Rows], _Rows]
"""Sums each row."""


def _in_lanes(lanes: int) -> _Add:
    """Return a sum in `lanes` partial sums that are added pairwise at the end."""

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
    """Return a sum within blocks of terms, followed by the sum of the blocks."""

    def add(rows: _Rows) -> _Rows:
        padded = np.pad(rows, ((0, 0), (0, -rows.shape[-1] % size)))
        blocks = padded.reshape(len(rows), -1, size)
        sums = np.add.accumulate(blocks, axis=2)[..., -1]
        return np.add.accumulate(sums, axis=1)[:, -1]

    return add


_LAST_AXES = (_in_lanes(4), _in_lanes(8))
"""Orders of GlobalAveragePool (4 lanes), and ReduceSum, ReduceMean and norms over last axes (8)."""

_LEADING_AXES = (_in_lanes(1), _in_lanes(4))
"""Orders over leading axes (1 lane), and over axes in between (4)."""

_SEQUENTIAL = (_in_lanes(1),)
"""Order of ReduceL2 and ReduceLogSumExp over any axes."""

_COLUMNS: tuple[_Add, ...] = (_in_blocks(128), _in_blocks(256))
"""Orders of MatMul and Gemm."""

_ORDERS_BY_COLUMNS = ((32, _in_blocks(512)), (16, _in_blocks(1024)))
"""Additional orders if the computed factor has at most this many columns."""

_NARROW, _NARROW_ORDERS = 16, tuple(_in_lanes(lanes) for lanes in (1, 4, 8))
"""Orders of a product with few rows or columns: a vector in ONNX Runtime, several in PyTorch."""

_WINDOWS: tuple[_Add, ...] = (
    *(_in_blocks(size) for size in (128, 256, 512, 1024)),
    *_NARROW_ORDERS,
)
"""Orders of Conv and ConvTranspose, by the number of positions. Terms are added one by one in the
optimized channel layout and in PyTorch's convolutions."""

_SAME_SIGN, _EQUAL = 0.2, 0.9
"""Values of y^2 / (n T) from which most products have one sign. It is 1 if all are equal, and 0.33
at an edge where a window of positive numbers is padded with zeros. Few products reach the first
value by chance, so they must reach the second."""

_MAX_ADDED, _MIN_RESULTS = 1 << 20, 16
"""Number of products that are added one by one, and least number of results for which this is done.
Other results take the relative error of the nearest one."""

_BIASED = 1.5
"""Multiple of a walk's RMS above which the roundings of these terms are not independent."""


_SHORT, _LONG = 16, 64
"""Least number of terms that are added one by one: of nearly equal products, and of other products
or a normalization. Fewer terms hardly exceed the error model."""

MANY_TERMS = 512
"""The same for softmax, which may be off by a few units anyway."""

_SHARE = 4.0
"""Number of units that softmax may be off anyway."""


_COARSE = np.float32(2**20)
"""Resolution at which mantissas count as equal although they differ by a few roundings."""


class _OrderError(NamedTuple):
    error: torch.Tensor
    """Error of the order farthest from float64, in units of `EPSILON`, one number per result."""
    is_exact: torch.Tensor
    """True if no order of many terms rounds, as for small whole numbers."""


def _farthest_error(
    compute: Callable[[_Rows, _Add], _Rows], rows: _Rows, orders: Sequence[_Add]
) -> torch.Tensor:
    """Return the error of `compute` by the order farthest from float64, in units of `EPSILON`."""
    with np.errstate(all="ignore"):
        exact = compute(rows.astype(np.float64), lambda terms: terms.sum(-1))
        errors = [compute(rows, add) - exact for add in orders]
        farthest = max(errors, key=lambda error: float(np.nan_to_num(np.square(error)).sum()))
    return torch.from_numpy((farthest / EPSILON).astype(np.float32))


def _biased(
    error: torch.Tensor, usual: torch.Tensor, terms_error: torch.Tensor, *, beyond: float = _BIASED
) -> torch.Tensor:
    """Return the error of a walk of RMS `usual`, or `terms_error` where it exceeds `beyond`
    RMS."""
    terms_error = terms_error.reshape(usual.shape)
    return torch.where(terms_error.abs() > beyond * usual, terms_error, error)


def _with_order_error(
    error: torch.Tensor, usual: torch.Tensor, order_error: _OrderError | None
) -> torch.Tensor:
    """Return `_biased`, but 0 for exact sums. `order_error`: None if unknown."""
    if order_error is None:
        return error
    error = _biased(error, usual, order_error.error)
    return error.masked_fill(order_error.is_exact.reshape(usual.shape), 0.0)


def _axes(operation: Operation) -> list[int] | None:
    """Return the reduced axes; None if PyTorch also adds one by one (pooling)."""
    rank = operation.argument.dim()
    if "pool" in operation.name:
        size = operation.arguments.get("output_size")
        sides = [size] if isinstance(size, int) else list(size or ())
        return list(range(rank - int(operation.name[-2]), rank)) if set(sides) == {1} else None
    dim = operation.arguments.get("dim")
    axes = [dim] if isinstance(dim, int) else list(dim or range(rank))
    return sorted(axis % rank for axis in axes) if rank else None


def _sum_error(
    operation: Operation,
    compute: Callable[[_Rows, _Add], _Rows],
    orders: Sequence[_Add] = (),
) -> _OrderError | None:
    """Return the error of a reduction in the order of the kernels; None if nothing is added."""
    x, axes = operation.argument, _axes(operation)
    if axes is None or not x.numel():
        return None
    kept = [axis for axis in range(x.dim()) if axis not in axes]
    n = math.prod(x.shape[axis] for axis in axes)
    last = [*kept, *axes] == list(range(x.dim()))
    orders = orders or (_LAST_AXES if last else _LEADING_AXES)
    rows = x.detach().permute(*kept, *axes).reshape(-1, n).numpy()
    return _OrderError(_farthest_error(compute, rows, orders), _are_exact(compute, rows))


def _are_exact(compute: Callable[[_Rows, _Add], _Rows], rows: _Rows) -> torch.Tensor:
    """Return which results of many terms are exact in any order, shape (results,).

    The terms are multiples of a number, and so few that float32 represents the sum of their
    magnitudes. Each term may be off by a rounding, as in a probe; then the sum is off by no more.
    """
    exact = np.full(len(rows), rows.shape[-1] >= MANY_TERMS)

    def add(terms: _Rows) -> _Rows:
        for count in (MANY_TERMS, terms.shape[-1]):  # a few terms exclude most rows
            left = np.flatnonzero(exact)
            mantissas, exponents = np.frexp(np.abs(terms[left, :count]))
            sizes = np.ldexp(np.rint(mantissas * _COARSE) / _COARSE, exponents)
            in_order = np.add.accumulate(sizes, axis=-1)[:, -1]
            exact[left] = in_order == sizes.sum(-1, dtype=np.float64)
        total: _Rows = terms.sum(-1, dtype=np.float64).astype(terms.dtype)
        return total

    if exact.any():
        with np.errstate(all="ignore"):
            compute(rows, add)
    return torch.from_numpy(exact)


def _reduced(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    squares = operation.again(operation.argument.square())
    n = _window(operation) or _count(operation.argument, y)
    total = n if operation.name != "sum" else 1.0
    usual = walk(total * y, total * squares, n, last=True).div_(total)
    order_error = _sum_error(operation, lambda rows, add: add(rows) / rows.dtype.type(total))
    error = _with_order_error(usual * draw(y.shape), usual, order_error)
    return _cancelled(error, y, lambda: squares, operation.argument)


def _cancelled(
    error: torch.Tensor,
    y: torch.Tensor,
    squares: Callable[[], torch.Tensor],
    *factors: torch.Tensor | None,
) -> torch.Tensor:
    """Return `error`, but 0 where the result is 0 because all terms are 0 or integers are added.

    squares: returns the sum of squared terms; called only if a result is 0.
    """
    if int(y.count_nonzero()) == y.numel():  # a third of the time of `zeros.any()`
        return error
    zeros = y == 0.0
    if not any(factor.frac().any() for factor in factors if factor is not None):
        return error.masked_fill(zeros, 0.0)
    return error.masked_fill(zeros & (squares() == 0.0), 0.0)


def _squares(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    root = 0.5 if "norm" in operation.name or operation.name.startswith("std") else 1.0
    n, named = _count(operation.argument, y), operation.arguments
    usual = y.abs() * (root * ROUNDING * math.sqrt(n / 3.0))
    if operation.output:  # the mean
        of_squares = operation.again(operation.argument.square())[1]
        usual = walk(n * y, n * of_squares, n, last=True).div_(n)
    error = usual * draw(y.shape)
    if "norm" not in operation.name:
        correction = named.get("correction", named.get("unbiased"))
        degrees = n - (1.0 if correction is None else correction)

        def compute(rows: _Rows, add: _Add) -> _Rows:
            mean, squares = _moments(rows, add)
            variance = squares / rows.dtype.type(degrees)
            return mean if operation.output else variance if root == 1.0 else np.sqrt(variance)

        order_error = _sum_error(operation, compute)
    else:
        power = named.get("ord", named.get("p", 2))
        order_error = _norm_error(operation, 2.0 if power is None else power)
    return _with_order_error(error, usual, order_error)


def _norm_error(operation: Operation, power: object) -> _OrderError | None:
    if not isinstance(power, int | float) or not 0.0 < power < math.inf:
        return None

    def compute(rows: _Rows, add: _Add) -> _Rows:
        number = rows.dtype.type
        terms = rows * rows if power == 2 else np.abs(rows) ** number(power)
        norm: _Rows = add(terms) ** number(1.0 / power)
        return norm

    return _sum_error(
        operation, compute, _SEQUENTIAL if power == 2 else (*_SEQUENTIAL, *_LAST_AXES)
    )


def _moments(rows: _Rows, add: _Add) -> tuple[_Rows, _Rows]:
    """Return the mean and the sum of squared deviations."""
    mean = add(rows) / rows.dtype.type(rows.shape[-1])
    return mean, add(np.square(rows - mean[:, None]))


def _exponentials(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    usual = torch.full_like(y, ROUNDING * math.sqrt(_count(operation.argument, y) / 3.0))

    def compute(rows: _Rows, add: _Add) -> _Rows:
        largest = rows.max(-1)
        logarithm: _Rows = np.log(add(np.exp(rows - largest[:, None]))) + largest
        return logarithm

    order_error = _sum_error(operation, compute, _SEQUENTIAL)
    return _with_order_error(usual * draw(y.shape), usual, order_error)


def _softmax_error(operation: Operation, y: torch.Tensor, _: Draw) -> torch.Tensor | None:
    """Return one error of the sum for all elements that are divided by it, if it exceeds
    `_SHARE`."""
    x, dim = operation.argument, operation.arguments["dim"]
    if not y.dim() or x.shape[dim] < MANY_TERMS:
        return None
    logarithm = "log" in operation.name
    rows = x.detach().movedim(dim, -1)

    def compute(rows: _Rows, add: _Add) -> _Rows:
        total = add(np.exp(rows - rows.max(-1)[:, None]))
        return -np.log(total) if logarithm else 1.0 / total

    sum_error = _farthest_error(compute, rows.reshape(-1, rows.shape[-1]).numpy(), _LAST_AXES)
    sum_error = sum_error.reshape(*rows.shape[:-1], 1).movedim(-1, dim)
    if not logarithm:  # relative to 1 / total
        sum_error = sum_error * (x - x.amax(dim, keepdim=True)).exp().sum(dim, keepdim=True)
    error = torch.where(sum_error.abs() > _SHARE, sum_error, 0.0)
    return error.expand(y.shape).clone() if logarithm else error * y


def _distances(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor | None:
    """Return half the relative error of the sum of squared differences."""
    left: torch.Tensor = operation.argument
    right: torch.Tensor = operation.arguments["x2"]
    n = left.shape[-1]
    if operation.arguments.get("p", 2.0) != 2.0:
        return None
    squares = y.square()
    error: torch.Tensor = squares * (ROUNDING * math.sqrt(n / 3.0)) * draw(y.shape)
    if n >= _LONG:

        def terms(at: tuple[torch.Tensor, ...]) -> torch.Tensor:
            first = left.expand(*y.shape[:-1], n)[at[:-1]]
            second = right.expand(*y.shape[:-2], y.shape[-1], n)[(*at[:-2], at[-1])]
            return (first - second).square()

        error = _with_product_errors(error, squares, squares > 0.0, n, terms, _NARROW_ORDERS)
    return error / squares * (y / 2.0)


def _factors(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    usual = y.abs() * (ROUNDING * math.sqrt(_count(operation.argument, y)))

    def compute(rows: _Rows, _: _Add) -> _Rows:
        product: _Rows = np.multiply.accumulate(rows, axis=-1)[:, -1]
        return product

    order_error = _sum_error(operation, compute, _SEQUENTIAL)
    error = usual * draw(y.shape)
    return error if order_error is None else _biased(error, usual, order_error.error)


def _prefix(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Return the error of a prefix sum: the accumulated roundings of its partial sums.

    The partial sums are the earlier results. Repeated terms, such as time steps, are rounded in the
    same way each time. If their error exceeds that of a random walk, it is the error of adding
    these terms one by one.
    """
    dim = operation.arguments["dim"]
    error = (ROUNDING * y * draw(y.shape)).cumsum(dim)
    if not y.dim():
        return error
    sequential = np.add.accumulate(operation.argument.detach().numpy(), axis=dim)
    terms_error = (torch.from_numpy(sequential) - y) / EPSILON
    usual = ROUNDING * y.square().cumsum(dim).sqrt()
    return _biased(error, usual, terms_error, beyond=_RARE)


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
    # Add a leading axis to an operand that lacks one; the terms are on the last axis.
    left = a.unsqueeze(-2) if b.dim() > 1 else a
    right = b if over == -1 else b.mT
    right = right.unsqueeze(-3) if a.dim() > 1 and right.dim() > 1 else right
    shape = (*y.shape, n)
    if n >= _SHORT and np.broadcast_shapes(left.shape, right.shape) == shape:

        def terms(at: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return left.expand(shape)[at] * right.expand(shape)[at]

        number = 1 if b.dim() == 1 else y.shape[-1]
        orders = (*_COLUMNS, *(add for most, add in _ORDERS_BY_COLUMNS if number <= most))
        if a.dim() == 1 or min(number, a.shape[-2]) <= _NARROW:
            orders = (*orders, *_NARROW_ORDERS)
        error = _with_product_errors(error, y, _equal_signs(y, squares, n), n, terms, orders)
    added = tensors[0] if first else operation.arguments.get("bias")

    def squared_terms() -> torch.Tensor:
        right = b.mT if over == -1 and b.dim() > 1 else b
        squares = torch.matmul(a.square(), right.square())
        return squares if added is None else squares + added.square()

    return _cancelled(error, y, squared_terms, a, b, added)


def _equal_signs(y: torch.Tensor, squares: torch.Tensor, n: float) -> torch.Tensor:
    return y.square() > (_SAME_SIGN if n >= _LONG else _EQUAL) * n * squares


def _with_product_errors(
    error: torch.Tensor,
    y: torch.Tensor,
    same_sign: torch.Tensor,
    n: int,
    terms: Callable[[tuple[torch.Tensor, ...]], torch.Tensor],
    orders: Sequence[_Add],
) -> torch.Tensor:
    """Return `error` with the error of the actual terms in results of the `same_sign`.

    terms: returns the terms of the results at these indices, shape (results, n).
    """
    selected = same_sign.flatten().nonzero()[:, 0]
    if not len(selected):
        return error
    step = -(-len(selected) // max(_MAX_ADDED // n, _MIN_RESULTS))
    sampled = selected[::step]
    sampled_terms = terms(torch.unravel_index(sampled, y.shape)).detach().numpy()
    sampled_error = _farthest_error(lambda rows, add: add(rows), sampled_terms, orders)
    error, flat = error.flatten(), y.flatten()
    relative = (sampled_error / flat[sampled]).repeat_interleave(step)[: len(selected)]
    usual = ROUNDING * flat[selected].abs() * math.sqrt(min(n, _BLOCK) / 3.0)
    error[selected] = _biased(error[selected], usual, relative * flat[selected])
    return error.view(y.shape)


def _window_products(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Use the channels' mean square, so that counting costs little compared with the products."""
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
    error, bias = _product(y, squares, n, draw), operation.arguments.get("bias")
    products = y if bias is None else y - bias.reshape(-1, *[1] * len(kernel))
    if n >= _SHORT:
        same_sign = _equal_signs(products, squares, n)
        terms = partial(_window_terms, operation, transposed=transposed)
        error = _with_product_errors(error, products, same_sign, math.ceil(n), terms, _WINDOWS)

    def squared_terms() -> torch.Tensor:
        added = None if bias is None else bias.square()
        return operation.again(x.square(), weight=weight.square(), bias=added)

    return _cancelled(error, y, squared_terms, x, weight, bias)


def _window_terms(
    operation: Operation, at: tuple[torch.Tensor, ...], *, transposed: bool
) -> torch.Tensor:
    """Return the products of these results of a convolution, including zeros of the padding.

    Shape (results, terms).
    """
    x, weight, named = operation.argument, operation.arguments["weight"], operation.arguments
    kernel, axes = weight.shape[2:], weight.dim() - 2
    if len(at) == axes + 1:  # without a batch
        x, at = x.unsqueeze(0), (torch.zeros_like(at[0]), *at)
    groups = named.get("groups", 1)
    channels = x.shape[1] // groups
    filters = weight.shape[1] if transposed else weight.shape[0] // groups
    sample, number = at[:2]
    offset = (number // filters * channels)[:, None] + torch.arange(channels)
    factors = weight[offset, (number % filters)[:, None]] if transposed else weight[number]
    factors = factors.reshape(len(number), channels, -1)
    position = torch.zeros(len(number), 1, dtype=torch.int64)
    inside = torch.ones(len(number), 1, dtype=torch.bool)
    for axis in range(axes):
        size, steps = x.shape[2 + axis], torch.arange(kernel[axis])
        stride = _axis_setting(named.get("stride", 1), axis)
        dilation = _axis_setting(named.get("dilation", 1), axis)
        padding = named.get("padding", 0)
        if isinstance(padding, str):
            padding = dilation * (kernel[axis] - 1) // 2 if padding == "same" else 0
        padding = _axis_setting(padding, axis)
        if transposed:
            index = at[2 + axis][:, None] + padding - steps * dilation
            valid = (index % stride == 0) & (index >= 0) & (index < size * stride)
            index = index // stride
        else:
            index = at[2 + axis][:, None] * stride - padding + steps * dilation
            valid = (index >= 0) & (index < size)
        index = index.clamp(0, size - 1)
        position = (position[:, :, None] * size + index[:, None]).flatten(1)
        inside = (inside[:, :, None] & valid[:, None]).flatten(1)
    values = x.flatten(2)[sample[:, None, None], offset[:, :, None], position[:, None]]
    products: torch.Tensor = (values * factors * inside[:, None]).flatten(1)
    return products


def _axis_setting(setting: int | Sequence[int], axis: int) -> int:
    """Return the setting of an axis from one number for all axes or one per axis."""
    if isinstance(setting, int):
        return setting
    return setting[axis] if len(setting) > 1 else setting[0]


def _product(y: torch.Tensor, squares: torch.Tensor, n: float, draw: Draw) -> torch.Tensor:
    rms = walk(y, squares, n, lanes=max(1, math.ceil(n / _BLOCK)), last=True)
    return rms.mul_(draw(y.shape)).mul_(_HALF_VARIANCE)


def _normalized(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor | None:
    """Return one error of the mean and one of the variance for all elements that share them."""
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
        actual = _farthest_error(partial(_standardized, eps=eps), flat.numpy(), _LAST_AXES)
        if "group" in operation.name and operation.by_squares():
            by_squares = partial(_standardized, eps=eps, by_squares=True)
            squares_error = _farthest_error(by_squares, flat.numpy(), _LAST_AXES)
            actual = torch.where(squares_error.abs() > actual.abs(), squares_error, actual)
        usual = (shift.square() / spread.square() + stretch**2).sqrt().reshape(-1, 1)
        biased = actual.square().mean(-1, keepdim=True).sqrt() > _BIASED * usual
        error = torch.where(biased, actual, error.reshape(actual.shape))
    error = error.reshape(x.shape)
    if weight is None:
        return error
    scale: torch.Tensor = weight if layer else weight.reshape(-1, *[1] * (x.dim() - 2))
    return error * scale


def _standardized(rows: _Rows, add: _Add, *, eps: float, by_squares: bool = False) -> _Rows:
    """Return normalized rows.

    by_squares: compute the variance as mean square minus squared mean, like ONNX Runtime's
    GroupNormalization, which cancels if the mean is large.
    """
    n = rows.dtype.type(rows.shape[-1])
    mean, squares = _moments(rows, add)
    if by_squares:
        squares = add(np.square(rows)) - n * np.square(mean)
    variance = squares / n + rows.dtype.type(eps)
    standardized: _Rows = (rows - mean[:, None]) / np.sqrt(variance)[:, None]
    return standardized


def _centered(operation: Operation, y: torch.Tensor, draw: Draw) -> torch.Tensor | None:
    """Return the error of a channel's shift, which is rounded once and then subtracted."""
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
    "distances": _distances,
    "shares": _softmax_error,
    "factors": _factors,
    "contracted": _contracted,
    "window": _window_products,
    "prefix": _prefix,
    "prefix factors": _prefix_factors,
    "prefix exponentials": _prefix_exponentials,
    "normalized": _normalized,
    "centered": _centered,
}


def _count(x: torch.Tensor, y: torch.Tensor) -> float:
    return max(float(x.numel()) / y.numel(), 1.0)


def _window(operation: Operation) -> float | None:
    """Return the number of terms under a pooling kernel; None for other operators."""
    size = operation.arguments.get("kernel_size")
    if size is None:
        return None
    sides = [size] if isinstance(size, int) else list(size)
    axes = int(operation.name[-2])
    return float(math.prod(sides * axes if len(sides) == 1 else sides))
