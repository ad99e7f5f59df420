"""The weights of a layer in the file against the module's: exact, cheap, and often the cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

from gate.localisation.counterparts import Floats, Pair, counterparts
from gate.parity.graph.formats import FORMATS
from gate.parity.graph.packed import misplaced
from gate.parity.statistics.output import Array

_FOLDING = 1e-5
"""Relative difference that folding in float32 makes at most."""


@dataclass(frozen=True)
class WeightDifference:
    """A parameter or buffer of which the file has other values."""

    module: str
    """Path of the module that owns it."""
    text: str
    rounded_to: str | None = None
    """The format whose rounding explains all of the difference."""
    by_code: bool = False
    """True if code may have made it: another checkpoint alone does not explain it."""


@dataclass(frozen=True)
class WeightComparison:
    """What the constants of a layer say about the model's tensors."""

    differences: tuple[WeightDifference, ...]
    same: tuple[str, ...] = ()
    """Tensors that the file has as they are."""
    unfound: tuple[str, ...] = ()
    """Tensors that nothing in the file was compared with."""


def comparison(
    module: nn.Module,
    path: str,
    found: Mapping[str, Array],
    *,
    loose: Mapping[str, Floats] | None = None,
    others: Set[str] = frozenset(),
    reordered: bool = False,
) -> WeightComparison:
    """The parameters and buffers of `module` against `found`, the constants of the file that its
    nodes read. What has no counterpart is listed and says nothing.

    `loose`: tensors of the model that code may use anywhere; with them only the module's own count
    and not its children's. `others`: names of all tensors of the model, which constants may have.
    `reordered`: as in `counterparts`. Plain attributes are compared too, but need evidence as
    `loose` does: they may be left over from a call.
    """
    recurse = loose is None
    own = _named(path, _tensors(module, recurse=recurse))
    plain = _named(path, _attributes(module, recurse=recurse))
    tensors = {**(loose or {}), **plain, **own}
    foreign = others - set(tensors)
    pairs = counterparts(
        tensors, found, others=foreign, loose=set(tensors) - set(own), reordered=reordered
    )
    return WeightComparison(
        tuple(
            _difference_of(pair, by_code=loose is not None or pair.name in plain)
            for pair in pairs.differing
        ),
        tuple(name for name in pairs.same if name in own or name in plain),
        tuple(name for name in pairs.unfound if name in own),
    )


def tensors_of(module: nn.Module, path: str) -> dict[str, Floats]:
    """The module's own parameters, buffers and plain attributes of floats, by full names."""
    named = (_attributes(module, recurse=False), _tensors(module, recurse=False))
    return {name: tensor for some in named for name, tensor in _named(path, some).items()}


def transposed(
    module: nn.Module, path: str, nodes: Iterable[onnx.NodeProto], found: Mapping[str, Array]
) -> WeightDifference | None:
    """The square weight of a Linear, where a product reads it the wrong way round. `comparison`
    takes both, because exporters turn the weights of Linear themselves."""
    if not isinstance(module, nn.Linear):
        return None
    weight = module.weight.detach().numpy()
    for node in nodes:
        array = found.get(node.input[1]) if node.op_type in ("Gemm", "MatMul") else None
        if array is None or array.shape != weight.shape:
            continue
        turns = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        want = weight if turns else weight.T
        if np.array_equal(array, want.T) and not np.array_equal(array, want):
            name = f"{path}.weight" if path else "weight"
            return WeightDifference(path, f"`{name}` of the file is the model's, transposed")
    return None


def moved(module: nn.Module, path: str, found: Mapping[str, Array]) -> WeightDifference | None:
    """What a recurrent module has at another place, as the directions or the gates of an LSTM.
    `comparison` takes every order, because exporters split, turn and join these."""
    text = misplaced(module, found.values())
    return None if text is None else WeightDifference(path, text)


