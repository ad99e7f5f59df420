"""Folded BatchNorms and biases; narrower number formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gate.records.instruments import ULP
from gate.weights.model_tensors import (
    Floats,
    Leeway,
    Norm,
    Values,
    doubles,
    leeway,
    rounding,
    tensor_of,
)

TOLERANCE = 8 * ULP
"""Of a product, relative. Exporters fold in float32 with up to four roundings; measured on 646
folded pairs of seven torchvision architectures, legacy and dynamo: at most 1.8 ulp for weights, 1.4
for biases."""

_CHANNELS = 0.5
"""The share of channels that must follow a BatchNorm, for the others to count as wrong."""

_COLUMNS = 16


@dataclass(frozen=True, eq=False)
class WeightLayer:
    """A layer with a weight: a convolution, transposed or not, or a Linear."""

    path: str
    weight: torch.Tensor
    bias: torch.Tensor | None
    transposed: bool
    groups: int

    def channels(self, values: Values) -> Values:
        """A weight of this layer, (output channels, elements of each)."""
        if not self.transposed:
            return values.reshape(len(values), -1)
        inputs, each = values.shape[:2]
        grouped = values.reshape(self.groups, inputs // self.groups, each, -1)
        return grouped.transpose(0, 2, 1, 3).reshape(self.groups * each, -1)

    def restored(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The inverse of `channels`."""
        shape = tuple(self.weight.shape)
        if not self.transposed:
            return rows.reshape(shape)
        inputs, each = shape[:2]
        grouped = rows.reshape(self.groups, each, inputs // self.groups, -1)
        return grouped.transpose(0, 2, 1, 3).reshape(shape)

    def offset(self) -> Floats:
        """The bias, zero without one."""
        return np.zeros(1) if self.bias is None else doubles(self.bias)


@dataclass(frozen=True, eq=False)
class Folded:
    """A constant as the weight of a layer with a BatchNorm folded in."""

    expected: Values
    """In the shape of the layer's weight, float32."""
    norms: tuple[Norm, ...]
    """Those with this scale; none: scaled by what no BatchNorm of the model has."""
    factor: Floats
    """By what each channel is scaled."""
    kept: Leeway
    """What the format makes of it that the file keeps it in."""

    @property
    def way(self) -> str:
        """`folded` with a BatchNorm or `scaled` by what attention divides by."""
        return self.norms[0].way if self.norms else "scaled"

    def wrong(self, values: Values) -> NDArray[np.bool_]:
        """Elements that are farther off than folding in float32 and keeping it explain."""
        with np.errstate(all="ignore"):
            apart = np.subtract(values, self.expected)
            np.abs(apart, out=apart)
            allowed = np.abs(self.expected)
            allowed *= np.float32(TOLERANCE + self.kept.relative)
            allowed += np.float32(self.kept.absolute)
        wrong: NDArray[np.bool_] = ~(apart <= allowed)
        return wrong


def layers(model: nn.Module) -> Iterator[WeightLayer]:
    """All modules with a weight of two axes and more."""
    for path, module in model.named_modules():
        weight = tensor_of(module, "weight")
        if weight is None or weight.ndim < 2 or not weight.numel():
            continue
        groups, transposed = getattr(module, "groups", 1), bool(getattr(module, "transposed", 0))
        yield WeightLayer(path, weight, tensor_of(module, "bias"), transposed, int(groups))


def folded(
    values: Values,
    layer: WeightLayer,
    norms_of_model: Iterable[Norm],
    *,
    arithmetic: str | None = None,
    format_: str | None = None,
) -> Folded | None:
    """`values`, in the shape of the layer's weight, as that weight with each output channel scaled.

    None if that is not what they are: fewer than half of the channels are scaled. `arithmetic`: of
    the norms. `format_`: in which the file keeps the values; None: float32.
    """
    kept = leeway(format_)
    near = 2 * TOLERANCE + kept.relative
    weight = rounding(arithmetic)(layer.weight.detach().to("cpu", torch.float32).numpy())
    rows, plain = layer.channels(values), layer.channels(weight)
    each = plain.shape[1]
    some = np.linspace(0, each - 1, min(each, _COLUMNS)).astype(np.int64)
    factor, scaled, usable = _factors(rows[:, some], plain[:, some], near=near)
    if not usable.any() or scaled[usable].mean() < _CHANNELS:
        return None
    fitting = [
        (one, _agreement(factor[usable], one.scale, usable, near=near)) for one in norms_of_model
    ]
    best = max((share for _, share in fitting), default=0.0)
    same = tuple(one for one, share in fitting if share == best)
    if best >= _CHANNELS:
        return Folded(layer.restored(same[0].folded(plain)), same, factor, kept)
    if each == 1 or best > 0.0 or (factor[usable] == 0.0).mean() > 1.0 - _CHANNELS:
        return None
    root = _root(factor[usable], len(rows), near=near)
    if root is not None:
        constant = np.full(len(rows), root)
        norm = Norm("", constant, 0.0 * constant, 0.0 * constant, "scaled", arithmetic)
        return Folded(layer.restored(norm.folded(plain)), (norm,), constant, kept)
    nobody = Norm("", factor, 0.0 * factor, 0.0 * factor)
    return Folded(layer.restored(nobody.folded(plain)), (), factor, kept)


def likeliest(
    values: Values,
    layer: WeightLayer,
    norms_by: Callable[[str | None], Iterable[Norm]],
    *,
    format_: str | None,
) -> tuple[Folded | None, NDArray[np.bool_]]:
    """Return `folded` by the arithmetic that leaves the fewest elements wrong, and their mask.

    The arithmetic is exact, or that of the format in which the file keeps the values. `norms_by`:
    the norms of the model, by arithmetic.
    """
    best: tuple[Folded | None, NDArray[np.bool_]] = (None, np.ones(values.shape, np.bool_))
    for arithmetic in dict.fromkeys((None, format_)):
        own = norms_by(arithmetic)
        found = folded(values, layer, own, arithmetic=arithmetic, format_=format_)
        if found is None:
            continue
        wrong = found.wrong(values) if found.norms else np.ones(values.shape, np.bool_)
        if best[0] is None or wrong.sum() < best[1].sum():
            best = (found, wrong)
        if not wrong.any():
            break
    return best


def folded_bias(
    values: Values, layer: WeightLayer, norm: Norm, *, format_: str | None = None
) -> NDArray[np.bool_] | None:
    """Channels in which `values` is not the bias that folding gives; None for another number."""
    if values.shape != norm.scale.shape:
        return None
    kept, expected = leeway(format_), norm.offset(layer.offset())
    allowed = TOLERANCE * (norm.size + np.abs(layer.offset() * norm.scale)) + kept.absolute
    allowed += kept.relative * np.abs(expected)
    return ~(np.abs(values - expected) <= allowed)


def _factors(
    rows: Values, plain: Values, *, near: float
) -> tuple[Floats, NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the factor of each channel, which channels are scaled by it, and which can be judged.

    The factor is the median, so that single wrong weights do not move it. A channel of zeros alone
    can't be judged.
    """
    with np.errstate(all="ignore"):
        ratios = np.where(plain == 0.0, np.nan, rows.astype(np.float64) / plain)
    some = np.atleast_1d(np.isfinite(ratios).any(axis=1))
    factor = np.zeros(len(rows))
    if some.any():
        factor[some] = np.nanmedian(ratios[some], axis=1)
    alike = np.abs(ratios - factor[:, None]) <= near * np.abs(factor[:, None])
    scaled = some & ((alike | np.isnan(ratios)).mean(axis=1) > _CHANNELS)
    return factor, scaled, some


def _root(factor: Floats, rows: int, *, near: float) -> float | None:
    """The scale of an attention, if it is what all channels have: the dimension of a head to the
    power of -1/2, or of -1/4 for query and key each. A head is a part of the rows."""
    middle = float(np.median(factor))
    if not 0.0 < middle < 1.0:
        return None
    for power in (-0.5, -0.25):
        head = round(middle ** (1.0 / power))
        if head > 1 and rows % head == 0:
            root: float = float(head) ** power
            if (np.abs(factor - root) <= near * root).mean() >= _CHANNELS:
                return root
    return None


def _agreement(factor: Floats, scale: Floats, usable: NDArray[np.bool_], *, near: float) -> float:
    """The share of channels that have the scale."""
    if scale.shape != usable.shape:
        return 0.0
    wanted = scale[usable]
    return float((np.abs(factor - wanted) <= near * np.abs(wanted)).mean())
