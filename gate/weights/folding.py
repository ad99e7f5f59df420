"""Folded BatchNorms and biases; narrower number formats."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.hooks import RemovableHandle

from gate.records.instruments import ULP
from gate.weights.layouts import arrangements
from gate.weights.model_tensors import (
    Floats,
    FormatTolerance,
    Norm,
    ReferenceObserver,
    Values,
    format_tolerance,
    norms,
    rounding,
    tensor_of,
    to_float64,
)

TOLERANCE = 8 * ULP
"""Relative tolerance of a product. Exporters fold in float32 with up to four roundings. Measured on
646 folded pairs of seven torchvision architectures, legacy exporter and dynamo: at most 1.8 ulp for
weights, 1.4 for biases."""

_MIN_CHANNEL_SHARE = 0.5
"""Minimum share of channels that follow a BatchNorm; then the other channels count as wrong."""

_SAMPLED_COLUMNS = 16


@dataclass(frozen=True, eq=False)
class WeightLayer:
    """A layer with a weight: a convolution, transposed or not, or a Linear."""

    path: str
    weight: torch.Tensor
    bias: torch.Tensor | None
    transposed: bool
    groups: int

    def channels(self, values: Values) -> Values:
        """Return a weight of this layer with shape (output channels, elements per channel)."""
        if not self.transposed:
            return values.reshape(len(values), -1)
        inputs, outputs = values.shape[:2]
        grouped = values.reshape(self.groups, inputs // self.groups, outputs, -1)
        return grouped.transpose(0, 2, 1, 3).reshape(self.groups * outputs, -1)

    def restored(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the inverse of `channels`."""
        shape = tuple(self.weight.shape)
        if not self.transposed:
            return rows.reshape(shape)
        inputs, outputs = shape[:2]
        grouped = rows.reshape(self.groups, outputs, inputs // self.groups, -1)
        return grouped.transpose(0, 2, 1, 3).reshape(shape)

    def offset(self) -> Floats:
        """Return the bias, or zero without one."""
        return np.zeros(1) if self.bias is None else to_float64(self.bias)


@dataclass(frozen=True, eq=False)
class Folded:
    """A constant that is the weight of a layer with a BatchNorm folded in."""

    expected: Values
    """Expected values in the shape of the layer's weight, float32."""
    norms: tuple[Norm, ...]
    """BatchNorms with this scale; empty if no BatchNorm of the model has it."""
    factor: Floats
    """Scale of each channel."""
    tolerance: FormatTolerance
    """Tolerance of the format in which the file stores the constant."""

    @property
    def way(self) -> str:
        """Return `folded` for a BatchNorm, or `scaled` for the scale of an attention."""
        return self.norms[0].way if self.norms else "scaled"

    def wrong(self, values: Values) -> NDArray[np.bool_]:
        """Return the mask of elements that differ by more than the rounding of folding."""
        with np.errstate(all="ignore"):
            error = np.subtract(values, self.expected)
            np.abs(error, out=error)
            allowed = np.abs(self.expected)
            allowed *= np.float32(TOLERANCE + self.tolerance.relative)
            allowed += np.float32(self.tolerance.absolute)
        wrong: NDArray[np.bool_] = ~(error <= allowed)
        return wrong


def layers(model: nn.Module) -> Iterator[WeightLayer]:
    """Yield all modules with a weight of at least two axes."""
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
    """Match values with the weight of a layer whose output channels are scaled.

    Return None if fewer than half of the channels are scaled. values: in the shape of the layer's
    weight. arithmetic: the arithmetic of the norms. format_: the format in which the file stores
    the values; None: float32.
    """
    tolerance = format_tolerance(format_)
    near = 2 * TOLERANCE + tolerance.relative
    weight = rounding(arithmetic)(layer.weight.detach().to("cpu", torch.float32).numpy())
    rows, plain = layer.channels(values), layer.channels(weight)
    columns = plain.shape[1]
    sampled = np.linspace(0, columns - 1, min(columns, _SAMPLED_COLUMNS)).astype(np.int64)
    factor, scaled, usable = _fit_factors(rows[:, sampled], plain[:, sampled], near=near)
    if not usable.any() or scaled[usable].mean() < _MIN_CHANNEL_SHARE:
        return None
    fitting = [
        (norm, _agreement(factor[usable], norm.scale, usable, near=near)) for norm in norms_of_model
    ]
    best = max((share for _, share in fitting), default=0.0)
    best_norms = tuple(norm for norm, share in fitting if share == best)
    if best >= _MIN_CHANNEL_SHARE:
        return Folded(layer.restored(best_norms[0].folded(plain)), best_norms, factor, tolerance)
    if columns == 1 or best > 0.0 or (factor[usable] == 0.0).mean() > 1.0 - _MIN_CHANNEL_SHARE:
        return None
    root = _fit_attention_scale(factor[usable], len(rows), near=near)
    if root is not None:
        constant = np.full(len(rows), root)
        norm = Norm("", constant, 0.0 * constant, 0.0 * constant, "scaled", arithmetic)
        return Folded(layer.restored(norm.folded(plain)), (norm,), constant, tolerance)
    unknown = Norm("", factor, 0.0 * factor, 0.0 * factor)
    return Folded(layer.restored(unknown.folded(plain)), (), factor, tolerance)


def likeliest(
    values: Values,
    layer: WeightLayer,
    norms_by: Callable[[str | None], Iterable[Norm]],
    *,
    format_: str | None,
) -> tuple[Folded | None, NDArray[np.bool_]]:
    """Return `folded` in the arithmetic with the fewest wrong elements, and their mask.

    The arithmetic is exact, or that of the format in which the file stores the values. norms_by:
    returns the norms of the model for an arithmetic.
    """
    best: tuple[Folded | None, NDArray[np.bool_]] = (None, np.ones(values.shape, np.bool_))
    for arithmetic in dict.fromkeys((None, format_)):
        candidates = norms_by(arithmetic)
        match = folded(values, layer, candidates, arithmetic=arithmetic, format_=format_)
        if match is None:
            continue
        wrong = match.wrong(values) if match.norms else np.ones(values.shape, np.bool_)
        if best[0] is None or wrong.sum() < best[1].sum():
            best = (match, wrong)
        if not wrong.any():
            break
    return best


def folded_bias(
    values: Values, layer: WeightLayer, norm: Norm, *, format_: str | None = None
) -> NDArray[np.bool_] | None:
    """Return the channels in which `values` is not the folded bias; None for other shapes."""
    if values.shape != norm.scale.shape:
        return None
    tolerance, expected = format_tolerance(format_), norm.offset(layer.offset())
    allowed = TOLERANCE * (norm.size + np.abs(layer.offset() * norm.scale)) + tolerance.absolute
    allowed += tolerance.relative * np.abs(expected)
    return ~(np.abs(values - expected) <= allowed)


def _fit_factors(
    rows: Values, plain: Values, *, near: float
) -> tuple[Floats, NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the factor of each channel, the scaled channels, and the usable channels.

    The factor is the median, so that single wrong weights do not change it. Channels of zeros are
    not usable.
    """
    with np.errstate(all="ignore"):
        ratios = np.where(plain == 0.0, np.nan, rows.astype(np.float64) / plain)
    usable = np.atleast_1d(np.isfinite(ratios).any(axis=1))
    factor = np.zeros(len(rows))
    if usable.any():
        factor[usable] = np.nanmedian(ratios[usable], axis=1)
    is_near = np.abs(ratios - factor[:, None]) <= near * np.abs(factor[:, None])
    scaled = usable & ((is_near | np.isnan(ratios)).mean(axis=1) > _MIN_CHANNEL_SHARE)
    return factor, scaled, usable


def _fit_attention_scale(factor: Floats, rows: int, *, near: float) -> float | None:
    """Return the scale of an attention if all channels have it, or None.

    It is the head dimension to the power of -1/2, or -1/4 for query and key each. The rows are a
    multiple of the head dimension."""
    middle = float(np.median(factor))
    if not 0.0 < middle < 1.0:
        return None
    for power in (-0.5, -0.25):
        head = round(middle ** (1.0 / power))
        if head > 1 and rows % head == 0:
            root: float = float(head) ** power
            if (np.abs(factor - root) <= near * root).mean() >= _MIN_CHANNEL_SHARE:
                return root
    return None


def _agreement(factor: Floats, scale: Floats, usable: NDArray[np.bool_], *, near: float) -> float:
    """Return the share of channels with the scale."""
    if scale.shape != usable.shape:
        return 0.0
    expected = scale[usable]
    return float((np.abs(factor - expected) <= near * np.abs(expected)).mean())


_MERGING = 2.0**-20
"""Relative error of a weight that was merged in float32, and of the sums in forward."""

_ENCLOSING = 3
"""Number of modules that may compute a merged weight: its layer, and two modules around it."""


def merged_weights(
    observer: ReferenceObserver, weights: Mapping[str, tuple[Values, FormatTolerance]]
) -> Iterator[tuple[str, str]]:
    """Yield the weights and biases of the file that have what a module adds to their layer.

    A low-rank adapter that is added in forward can be merged into the weight of its layer. For
    random inputs, the layer with the weight of the file then computes what the module with the
    adapter computes (the test of Freivalds, 1977). Such a weight is yielded with the path of the
    module. weights: values and tolerance of the file's constants by their name in the model.
    """
    modules = {
        path: module
        for path, module in observer.model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)  # which accepts no hooks
    }
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name in weights:
        path = name.rpartition(".")[0]
        for _ in range(_ENCLOSING):
            names[path].append(name)
            path = path.rpartition(".")[0]
    merged: dict[str, str] = {}
    hooks: dict[str, RemovableHandle] = {}

    def compare(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        hooks.pop(path).remove()
        with suppress(Exception):  # the model's code may reject random inputs
            probe = _probe(args[0], module)
            output = module.forward(probe, *args[1:], **kwargs)
            zero = torch.zeros_like(output)
            if probe.is_floating_point():
                zero = module.forward(torch.zeros_like(probe), *args[1:], **kwargs)
            for name in set(names[path]) - merged.keys():
                values, tolerance = weights[name]
                layer = modules[name.rpartition(".")[0]]
                if _computes(layer, values, (probe, zero, output), tolerance):
                    merged[name] = path

    for path in names.keys() & modules.keys():
        hook = partial(compare, path)
        hooks[path] = modules[path].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        if hooks:
            observer.run(observer.batch)
    finally:
        for handle in hooks.values():
            handle.remove()
    yield from merged.items()


def weights_behind_norms(
    model: nn.Module, weights: Mapping[str, tuple[Values, FormatTolerance]]
) -> Iterator[tuple[str, str]]:
    """Yield the weights and biases of Linears into which the affine of a norm before them was
    merged, and the ones and zeros that replace that affine, with the path of the norm.

    weights: as in `merged_weights`.
    """
    modules, affines = dict(model.named_modules()), dict(_affines(model))
    merged: set[str] = set()
    for name, (values, tolerance) in weights.items():
        module = modules.get(name.rpartition(".")[0], model)
        weight, bias = tensor_of(module, "weight"), tensor_of(module, "bias")
        if weight is None or weight.ndim != 2 or not name.endswith(("weight", "bias")):
            continue
        matrix = to_float64(weight)
        offset = np.zeros(len(matrix)) if bias is None else to_float64(bias)
        for path, affine in affines.items():
            if _is_behind(values, matrix, offset, affine, tolerance):
                merged.add(path)
                yield name, path
                break
    for name, (values, _) in weights.items():
        path, _, kind = name.rpartition(".")
        if path in merged and (values == (1.0 if kind == "weight" else 0.0)).all():
            yield name, path


def _affines(model: nn.Module) -> Iterator[tuple[str, tuple[Floats, Floats]]]:
    """Yield path, scale and shift of the modules that scale and shift each feature."""
    for path, module in model.named_modules():
        scale, shift = tensor_of(module, "weight"), tensor_of(module, "bias")
        if scale is not None and scale.ndim == 1:
            shift = torch.zeros_like(scale) if shift is None else shift
            yield path, (to_float64(scale), to_float64(shift))
    yield from ((n.path, (n.scale, n.beta - n.mean * n.scale)) for n in norms(model))


def _is_behind(
    values: Values,
    weight: Floats,
    offset: Floats,
    affine: tuple[Floats, Floats],
    tolerance: FormatTolerance,
) -> bool:
    """Return whether `values` are the weight or bias of a Linear with the affine before it.

    With the scale g and the shift s, they are W * g and b + W s.
    """
    scale, shift = affine
    if scale.shape != weight.shape[1:]:
        return False
    if values.ndim == 2:
        want, size = weight * scale, np.abs(weight * scale)
    else:
        want, size = offset + weight @ shift, np.abs(offset) + np.abs(weight) @ np.abs(shift)
    allowed = (_MERGING + tolerance.relative) * size + tolerance.absolute
    return any(
        got.shape == want.shape and bool((np.abs(got - want) <= allowed).all())
        for got in (values, values.T)
    )


def _probe(example: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return random numbers of the shape of an input, none of them near zero; or all rows of the
    module's embedding."""
    if not example.is_floating_point():
        (table,) = (m for m in module.modules() if isinstance(m, nn.Embedding))
        width = math.prod(example.shape[1:])
        rows = torch.arange(-(-table.num_embeddings // width) * width) % table.num_embeddings
        return rows.reshape(-1, *example.shape[1:]).to(example)
    generator = torch.Generator().manual_seed(0)
    sizes = 0.5 + torch.rand(example.shape, generator=generator)
    signs = torch.randint(0, 2, example.shape, generator=generator) * 2 - 1
    return (sizes * signs).to(example)


def _computes(
    layer: nn.Module, values: Values, outputs: Sequence[torch.Tensor], tolerance: FormatTolerance
) -> bool:
    """Return whether a layer has the outputs of a module with this weight or bias only.

    outputs: a probe of the module, its output for zeros, and its output for the probe.
    """
    inputs, zero, output = (tensor.detach().to("cpu", torch.float64) for tensor in outputs)
    name = "weight" if values.ndim > 1 else "bias"
    weight, original = tensor_of(layer, "weight"), tensor_of(layer, name)
    if weight is None or original is None or weight.ndim < 2:
        return False
    stored = torch.from_numpy(to_float64(original))
    error = _MERGING + tolerance.relative
    power = 1 if isinstance(layer, nn.Embedding) else 2

    def fits(merged: torch.Tensor) -> bool:
        spread = (merged.abs() + stored.abs()) * error + tolerance.absolute
        if name == "bias":
            shape = (-1, *[1] * (weight.ndim - 2))
            difference, allowed = zero - merged.reshape(shape), spread.reshape(shape)
        else:
            difference = output - zero - _product(layer, inputs, merged)
            allowed = 4 * _product(layer, inputs**power, spread**2).sqrt() + _MERGING * zero.abs()
        return bool((difference.abs() <= allowed).all())

    candidates = arrangements(stored.numpy(), values.astype(np.float64))
    return not fits(stored) and any(fits(torch.from_numpy(way.copy())) for way in candidates)


def _product(layer: nn.Module, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the output of a layer with this weight and no bias."""
    if isinstance(layer, nn.Embedding):
        return weight[inputs.long()]
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        convolved: torch.Tensor = layer._conv_forward(inputs, weight, None)
        return convolved
    return inputs @ (weight.T if weight.shape[1] == inputs.shape[-1] else weight)