def folded_differences(
    modules: tuple[nn.Module, nn.Module], paths: tuple[str, str], found: Mapping[str, Array]
) -> list[WeightDifference]:
    """The same for a layer with a BatchNorm folded into it: which of the two was another one.

    Folded, a weight is that of the layer, each output channel scaled by gamma / sqrt(var + eps).
    """
    layer, norm = modules
    weight, bias = (_numbers(getattr(layer, name, None)) for name in ("weight", "bias"))
    fitting = (
        [] if weight is None else [_like(a, weight) for a in found.values() if _fits(a, weight)]
    )
    if weight is None or not fitting or getattr(layer, "transposed", False):
        return []
    scale, shift = _affine(norm)
    rows, channels = fitting[0].reshape(len(weight), -1), weight.reshape(len(weight), -1)
    factor = _factor(rows, channels, scale)
    largest = np.abs(rows).max(1, where=np.isfinite(rows), initial=0.0)
    wrong = ~(np.abs(rows - factor[:, None] * channels) <= _FOLDING * largest[:, None])
    scaled = ~np.isclose(factor, scale, rtol=_FOLDING, atol=0.0)
    offset = 0.0 if bias is None else bias
    offsets = [a.astype(np.float64) for a in found.values() if a.shape == scale.shape]
    same_offset = not offsets or _any_close(offsets, shift + scale * offset)
    if not wrong.any() and scaled.any() and not same_offset:
        # Had only the layer's weight changed, the offset would have stayed.
        return [_another_scale(norm, paths[1], factor)]
    wrong |= scaled[:, None]
    rounded = _folded_rounding(rows, scale[:, None] * channels) if wrong.any() else None
    if rounded is not None:
        name = f"{paths[0]}.weight"
        text = f"`{name}` of the file is the model's, rounded to {rounded} after folding"
        return [WeightDifference(paths[0], text, rounded)]
    if wrong.any():
        unscaled = rows / np.where(scale == 0.0, 1.0, scale)[:, None]
        return [_difference(f"{paths[0]}.weight", channels, unscaled, wrong, tolerance=_FOLDING)]
    if not same_offset:
        text = f"the offset of `{paths[1]}` (bias, running_mean) that was folded in is another"
        return [WeightDifference(paths[1], text)]
    return []


def affine_differences(
    norm: nn.Module, path: str, found: Mapping[str, Array]
) -> list[WeightDifference]:
    """The same for a norm with frozen statistics that the file has as a factor and an offset."""
    if not all(hasattr(norm, name) for name in ("running_mean", "running_var", "eps")):
        return []
    if norm.running_mean is None or norm.running_var is None:
        return []
    wanted = dict(zip(("scale", "offset"), _affine(norm), strict=True))
    sized = [
        _like(array.reshape(-1), wanted["scale"])
        for array in found.values()
        if array.dtype.kind == "f" and array.size == wanted["scale"].size
    ]
    own = [_numbers(norm.weight), _numbers(norm.bias)]
    if len(sized) != 2 or all(
        any(one is not None and np.array_equal(array, one) for one in own) for array in sized
    ):  # as BatchNormalization has them, or not at all
        return []
    lost = [name for name, want in wanted.items() if not _any_close(sized, want)]
    if not lost:
        return []
    of = "weight, running_var, eps" if "scale" in lost else "bias, running_mean"
    return [WeightDifference(path, f"the {lost[0]} of `{path}` ({of}) in the file is another")]


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


def _another_scale(norm: nn.Module, path: str, scale: Floats) -> WeightDifference:
    epsilon = _epsilon(norm, scale)
    if epsilon is not None:
        text = f"eps of `{path}` that was folded in is {epsilon:.3g}, {norm.eps:.3g} in the model"
        return WeightDifference(path, text, by_code=True)
    text = f"the scale of `{path}` (weight, running_var, eps) that was folded in is another"
    return WeightDifference(path, text)


def _epsilon(norm: nn.Module, scale: Floats) -> float | None:
    """The eps with which a BatchNorm would have this scale in every channel, if there is one."""
    variance, gamma = _numbers(norm.running_var), _numbers(norm.weight)
    assert variance is not None
    with np.errstate(all="ignore"):
        wanted = ((1.0 if gamma is None else gamma) / scale) ** 2 - variance
        epsilon = float(np.median(wanted[np.isfinite(wanted)])) if len(wanted) > 1 else math.nan
        if not epsilon > 0.0:
            return None
        would = (1.0 if gamma is None else gamma) / np.sqrt(variance + epsilon)
    return epsilon if np.allclose(would, scale, rtol=_FOLDING, atol=0.0) else None


def _any_close(offsets: list[Floats], want: Floats) -> bool:
    """True if one of the offsets is the wanted one, as far as folding in float32 keeps it."""
    size = max(float(np.abs(want).max()), 1e-30)
    return any(np.abs(o - want).max() <= 10 * _FOLDING * size for o in offsets)


