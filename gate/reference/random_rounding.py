"""Randomly round every operator result; values that depend on shapes only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from gate.policy.sections import DeterminismPolicy
from gate.records.instruments import EPSILON, ULP
from gate.reference.discretization import FAKE_QUANTIZERS
from gate.reference.environment import threads_set
from gate.reference.error_models import COMPOSITES, ErrorModel, bare, error_model_for
from gate.reference.summation_error import (
    MANY_TERMS,
    ROUNDED,
    Draw,
    Operation,
    never,
    summation_error,
)
from gate.reference.torch_session import DispatchMode
from gate.storage.arrays import Batch, OutputArray

# A network has millions of results, and drawing a number for each costs more than its operators. So
# a draw is a slice of a store of random numbers that starts at a random position; a long draw joins
# several slices. Two overlapping slices share errors. These do not accumulate: the second half of a
# store is its first half negated, so shared errors have equal and opposite signs equally often.


_NUMBERS = 1 << 20

_STRETCH = 1 << 18
"""A quarter of the store: a slice of this length holds no number twice, with either sign."""

_LAST_START = 2 * _NUMBERS - _STRETCH
"""A store holds each of its numbers with both signs."""


class Draws:
    """Random numbers, reproducible by the seed. Callers must not write into shared draws."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return standard normal float32 numbers (shared)."""
        return self._slice(_normal(), shape)

    def uniform(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return uniform float32 numbers between -1 and 1 (shared)."""
        return self._slice(_uniform(), shape)

    def shares(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return new uniform float32 numbers between 0 and 1 (not shared)."""
        return torch.rand(shape, generator=self._random)

    def _slice(self, store: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        count = math.prod(shape)
        pieces = -(-count // _STRETCH)
        starts = torch.randint(_LAST_START, (pieces,), generator=self._random).tolist()
        if pieces == 1:  # the usual case: most of the time here is dispatching
            return store.narrow(0, starts[0], count).view(shape)
        slices = [store.narrow(0, start, _STRETCH) for start in starts]
        return torch.cat(slices)[:count].view(shape) if slices else store[:0].view(shape)


@cache
def _normal() -> torch.Tensor:
    return _with_negatives(np.random.default_rng(0).standard_normal(_NUMBERS, np.float32))


@cache
def _uniform() -> torch.Tensor:
    return _with_negatives(np.random.default_rng(1).random(_NUMBERS, np.float32) * 2.0 - 1.0)


def _with_negatives(numbers: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> torch.Tensor:
    with torch.inference_mode(False):  # the store outlives the inference mode of its first caller
        return torch.from_numpy(np.concatenate([numbers, -numbers]))


# Every output of a Fourier transform is a sum of all inputs, and its butterflies mix their rounding
# errors: the error has the same size in every bin, log2(n) roundings of the row's rms (N. Higham,
# Accuracy and Stability of Numerical Algorithms, 2002, section 24.1). This holds for bins that are
# zero, too. If the length is not a power of two, the transform may be a convolution with a chirp
# exp(-i pi k^2 / n) (L. Bluestein, A linear filtering approach to the computation of discrete
# Fourier transform, 1970). Its angles reach pi n, so their float32 error is n roundings.


_WIDTH = 5.0
"""Measured: the error of ONNX Runtime's DFT is 2.3 sqrt(log2 n) roundings of the rms on average,
and twice that in some bins next to a tone."""

_CHIRP = 2.0
"""Measured: the error of its DFT is 1.25 n for n = 400, 1.35 n for 16 000, 1.8 n in single bins."""


def transformed(y: torch.Tensor, operation: Operation, *, unit: float, draw: Draw) -> torch.Tensor:
    """Return the result `y` of `_fft_r2c`, `_fft_c2c` or `_fft_c2r` with a random error of that
    size. `unit`: the size of one rounding."""
    if y.dtype not in (torch.complex64, torch.float32) or not y.numel():
        return y
    axes = list(operation.arguments["dim"])
    lengths: list[int] = [max(operation.argument.shape[axis], y.shape[axis]) for axis in axes]
    width = _WIDTH * math.sqrt(max(math.log2(math.prod(lengths)), 1.0))
    width += _CHIRP * sum(n for n in lengths if n.bit_count() > 1)
    rms = y.abs().square().mean(dim=axes, keepdim=True).sqrt()
    error = draw(y.shape)
    if y.is_complex():
        error = torch.complex(error, draw(y.shape)) * math.sqrt(0.5)
    return y + width * unit * rms * error


# A value that depends on shapes only is the same for every input, so an implementation always
# decides it in the same way. A file that decides otherwise than PyTorch (the logarithm of a
# distance, cut to an integer) returns other outputs for all inputs: such differences do not count
# toward the noise floor.


_JUMPS = frozenset({"floor", "ceil", "round", "trunc", "fix", "sign", "frac", "fmod", "remainder",
                    "floor_divide", "topk", "sort", "argsort"})  # fmt: skip
"""Operators with float results that decide: a tiny change of an argument may change them a lot."""

_LITERAL = "lift_fresh"
"""Operators that turn a number in the code, or an array, into a tensor: only the number has no
axes."""


@dataclass(frozen=True)
class _Overload:
    """The properties of an operator's schema.

    They are cached because reading a schema takes longer than many operators.
    """

    name: str
    """The name without namespace and overload, as in the error models."""
    aliases: bool
    """True if a result is a view of an argument."""
    writes: bool
    """True if the operator writes into an argument."""
    draws: bool
    """True if the operator draws random numbers."""

    @classmethod
    @cache
    def from_operator(cls, operator: Any) -> _Overload:
        """Read the properties of an operator of `torch.ops`."""
        schema = operator._schema
        aliases = [value.alias_info for value in schema.returns if value.alias_info is not None]
        return cls(
            name=bare(schema.name),
            aliases=bool(aliases),
            writes=any(alias.is_write for alias in aliases),
            draws=torch.Tag.nondeterministic_seeded in operator.tags,
        )


class _DependsOnInput(Exception):
    """Raised for an argument that is an input or a weight."""


class InputIndependentValues:
    """The values, without random rounding, of tensors that do not depend on the inputs."""

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()
        self._literal: torch.Tensor | None = None
        """The last result: in inference mode the next operator gets it as another object."""

    def run(
        self,
        func: Callable[..., Any],
        overload: _Overload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the result of an operator on its arguments without random rounding.

        None if an argument depends on the inputs, or if the operator draws random numbers or writes
        into an argument.
        """
        if overload.writes:
            self._forget(args)
            return None
        if overload.draws:
            return None
        if overload.name == _LITERAL and not args[0].ndim:
            self._literal = args[0]
            return func(*args, **kwargs)
        try:
            for value in args:  # most operators return here; tree_map is slow
                self._unrounded_value(value)
            unrounded_args, unrounded_kwargs = tree_map(self._unrounded_value, (args, kwargs))
        except _DependsOnInput:
            return None
        return func(*unrounded_args, **unrounded_kwargs)

    def is_discrete(self, name: str, kwargs: dict[str, Any], result: Any) -> bool:
        """Return whether the result is discrete: not floats, or floats in steps."""
        return (
            name in _JUMPS
            or kwargs.get("rounding_mode") is not None
            or not any(leaf.is_floating_point() or leaf.is_complex() for leaf in _tensors(result))
        )

    def note(self, returned: Any, results: Any) -> None:
        """Store the unrounded `results` for those that were returned instead."""
        for tensor, unrounded in zip(_tensors(returned), _tensors(results), strict=True):
            self._values[tensor] = unrounded

    def _unrounded_value(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        unrounded = self._values.get(value)
        literal = self._literal
        if unrounded is None and literal is not None and value.data_ptr() == literal.data_ptr():
            return value
        if unrounded is None:
            raise _DependsOnInput
        return unrounded

    def _forget(self, args: tuple[Any, ...]) -> None:
        """Forget all tensors that share memory with the overwritten one."""
        written = {argument.untyped_storage().data_ptr() for argument in _tensors(args[:1])}
        gone = [t for t in self._values if t.untyped_storage().data_ptr() in written]
        for tensor in gone:
            del self._values[tensor]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# Monte Carlo arithmetic (D. S. Parker, "Monte Carlo Arithmetic: exploiting randomness in
# floating-point arithmetic", UCLA CSD-970002, 1997): the model runs with a random error added to
# the result of every operator, as large as the error of a correct implementation may be.


EXACT = 2.0**20
"""Integers below it are counts, indices, or sums that every implementation computes exactly."""

_MIN_SHARE = 0.125
"""The share of a result that remains if an absolute error is larger than the result: a nonzero
value must not become zero, or a following logarithm would be infinite."""

_BIAS = 0.25
"""The share of an approximation's error that neighboring arguments have in common. It does not
vanish in a mean (measured for ONNX Runtime's sigmoid: 0.2 of 2.6 units)."""


_UNORDERED = frozenset({"topk", "sort"})
"""Operators that do not define the order of equal values."""

_TINY = 2.0**-120

_ROUNDED_ONCE = frozenset({"add", "sub", "rsub", "mul", "div"})
"""Operators with a correctly rounded result: an exact half is the same everywhere."""


_PRODUCTS = {
    name: 1 if name.startswith("conv") or name == "_convolution" else -1
    for name in (
        *(f"conv{axes}d" for axes in (1, 2, 3)), "convolution", "_convolution", "linear",
    )
}  # fmt: skip
"""Operators that add a bias to products, with the axis of their channels."""

_ENDS = 1.0 - ULP
"""A saturating function that is closer than this to 1 has reached the end of its range."""

_FAR = 1e4
"""Beyond it the distance between neighboring float32 numbers is not much less than 1."""


class RandomRounding(DispatchMode):
    """Adds a random error to each float32 result of an operator, reproducibly by the seed.

    The operator's error model determines its size (`gate.reference.error_models`). In-place results
    change as well. Views, zeros, small integers and the results of operators that only move or
    select values (cat, relu, max pooling, ...) stay exact. The limits of a saturating function
    (tanh) may move inwards. Decisions on shapes and constants do not change.
    """

    def __init__(
        self,
        seed: int,
        *,
        scale: float = 1.0,
        ties: bool = False,
        fast_path: bool = False,
        by_squares: Callable[[], bool] = never,
    ) -> None:
        """`scale`: factor on all errors; 0 adds none (a null run). `ties`: keep results that IEEE
        754 computes exactly, so that only decisions by rounding are ties; a noise floor must not be
        so narrow. `fast_path`: keep the fused path of `nn.TransformerEncoder`, for models where it
        computes another function than the separate layers. `by_squares`: as in `Operation`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = Draws(seed)
        self._unit = scale * EPSILON
        self._ties = ties
        self._fast_path = fast_path
        self._by_squares = by_squares
        self._fast_paths: list[bool] = []
        self._inside = ""
        self._unrounded = InputIndependentValues()
        self._steps: Any = WeakIdKeyDictionary()
        """The scales of tensors that are rounded to steps."""

    def __enter__(self) -> Any:
        """Disable the fast path of attention, which is one operator for a whole layer, unless
        requested."""
        enabled = torch.backends.mha.get_fastpath_enabled()
        self._fast_paths.append(enabled)
        torch.backends.mha.set_fastpath_enabled(enabled and self._fast_path)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        torch.backends.mha.set_fastpath_enabled(self._fast_paths.pop())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        overload = _Overload.from_operator(func)
        name = overload.name
        if name in COMPOSITES:
            with _without_mkldnn(), self._parts_of(name), self:
                return func.decompose(*args, **kwargs)
        if name == "scaled_dot_product_attention" and args[1].shape[-2] >= MANY_TERMS:
            with self:
                return _attention(**Operation.from_call(func, name, args, kwargs).arguments)
        unrounded = self._unrounded.run(func, overload, args, kwargs)
        if unrounded is not None and self._unrounded.is_discrete(name, kwargs, unrounded):
            returned = unrounded
        else:
            returned = self._run_rounded(func, overload, args, kwargs)
        if unrounded is not None:
            self._unrounded.note(returned, unrounded)
        return returned

    def _run_rounded(
        self, func: Any, overload: _Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._unit:
            return func(*args, **kwargs)
        name, aliases, writes = overload.name, overload.aliases, overload.writes
        model = error_model_for(name, inside=self._inside)
        if name in _UNORDERED:
            return self._ordered(Operation.from_call(func, name, args, kwargs))
        if model is None or (aliases and not writes):
            return self._with_scale_of(args[:1], func(*args, **kwargs))
        overwritten = writes and (model.approximated or model.terms is not None)
        if overwritten and args and isinstance(args[0], torch.Tensor):
            before = (args[0].clone(), *args[1:])
        else:
            before = args
        returned = func(*args, **kwargs)
        operation = Operation.from_call(func, name, before, kwargs, by_squares=self._by_squares)
        if isinstance(returned, torch.Tensor):
            rounded = self._in_integers(self._round_result(returned, model, operation), operation)
            if self._ties and name in _ROUNDED_ONCE and not writes:
                exact = _exact(func, args, kwargs, returned)
                rounded = rounded if exact is None else torch.where(exact, returned, rounded)
            return returned.copy_(rounded) if writes else rounded
        if isinstance(returned, tuple) and not aliases:
            return tuple(
                self._round_result(value, model, replace(operation, output=index))
                if isinstance(value, torch.Tensor)
                else value
                for index, value in enumerate(returned)
            )
        return returned

    def _with_scale_of(self, args: tuple[Any, ...], returned: Any) -> Any:
        """Return the result of an operator that only moves values, and pass on their scale."""
        if self._steps and args and isinstance(returned, torch.Tensor):
            scale = self._scale_of(args[0])
            if scale is not None and scale.numel() == 1:
                self._steps[returned] = scale
        return returned

    def _scale_of(self, value: Any) -> torch.Tensor | None:
        """Return the scale of a tensor that is rounded to steps, or None."""
        return self._steps.get(value) if isinstance(value, torch.Tensor) else None

    def _in_integers(self, y: torch.Tensor, operation: Operation) -> torch.Tensor:
        """Return a result with the error of integer arithmetic.

        ONNX Runtime rounds the bias to the step of the products, for all results of a channel.
        """
        named = operation.arguments
        if operation.name in FAKE_QUANTIZERS:
            self._steps[y] = torch.as_tensor(named["scale"], dtype=torch.float32)
        if not self._steps or operation.name not in _PRODUCTS or named.get("bias") is None:
            return y
        scale, of_weight = self._scale_of(operation.argument), self._scale_of(named["weight"])
        if scale is None or of_weight is None:
            return y
        error = 0.5 * scale * of_weight * self._draws.uniform(named["bias"].shape)
        shape = [1] * y.dim()
        shape[_PRODUCTS[operation.name]] = -1
        return y + error.reshape(shape)

    @contextmanager
    def _parts_of(self, composite: str) -> Iterator[None]:
        outside, self._inside = self._inside, composite
        try:
            yield
        finally:
            self._inside = outside

    def _ordered(self, operation: Operation) -> Any:
        """Sort with equal numbers, also zeros, in random order: runtimes guarantee none."""
        x = operation.argument
        if x.dtype != torch.float32 or operation.arguments.get("stable"):
            return operation.again(x)
        share = self._draws.shares(x.shape)
        _, indices = operation.again(x * (1.0 + self._unit * share) + _TINY * share)
        return x.gather(operation.arguments.get("dim", -1), indices), indices

    def _round_result(
        self, tensor: torch.Tensor, model: ErrorModel, operation: Operation
    ) -> torch.Tensor:
        if model.terms == "transform":
            return transformed(tensor, operation, unit=self._unit, draw=self._draws.normal)
        if tensor.is_meta or tensor._is_zerotensor():  # forward-mode AD passes them
            return tensor
        if tensor.dtype != torch.float32 or tensor.layout != torch.strided or tensor.is_nested:
            return tensor
        moves = _moves(tensor, saturates=model.saturates)
        error = None
        if model.terms is not None:
            error = summation_error(model.terms, operation, tensor, draw=self._draws.normal)
        if error is not None and model.terms in ROUNDED:
            if moves is not None:  # terms may cancel
                moves.logical_or_(tensor == 0.0)
            return tensor.add(_where(moves, error), alpha=self._unit)
        share = self._draws.uniform(tensor.shape).mul(model.relative * self._unit)
        if model.approximated:
            share = self._approximated(share, tensor, model, operation)
        if model.overshoot:
            share = torch.where(tensor.abs() > _ENDS, model.overshoot * self._unit, share)
            moves = tensor != 0.0
        rounded = _where(moves, share).add_(1.0).mul_(tensor)
        if error is not None:
            # A variance that is zero here, and values normalized by it, may be nonzero elsewhere.
            keeps_zeros = model.terms not in ("squares", "normalized")
            rounded.add_(_where(moves, error) if keeps_zeros else error, alpha=self._unit)
        return rounded.clamp_(*model.range) if model.bounded else rounded

    def _approximated(
        self, share: torch.Tensor, result: torch.Tensor, model: ErrorModel, operation: Operation
    ) -> torch.Tensor:
        """Add the error of an approximation. It keeps the sign and a part of the result."""
        x = operation.factor(result)
        free = 1.0 - _BIAS
        error = self._draws.normal(result.shape).mul(free / 3.0).clamp_(-free, free)
        phase = 2.0 * math.pi * self._draws.shares(())
        near = x.clamp(-_FAR, _FAR).mul_(2.0 * math.pi).add_(phase).cos_()
        error.add_(near, alpha=_BIAS)
        error.mul_(
            x.abs().mul_(model.scaled).add_(model.absolute) if model.scaled else model.absolute
        )
        if model.below_zero:
            error.mul_(result < 0.0)
        share.addcdiv_(error, result, value=self._unit)
        # Zeros and infinities have no relative error and stay unchanged.
        return share.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(min=_MIN_SHARE - 1.0)


def _moves(tensor: torch.Tensor, *, saturates: bool) -> torch.Tensor | None:
    """Return a mask of rounded values: neither zero nor a small integer. None: all are rounded.

    If the function `saturates`, small integers are rounded, too. None is the usual case and saves
    the comparison of magnitudes.
    """
    distances = tensor.abs() if saturates else tensor.frac().abs_()
    if tensor.numel() and distances.amin().item() > 0.0:  # false with a NaN
        return None
    moves = tensor != 0.0 if saturates else tensor.round() != tensor
    return moves if saturates else moves.logical_or_(tensor.abs() >= EXACT)


def _where(moves: torch.Tensor | None, error: torch.Tensor) -> torch.Tensor:
    """Set `error` to 0 in place for values that are not rounded, and return it."""
    return error if moves is None else error.mul_(moves)


def _exact(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], y: torch.Tensor
) -> torch.Tensor | None:
    """Return a mask of exact results, which are equal in every runtime. None: not computed."""
    if y.dtype != torch.float32 or kwargs.get("rounding_mode") is not None:
        return None
    wide = [
        a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
    ]
    same: torch.Tensor = func(*wide, **kwargs) == y
    return same


_SCORES = 1 << 22
"""Attention scores that are computed at once: PyTorch's fused operator never holds all."""


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **settings: Any,
) -> torch.Tensor:
    """Compute `scaled_dot_product_attention` by its parts, some queries at a time.

    Exporters write a product, a softmax and a product, so sums over many keys round as in these.
    """
    count, keys = query.shape[-2], key.shape[-2]
    if is_causal:
        attn_mask = torch.ones(count, keys, dtype=torch.bool).tril()
    step = max(_SCORES // (max(math.prod(query.shape[:-2]), 1) * keys), 1)
    parts: list[torch.Tensor] = [
        torch.ops.aten._scaled_dot_product_attention_math(
            query[..., start : start + step, :],
            key,
            value,
            attn_mask
            if attn_mask is None or attn_mask.shape[-2] == 1
            else attn_mask[..., start : start + step, :],
            dropout_p,
            **settings,
        )[0]
        for start in range(0, max(count, 1), step)
    ]
    return torch.cat(parts, -2) if len(parts) > 1 else parts[0]


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Disable oneDNN, where one operator is a whole LSTM. (The public switch warns about TF32.)"""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


_SMALL = 2**18
"""Elements of a batch up to which a second thread saves no time: random rounding is many operators
on little data (measured: resnet18, 16 samples of 64 x 64)."""

_SEEDS = 2**63
"""The range of seeds: a policy may have a negative seed, a generator may not."""


def seed(determinism: DeterminismPolicy, draw: int) -> int:
    """Return a seed that every generator accepts."""
    return determinism.seed % _SEEDS + draw


@dataclass(frozen=True)
class RoundingRun:
    """The arguments of `RandomRounding` for one run, with the run's number instead of a seed."""

    draw: int = 0
    scale: float = 1.0
    ties: bool = False
    fast_path: bool = False
    by_squares: Callable[[], bool] = field(default=never, compare=False)


def run_rounded(
    run: Callable[[Batch], list[OutputArray]],
    determinism: DeterminismPolicy,
    batch: Batch,
    rounding: RoundingRun,
) -> list[OutputArray]:
    """Return all outputs of one run, reproducible by its number. Raises EvidenceError if the model
    fails under random rounding."""
    options = dict(vars(rounding))
    mode = RandomRounding(seed(determinism, options.pop("draw")), **options)
    with threads_set(_threads(determinism, batch)), mode:
        return run(batch)


def _threads(determinism: DeterminismPolicy, batch: Batch) -> int | None:
    """Return 1 for a small batch, unless the policy sets the number; None: do not change it."""
    small = sum(array.size for array in batch.values()) <= _SMALL
    return 1 if small and determinism.threads is None else None
