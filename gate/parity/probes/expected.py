"""The reference side of one probe, computed once, and the judgement of a runtime by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gate.errors import GateError, OutputMismatch
from gate.instruments import UNDERFLOW, ProbeParity
from gate.parity.noise import NoiseStatistics
from gate.parity.probes.jitter import jittered
from gate.parity.probes.observed import Probe
from gate.parity.runner import Batch
from gate.parity.stand import Stand
from gate.parity.statistics import Array
from gate.parity.track import describe_failure

_SUSPICIOUS_RATIO = 4.0
"""A noise ratio from which on the conditioning of the probe is looked at."""
_SUSPICIOUS_DIFF = 1e-4
"""A relative difference from which on it is looked at, where no float64 twin runs."""
_LEEWAY = 16.0
"""How many times what rounding moves may a runtime be off, where no float64 twin runs."""
_EXPLODED = 1000.0
"""How many times larger than to any sample an answer must be to say nothing about rounding."""

Mask = NDArray[np.bool_]
Compute = Callable[[Batch, Sequence[Array]], list[Array]]
"""Computes a batch and checks number, dtype and shapes of the outputs against the reference's."""


class _Numbers(NamedTuple):
    """The worst over the outputs. `ratio` is None without a float64 twin."""

    ratio: float | None
    relative: float
    torn: bool = False
    """True where an integer, a bool, NaN or infinity is on one side only."""

    @property
    def suspicious(self) -> bool:
        if self.ratio is None:
            return not self.relative <= _SUSPICIOUS_DIFF
        return not self.ratio <= _SUSPICIOUS_RATIO


class Expected:
    """What the model makes of a probe.

    The bound on probes is wide, and yet a probe can be *ill-conditioned*: a constant image before
    InstanceNorm, equal scores before argmax, a value on the very edge of a branch. There PyTorch
    may be exact by luck and a correct runtime far off by its own rounding. So a runtime that is
    suspiciously far off is judged again, with a floor from random rounding (`jittered`): an
    element's floor is the largest error that PyTorch or any of those runs made there, and
    integers, bools, NaN and infinities that rounding alone changes are left out.

    This hides no branch that the trace baked in, unless the probe lies within rounding of the
    condition, where the model has no decided answer itself (zeros stay exactly zero).

    An answer that is a thousand times larger than any to the samples shows a network that amplifies
    whatever it gets, kernels' approximations too (ONNX Runtime's sigmoid ends at 1.5e-8): there the
    size of a difference is not judged, NaN, infinities, shapes and integers still are. Only a
    runtime that is far off costs the further runs. The thresholds are fixed, not the policy's:
    the evidence must not depend on bounds.
    """

    def __init__(self, stand: Stand, probe: Probe, ordinary: Sequence[float] = ()) -> None:
        """`ordinary`: the largest magnitude of each output on samples, where they are known."""
        self.probe = probe
        self._ordinary = ordinary
        self.inapplicable: str | None = None
        self._stand = stand
        self._reference: list[Array] = []
        self._truth: list[Array] | None = None
        try:
            self._reference = stand.reference.run(probe.batch)
        except GateError as error:
            cause = error.__cause__
            self.inapplicable = describe_failure(cause if isinstance(cause, Exception) else error)
        else:
            self._truth = _honest(self._reference, stand.truth.aside(probe.batch))

    def parity(self, compute: Compute) -> ProbeParity:
        """The record of one runtime; whatever `compute` raises is its failure."""
        if self.inapplicable is not None:
            return self._record(inapplicable=self.inapplicable)
        try:
            outputs = compute(self.probe.batch, self._reference)
        except OutputMismatch as error:
            if self._shapes_unsettled():
                return self._record(inapplicable="rounding alone changes its outputs' shapes")
            return self._record(failure=str(error))
        except Exception as error:
            return self._record(failure=describe_failure(error))
        with np.errstate(all="ignore"):
            return self._judged(outputs)

    def _judged(self, outputs: list[Array]) -> ProbeParity:
        numbers = self._numbers(outputs, [[]] * len(outputs))
        if numbers.suspicious and self._draws:
            numbers = self._numbers(outputs, self._draws)
            if numbers.ratio is None and not numbers.torn and self._wobbles(outputs):
                return self._record(inapplicable="rounding alone moves its answer as far")
        if numbers.suspicious and not numbers.torn and self._explodes():
            return self._record(inapplicable="its answer is 1000 times larger than to any sample")
        if numbers.relative == 0.0 and not any(np.isfinite(r).any() for r in self._reference):
            return self._record(inapplicable="it returns no finite number")
        return self._record(noise_ratio=numbers.ratio, relative_diff=numbers.relative)

    def _explodes(self) -> bool:
        return any(
            0.0 < usual * _EXPLODED < float(np.abs(r[np.isfinite(r)]).max(initial=0.0))
            for r, usual in zip(self._reference, self._ordinary, strict=False)
            if r.dtype.kind == "f"
        )

    def _record(self, **seen: float | str | None) -> ProbeParity:
        probe = self.probe
        return ProbeParity.model_validate(
            {"name": probe.name, "kind": probe.kind, "batch_size": probe.size, **seen}
        )

    def _numbers(self, outputs: list[Array], draws: Sequence[list[Array]]) -> _Numbers:
        ratios, relatives = [0.0], [0.0]
        for index, (r, c) in enumerate(zip(self._reference, outputs, strict=True)):
            truth = self._truth[index] if self._truth is not None else None
            decided = _decided(r, truth, draws[index])
            if (_class_differs(r, c) & decided).any():
                return _Numbers(None if self._truth is None else math.inf, math.inf, torn=True)
            if r.dtype.kind != "f":
                continue
            judged = decided & np.isfinite(r)
            relatives.append(_relative(r[judged], c[judged]))
            if truth is not None:
                known = _widest(truth[judged], [a[judged] for a in (r, *draws[index])])
                ratios.append(_ratio(truth[judged], known, c[judged]))
        return _Numbers(None if self._truth is None else max(ratios), max(relatives))

    @cached_property
    def _runs(self) -> list[list[Array]]:
        """The outputs of each run with random rounding."""
        return jittered(self._stand, self.probe.batch)

    @cached_property
    def _draws(self) -> list[list[Array]]:
        """The same by output; empty where there are none, or the shapes are not settled."""
        if not self._runs or self._shapes_unsettled():
            return []
        return [list(arrays) for arrays in zip(*self._runs, strict=True)]

    def _shapes_unsettled(self) -> bool:
        shapes = [r.shape for r in self._reference]
        return any([array.shape for array in run] != shapes for run in self._runs)

    def _wobbles(self, outputs: list[Array]) -> bool:
        """True if random rounding moves every output about as far as the runtime is off."""
        for r, c, draws in zip(self._reference, outputs, self._draws, strict=True):
            if r.dtype.kind == "f":
                judged = _decided(r, None, draws) & np.isfinite(r)
                wobble = max(_distance(r[judged], draw[judged]) for draw in draws)
                if (
                    _relative(r[judged], c[judged]) > _SUSPICIOUS_DIFF
                    and _distance(r[judged], c[judged]) > _LEEWAY * wobble
                ):
                    return False
        return True


