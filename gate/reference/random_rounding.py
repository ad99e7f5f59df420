"""Random rounding: how far may another honest float32 implementation be off?

Monte Carlo arithmetic (D. S. Parker, "Monte Carlo Arithmetic: exploiting randomness in
floating-point arithmetic", UCLA CSD-970002, 1997): a model runs while the result of every operator
is moved at random, as far as an honest implementation of that operator may be off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gate.parity.rounding.dispatch import DispatchMode
from gate.parity.rounding.draws import Draws
from gate.parity.rounding.error_model import ErrorModel
from gate.parity.rounding.operators import COMPOSITES, bare, model_of
from gate.parity.rounding.sums import ROUNDED, Operation, accumulated
from gate.parity.rounding.transforms import transformed
from gate.parity.rounding.undisturbed import Undisturbed
from gate.records.instruments import EPSILON, ULP

EXACT = 2.0**20
"""Integers below it are counts, indices, or sums that every implementation gets exactly."""
_LEAST = 0.125
"""The share of a result that stays where an absolute error is larger than it: what is not zero
here is never zero there, or else the logarithm behind it is infinite and says nothing."""
_BIAS = 0.25
"""The share of an approximation's error that is the same for arguments that are near each other:
it does not vanish in a mean (ONNX Runtime's sigmoid: 0.2 of 2.6 units, measured)."""

_UNORDERED = frozenset({"topk", "sort"})
"""Operators that promise no order of what is equal."""
_TINY = 2.0**-120
_ROUNDED_ONCE = frozenset({"add", "sub", "rsub", "mul", "div"})
"""Operators whose result IEEE 754 fixes: a half that is exact is one everywhere."""

_ENDS = 1.0 - ULP
"""A saturating function that is nearer to 1 has reached the end of its range."""
_FAR = 1e4
"""Beyond it an argument has no neighbours in float32 that are much less than 1 away."""


class RandomRounding(DispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what operators return in float32 is moved at random, reproducibly by the seed.

    How far, says the operator's error model (`gate.parity.rounding.operators`). In-place results
    move as well. Views, zeros and small integers stay, and so does what operators only move or
    choose (cat, relu, max pooling, ...); the ends of a function that saturates (tanh) may move
    inwards. What is decided on shapes and numbers alone stays as it is
    (`gate.parity.rounding.undisturbed`).
    """

    def __init__(self, seed: int, *, scale: float = 1.0, ties: bool = False) -> None:
        """`scale`: all of that so many times as far. `ties`: what IEEE 754 does not round stays, so
        that only what rounding decides is a tie; a floor of errors is not to be so narrow."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = Draws(seed)
        self._unit = scale * EPSILON
        self._ties = ties
        self._fast_paths: list[bool] = []
        self._inside = ""
        self._undisturbed = Undisturbed()

    def __enter__(self) -> Any:
        """The fast path of attention is one operator for a whole layer: it is not taken inside."""
        self._fast_paths.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        torch.backends.mha.set_fastpath_enabled(self._fast_paths.pop())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = bare(func._schema.name)
        if name in COMPOSITES:
            with _without_mkldnn(), self._parts_of(name), self:
                return func.decompose(*args, **kwargs)
        still = self._undisturbed.run(func, name, args, kwargs)
        if still is not None and self._undisturbed.decides(name, kwargs, still):
            returned = still
        else:
            returned = self._moved(func, name, args, kwargs)
        if still is not None:
            self._undisturbed.note(returned, still)
        return returned

    def _moved(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = func._schema
        model = model_of(name, inside=self._inside)
        if name in _UNORDERED:
            return self._ordered(Operation.of(func, name, args, kwargs))
        aliases = [value.alias_info for value in schema.returns if value.alias_info is not None]
        writes = any(alias.is_write for alias in aliases)
        if model is None or (aliases and not writes):
            return func(*args, **kwargs)
        overwritten = writes and (model.approximated or model.terms is not None)
        if overwritten and args and isinstance(args[0], torch.Tensor):
            before = (args[0].clone(), *args[1:])
        else:
            before = args
        returned = func(*args, **kwargs)
        operation = Operation.of(func, name, before, kwargs)
        if isinstance(returned, torch.Tensor):
            tossed = self._toss(returned, model, operation)
            if self._ties and name in _ROUNDED_ONCE and not writes:
                exact = _exact(func, args, kwargs, returned)
                tossed = tossed if exact is None else torch.where(exact, returned, tossed)
            return returned.copy_(tossed) if writes else tossed
        if isinstance(returned, tuple) and not aliases:
            return tuple(
                self._toss(value, model, operation) if isinstance(value, torch.Tensor) else value
                for value in returned
            )
        return returned

    @contextmanager
    def _parts_of(self, composite: str) -> Iterator[None]:
        outside, self._inside = self._inside, composite
        try:
            yield
        finally:
            self._inside = outside

    def _ordered(self, operation: Operation) -> Any:
        """With equal numbers, zeros too, in any order: nobody promises one."""
        x = operation.argument
        if x.dtype != torch.float32 or operation.arguments.get("stable"):
            return operation.again(x)
        share = self._draws.shares(x.shape)
        _, indices = operation.again(x * (1.0 + self._unit * share) + _TINY * share)
        return x.gather(operation.arguments.get("dim", -1), indices), indices

    def _toss(self, tensor: torch.Tensor, model: ErrorModel, operation: Operation) -> torch.Tensor:
        if model.terms == "transform":
            return transformed(tensor, operation, unit=self._unit, draw=self._draws.normal)
        if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
            return tensor
        moves = _moves(tensor, saturates=model.saturates)
        error = None
        if model.terms is not None:
            error = accumulated(model.terms, operation, tensor, draw=self._draws.normal)
        if error is not None and model.terms in ROUNDED:
            return tensor.add(_where(moves, error), alpha=self._unit)
        share = self._draws.uniform(tensor.shape).mul(model.relative * self._unit)
        if model.approximated:
            share = self._approximated(share, tensor, model, operation)
        if model.overshoot:
            share = torch.where(tensor.abs() > _ENDS, model.overshoot * self._unit, share)
            moves = tensor != 0.0
        tossed = _where(moves, share).add_(1.0).mul_(tensor)
        if error is not None:
            tossed.add_(_where(moves, error), alpha=self._unit)
        return tossed.clamp_(*model.range) if model.bounded else tossed

    def _approximated(
        self, share: torch.Tensor, still: torch.Tensor, model: ErrorModel, operation: Operation
    ) -> torch.Tensor:
        """With the error of an approximation, which leaves the sign and some of the result."""
        x = operation.factor(still)
        free = 1.0 - _BIAS
        error = self._draws.normal(still.shape).mul(free / 3.0).clamp_(-free, free)
        phase = 2.0 * math.pi * self._draws.shares(())
        near = x.clamp(-_FAR, _FAR).mul_(2.0 * math.pi).add_(phase).cos_()
        error.add_(near, alpha=_BIAS)
        error.mul_(
            x.abs().mul_(model.scaled).add_(model.absolute) if model.scaled else model.absolute
        )
        if model.below_zero:
            error.mul_(still < 0.0)
        share.addcdiv_(error, still, value=self._unit)
        # Zeros and infinities divide into nothing, and stay.
        return share.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(min=_LEAST - 1.0)


def _moves(tensor: torch.Tensor, *, saturates: bool) -> torch.Tensor | None:
    """What is no zero, and no small integer unless a function that `saturates` made it; None: all
    of it, as of most results of a network, which spares looking at magnitudes."""
    least = (tensor.abs() if saturates else tensor.frac().abs_()).amin() if tensor.numel() else 0.0
    if least > 0.0:  # not so where there is a NaN
        return None
    moves = tensor != 0.0 if saturates else tensor.round() != tensor
    return moves if saturates else moves.logical_or_(tensor.abs() >= EXACT)


def _where(moves: torch.Tensor | None, error: torch.Tensor) -> torch.Tensor:
    """`error`, overwritten, but 0 where nothing moves."""
    return error if moves is None else error.mul_(moves)


def _exact(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], y: torch.Tensor
) -> torch.Tensor | None:
    """Where the result is not rounded at all, so that no runtime has another; None: not asked."""
    if y.dtype != torch.float32 or kwargs.get("rounding_mode") is not None:
        return None
    wide = [
        a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
    ]
    same: torch.Tensor = func(*wide, **kwargs) == y
    return same


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Else one operator is a whole layer of an LSTM. (The public switch warns of TF32.)"""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