def _named(path: str, tensors: Iterable[tuple[str, Floats]]) -> dict[str, Floats]:
    return {f"{path}.{name}" if path else name: tensor for name, tensor in tensors}


def _tensors(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, Floats]]:
    named = (module.named_parameters(recurse=recurse), module.named_buffers(recurse=recurse))
    for name, tensor in (pair for pairs in named for pair in pairs):
        numbers = _numbers(tensor)
        if numbers is not None and numbers.size:
            yield name, numbers


def _attributes(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, Floats]]:
    """What code keeps as `self.table = …`, without registering it: exporters store it too."""
    for name, tensor in plain_attributes(module, recurse=recurse):
        numbers = _numbers(tensor)
        if numbers is not None and numbers.size:
            yield name, numbers


def plain_attributes(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are neither parameters nor buffers, by their names in the module."""
    for path, part in module.named_modules() if recurse else [("", module)]:
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


def _numbers(tensor: object) -> Floats | None:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        return None
    numbers: Floats = tensor.detach().to(torch.float64).numpy()
    return numbers


def _affine(norm: nn.Module) -> tuple[Floats, Floats]:
    """Scale and shift of a BatchNorm in eval mode."""
    mean, variance = _numbers(norm.running_mean), _numbers(norm.running_var)
    assert mean is not None
    assert variance is not None
    gamma, beta = _numbers(norm.weight), _numbers(norm.bias)
    scale = (1.0 if gamma is None else gamma) / np.sqrt(variance + float(norm.eps))  # type: ignore[arg-type]
    return scale, (0.0 if beta is None else beta) - mean * scale


def _difference_of(pair: Pair, *, by_code: bool) -> WeightDifference:
    """`by_code`: code reads it, which may compute something of it that an exporter stores."""
    module = pair.name.rpartition(".")[0]
    if pair.got.shape == pair.want.shape:
        wrong = pair.got != pair.want
        found = _difference(pair.name, pair.want, pair.got, wrong, tolerance=0.0)
        if found.rounded_to or pair.named or not by_code or not wrong.all():
            return found
        text = f"the file has neither `{pair.name}` there nor what the model's code makes of it"
        return WeightDifference(module, text, by_code=True)
    for name, rounded in FORMATS.items():
        if pair.got.size > pair.want.size and np.isin(rounded(pair.want), pair.got).all():
            text = f"`{pair.name}` of the file is the model's, rounded to {name}"
            return WeightDifference(module, text, name)
    share = f"{pair.changed} of {pair.of} elements that it holds of it differ"
    return WeightDifference(module, f"`{pair.name}` of the file is another: {share}")


def _difference(
    name: str, parameter: Floats, got: Floats, wrong: NDArray[np.bool_], *, tolerance: float
) -> WeightDifference:
    module = name.rpartition(".")[0]
    rounded = _rounded_to(parameter, got, tolerance=tolerance)
    if rounded is not None:
        text = f"`{name}` of the file is the model's, rounded to {rounded}"
        return WeightDifference(module, text, rounded)
    share = f"{int(wrong.sum())} of {wrong.size} elements"
    largest = float(np.abs(got - parameter).max())
    return WeightDifference(
        module, f"`{name}` of the file is another: {share} differ, by {largest:.3g} at most"
    )


def _fits(array: Array, parameter: Floats) -> bool:
    return array.dtype.kind == "f" and parameter.shape in (array.shape, array.T.shape)


def _like(array: Array, parameter: Floats) -> Floats:
    """`array` in the orientation of the parameter: exporters transpose the weights of Linear."""
    numbers = array.astype(np.float64)
    if numbers.shape != parameter.shape:
        return numbers.T
    if numbers.T.shape != numbers.shape:
        return numbers
    finite = np.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0)
    straight, turned = np.abs(finite - parameter).sum(), np.abs(finite.T - parameter).sum()
    return numbers if straight <= turned else numbers.T


def _rounded_to(parameter: Floats, got: Floats, *, tolerance: float) -> str | None:
    for name, rounded in FORMATS.items():
        want = rounded(parameter).astype(np.float64)
        if np.abs(got - want).max() <= tolerance * np.abs(want).max() and (want != parameter).any():
            return name
    return None