def _honest(reference: list[Array], truth: list[Array] | None) -> list[Array] | None:
    """The float64 outputs if they can be the truth: same shapes, finite wherever float32 is."""
    if truth is None or len(truth) != len(reference):
        return None
    for r, r64 in zip(reference, truth, strict=True):
        if r64.shape != r.shape or r64.dtype.kind != r.dtype.kind:
            return None
        if r.dtype.kind == "f" and (np.isfinite(r) & ~np.isfinite(r64)).any():
            return None
    return truth


def _decided(r: Array, truth: Array | None, draws: Sequence[Array]) -> Mask:
    """Where rounding leaves integers and bools, and the kind of a float, as they are."""
    decided = np.ones(r.shape, np.bool_)
    for draw in draws:
        decided &= ~_class_differs(r, draw)
    if draws and truth is not None and r.dtype.kind != "f":
        decided &= r == truth
    return decided


def _class_differs(r: Array, c: Array) -> Mask:
    """Integers and bools: where they differ. Floats: where one is NaN, or infinite, and the other
    is not so with the same sign."""
    if r.dtype.kind != "f":
        return np.asarray(r != c)
    infinite = np.isinf(r) | np.isinf(c)
    return np.asarray((np.isnan(r) != np.isnan(c)) | (infinite & (r != c)))


def _distance(r: Array, c: Array) -> float:
    """max|c - r| of finite floats."""
    return float(np.abs(c.astype(np.float64) - r.astype(np.float64)).max(initial=0.0))


def _relative(r: Array, c: Array) -> float:
    """max|c - r| / max|r| of finite floats; 0 without any difference."""
    moved = _distance(r, c)
    if moved <= UNDERFLOW:
        return 0.0
    scale = float(np.abs(r.astype(np.float64)).max(initial=0.0))
    return moved / scale if scale > 0.0 else math.inf


def _widest(truth: Array, known: Sequence[Array]) -> Array:
    """Of each element the known value farthest from the truth; at least the underflow away."""
    r64 = truth.astype(np.float64)
    errors = np.stack([array.astype(np.float64) - r64 for array in known])
    farthest = np.take_along_axis(errors, np.abs(errors).argmax(axis=0)[None], axis=0)[0]
    error = np.copysign(np.maximum(np.abs(farthest), UNDERFLOW), farthest)
    return np.asarray(r64 + error)


def _ratio(truth: Array, known: Array, candidate: Array) -> float:
    if truth.size == 0:
        return 0.0
    statistics = NoiseStatistics()
    statistics.update(truth, known, candidate, samples=1)
    return statistics.result().ratio
