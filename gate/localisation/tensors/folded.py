"""The weights of a layer that a BatchNorm was folded into, or of one alone, against the file's."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from torch import nn

from gate.localisation.tensors.counterparts import Floats
from gate.localisation.tensors.weights import WeightDifference, difference, fits, like, numbers_of
from gate.parity.graph.formats import FORMATS, leeway
from gate.parity.graph.norms import norms
from gate.parity.statistics.output import Array

_FOLDING = 1e-5
"""Relative difference that folding in float32 makes at most."""
_OF_OFFSETS = 10.0
"""How many times that an offset may be off, of the largest one."""
_UNITS = 4.5
"""Of 16 bits, that folding in them makes at most. A weight, half a unit each: itself, gamma, root,
quotient, product; and a quarter each, because the root is taken of them: the variance, and it with
epsilon. An offset, of its terms: bias, mean, their difference, beta and the sum besides."""


def folded_differences(
    modules: tuple[nn.Module, nn.Module],
    paths: tuple[str, str],
    found: Mapping[str, Array],
    *,
    format_: str | None = None,
) -> list[WeightDifference]:
    """What a layer, and the BatchNorm folded into it, have otherwise than the file: which of the
    two was another one.

    Folded, a weight is that of the layer, each output channel scaled by gamma / sqrt(var + eps).
    `format_`: in which the file may keep and compute it (`gate.parity.graph.formats.leeway`); None:
    float32.
    """
    layer, relative = modules[0], _UNITS * leeway(format_).relative
    norm = next(norms(modules[1]), None)
    weight, bias = (numbers_of(getattr(layer, name, None)) for name in ("weight", "bias"))
    fitting = [] if weight is None else [like(a, weight) for a in found.values() if fits(a, weight)]
    if weight is None or norm is None or not fitting or getattr(layer, "transposed", False):
        return []
    tolerance, scale = _FOLDING + relative, norm.scale
    rows, channels = fitting[0].reshape(len(weight), -1), weight.reshape(len(weight), -1)
    factor = _factor(rows, channels, scale)
    largest = np.abs(rows).max(1, where=np.isfinite(rows), initial=0.0)
    wrong = ~(np.abs(rows - factor[:, None] * channels) <= tolerance * largest[:, None])
    scaled = ~np.isclose(factor, scale, rtol=tolerance, atol=0.0)
    offset = 0.0 if bias is None else bias
    offsets = [a.astype(np.float64) for a in found.values() if a.shape == scale.shape]
    want, size = norm.offset(np.zeros(1)) + scale * offset, norm.size + np.abs(scale * offset)
    same_offset = not offsets or _any_close(offsets, want, relative * size)
    if not wrong.any() and scaled.any() and not same_offset:
        # Had only the layer's weight changed, the offset would have stayed.
        return [_another_scale(modules[1], paths[1], factor, tolerance=tolerance)]
    wrong |= scaled[:, None]
    rounded = _folded_rounding(rows, scale[:, None] * channels) if wrong.any() else None
    if rounded is not None:
        name = f"{paths[0]}.weight"
        text = f"`{name}` of the file is the model's, rounded to {rounded} after folding"
        return [WeightDifference(paths[0], text, rounded)]
    if wrong.any():
        unscaled = rows / np.where(scale == 0.0, 1.0, scale)[:, None]
        return [difference(f"{paths[0]}.weight", channels, unscaled, wrong, tolerance=_FOLDING)]
    if not same_offset:
        text = f"the offset of `{paths[1]}` (bias, running_mean) that was folded in is another"
        return [WeightDifference(paths[1], text)]
    return []


def affine_differences(
    module: nn.Module, path: str, found: Mapping[str, Array], *, format_: str | None = None
) -> list[WeightDifference]:
    """The same for a norm with frozen statistics that the file has as a factor and an offset."""
    norm = next(norms(module), None)
    if norm is None or norm.path or not hasattr(module, "eps"):
        return []
    sized = [
        like(array.reshape(-1), norm.scale)
        for array in found.values()
        if array.dtype.kind == "f" and array.size == norm.scale.size
    ]
    own = [numbers_of(module.weight), numbers_of(module.bias)]
    if len(sized) != 2 or all(
        any(one is not None and np.array_equal(array, one) for one in own) for array in sized
    ):  # as BatchNormalization has them, or not at all
        return []
    relative = _UNITS * leeway(format_).relative
    if not _any_close(sized, norm.scale, relative * np.abs(norm.scale)):
        lost, of = "scale", "weight, running_var, eps"
    elif not _any_close(sized, norm.offset(np.zeros(1)), relative * norm.size):
        lost, of = "offset", "bias, running_mean"
    else:
        return []
    return [WeightDifference(path, f"the {lost} of `{path}` ({of}) in the file is another")]


def _folded_rounding(rows: Floats, want: Floats) -> str | None:
    """The format to which the products were rounded. What folding in float32 makes of a product may
    be rounded up where its exact value is rounded down."""
    for name, rounded in FORMATS.items():
        below, above = rounded(want * (1 - _FOLDING)), rounded(want * (1 + _FOLDING))
        if ((rows == below) | (rows == above)).all():
            return name
    return None


def _factor(rows: Floats, channels: Floats, scale: Floats) -> Floats:
    """By what each channel was scaled: the median over its weights, because single weights that
    are wrong must not move it."""
    with np.errstate(all="ignore"):
        ratios = np.where(channels == 0.0, np.nan, rows / channels)
    some = np.atleast_1d(np.isfinite(ratios).any(axis=1))
    factor: Floats = np.nanmedian(np.where(some[:, None], ratios, 1.0), axis=1)
    return np.where(some, factor, scale)


def _another_scale(
    norm: nn.Module, path: str, scale: Floats, *, tolerance: float
) -> WeightDifference:
    epsilon = _epsilon(norm, scale, tolerance=tolerance)
    if epsilon is not None:
        text = f"eps of `{path}` that was folded in is {epsilon:.3g}, {norm.eps:.3g} in the model"
        return WeightDifference(path, text, by_code=True)
    text = f"the scale of `{path}` (weight, running_var, eps) that was folded in is another"
    return WeightDifference(path, text)


def _epsilon(norm: nn.Module, scale: Floats, *, tolerance: float) -> float | None:
    """The eps with which a BatchNorm would have this scale in every channel, if there is one."""
    variance, gamma = numbers_of(norm.running_var), numbers_of(norm.weight)
    assert variance is not None
    with np.errstate(all="ignore"):
        wanted = ((1.0 if gamma is None else gamma) / scale) ** 2 - variance
        epsilon = float(np.median(wanted[np.isfinite(wanted)])) if len(wanted) > 1 else math.nan
        if not epsilon > 0.0:
            return None
        would = (1.0 if gamma is None else gamma) / np.sqrt(variance + epsilon)
    return epsilon if np.allclose(would, scale, rtol=tolerance, atol=0.0) else None


def _any_close(offsets: list[Floats], want: Floats, kept: Floats) -> bool:
    """True if one of the offsets is the wanted one, as far as folding in float32 keeps it, and by
    no more than `kept` beyond that."""
    allowed = kept + _OF_OFFSETS * _FOLDING * max(float(np.abs(want).max()), 1e-30)
    return any(bool((np.abs(offset - want) <= allowed).all()) for offset in offsets)
