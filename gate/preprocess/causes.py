"""Why a consumer's tensor is another: the known change to the spec that explains the difference.

A hypothesis is tested, not guessed: the change is applied to the picture, and named only where at
least half of the mean difference vanishes with it. A second change must halve the rest again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from gate.preprocess.candidates import Hypothesis, candidates, own
from gate.preprocess.difference import DIGITS
from gate.preprocess.spec import PreprocessSpec
from gate.preprocess.tensor import Pixels, Tensor, channels_last

ROUNDING = 1.0
"""Steps: what is within it needs no cause, integer pixels round to one side or the other."""
_LEAST_GAIN = 0.5
_CHANGES = 4
"""Causes at once at most."""


class Attribution(NamedTuple):
    """The causes, and the share of the mean difference that vanishes with them."""

    causes: tuple[str, ...]
    explained: float


class _Tested(NamedTuple):
    causes: tuple[str, ...]
    mean: float
    max: float


def diagnose(
    pixels: Pixels, tensor: Tensor, spec: PreprocessSpec, *, reference: Tensor
) -> Attribution:
    """Explain the difference between `tensor` and `reference`, which `spec` makes of `pixels`.

    No causes where there is nothing to explain (at most one step everywhere), or where nothing
    known explains half of it.
    """
    ways = [own(pixels, spec, other_way=other) for other in (False, True)]
    one, other = _test(reference, ways, spec)
    tested = _test(tensor, candidates(pixels, spec, other_way=other.mean < one.mean), spec)
    plain = best = next(one for one in tested if not one.causes)
    for changes in range(1, _CHANGES + 1):
        found = [one for one in tested if len(one.causes) == changes]
        if best.max <= ROUNDING or not found:
            break
        nearest = min(found, key=lambda one: one.mean)
        if nearest.mean <= _LEAST_GAIN * best.mean:
            best = nearest
    explained = 1.0 - best.mean / plain.mean if best.causes and plain.mean > 0.0 else 0.0
    return Attribution(best.causes, explained)


def wrong_shape(tensor: Tensor, spec: PreprocessSpec, reference: Tensor) -> str | None:
    """How the tensor's shape and dtype differ from the reference's, with the cause where it is
    known; None: they are the same."""
    if tensor.shape == reference.shape and tensor.dtype == reference.dtype:
        return None
    misfit = f"{tensor.dtype} {list(tensor.shape)}, the spec says {reference.dtype} "
    misfit += f"{list(reference.shape)}"
    if tensor.shape == reference.shape:
        return misfit
    moved = (1, 2, 0) if spec.layout == "nchw" else (2, 0, 1)
    if tensor.shape == tuple(reference.shape[axis] for axis in moved):
        other = "nhwc" if spec.layout == "nchw" else "nchw"
        return f"{misfit}: layout {other} instead of {spec.layout}"
    if tensor.shape == (1, *reference.shape):
        return f"{misfit}: one batch axis too many"
    return misfit


def _test(tensor: Tensor, hypotheses: Iterable[Hypothesis], spec: PreprocessSpec) -> list[_Tested]:
    values = channels_last(tensor, spec)
    finite = np.isfinite(values)
    steps = np.array(spec.steps)
    tested = []
    for candidate in hypotheses:
        off = np.where(finite, np.abs(values - candidate.values), 0.0) * steps
        mean, largest = float(off.mean()), float(off.max())
        tested.append(_Tested(candidate.causes, mean, round(largest, DIGITS)))
    return tested
