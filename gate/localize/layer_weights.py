"""Compare the weights of one layer in the file and the model, including folded weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

from gate.localize.file_graph import DequantizedConstant
from gate.localize.model_runner import ValueSurvey
from gate.onnx_file.reading import attributes
from gate.statistics.accumulators import distances
from gate.storage.arrays import OutputArray
from gate.weights.layouts import differing_parts, misplaced
from gate.weights.model_tensors import FORMATS, are_converted_masks, format_tolerance, norms

Floats = NDArray[np.float64]

Detail = dict[str, Any]
"""An item of `params["details"]`: a code of `gate.decision.faults` with its parameters."""

_MIN_EQUAL = 0.5
"""Share of equal elements from which a constant counts as a modified tensor of the model."""

_MAX_DISTANCE = 0.5
"""Largest relative L1 difference at which an unnamed constant counts as a modified tensor."""

_MAX_ROUNDING = 2.0**-20
"""Largest error of a precomputed constant, relative to the largest element."""

_LISTED_ROWS = 8
"""Number of rows that a message lists, from the first moved one."""

_MIN_DISTINCT = 4
"""Least number of distinct values by which a tensor can be identified."""


@dataclass(frozen=True)
class Pair:
    """A tensor of the model and the corresponding constant of the file."""

    name: str
    want: Floats
    got: Floats
    """The constant in the shape of `want`; unchanged if elements were selected or packed."""
    changed: int
    """Number of elements that differ in the file."""
    total: int
    named: bool = False
    """True if the constant has the tensor's name."""


@dataclass
class Counterparts:
    """The pairs of tensors and constants, by tensor name."""

    differing: list[Pair] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    unpaired: list[str] = field(default_factory=list)
    """Tensors without a corresponding constant."""


def counterparts(
    tensors: Mapping[str, Floats],
    stored: Mapping[str, OutputArray],
    *,
    excluded: Container[str] = (),
    loose: Container[str] = (),
    reordered: bool = False,
    folded: bool = False,
) -> Counterparts:
    """Pair `tensors` with the constants `stored` in the file.

    They are paired by name, by equal values in any order or shape, and otherwise by similarity.
    Exporters reshape, transpose, gather, slice and pack (LSTM, GRU) tensors, but keep most values.

    excluded: names of the model's tensors outside of `tensors`. loose: names among `tensors` that
    may belong to other layers. They need evidence; for the rest an equal shape is enough, unless
    they are scalars.
    reordered: whether the operators require another order of rows, as LSTM and GRU do for gates.
    folded: whether a constant may be computed from several tensors. Then only a name or equal
    elements identify the tensor.
    """
    constants = {
        name: array.astype(np.float64)
        for name, array in stored.items()
        if array.dtype.kind == "f" and array.size and name not in excluded
    }
    result = Counterparts()
    left = _pair_equal(tensors, constants, result, loose)
    if reordered:
        left = _pair_by_values(left, constants, result, reordered=True)
    partial = {key: got for key, got in constants.items() if _is_cut(key, got, tensors)}
    complete = {key: got for key, got in constants.items() if key not in partial}
    left = _pair_by_shape(left, complete, result, loose, near=0.0 if folded else _MAX_DISTANCE)
    constants = {**complete, **partial}
    left = _pair_by_values(left, constants, result, reordered=reordered)
    result.unpaired.extend(left)
    return result


def _pair_equal(
    tensors: Mapping[str, Floats],
    constants: dict[str, Floats],
    result: Counterparts,
    loose: Container[str],
) -> dict[str, Floats]:
    """Pair tensors with equal constants, including several equal tensors.

    A loose tensor may have been computed again and then differs by rounding.
    """
    left, used = {}, set()
    for name, want in tensors.items():
        allowed = _MAX_ROUNDING if name in loose else 0.0
        same = [key for key, got in constants.items() if _is_same(want, got, allowed)]
        if not same or (name in constants and name not in same):
            left[name] = want
            continue
        result.same.append(name)
        used.update(same)
    for key in used:
        del constants[key]
    return left


def _is_same(want: Floats, got: Floats, allowed: float) -> bool:
    if want.size != got.size:
        return False
    bound = allowed * float(np.abs(want).max(initial=0.0, where=np.isfinite(want)))
    return any(bool((distances(a.ravel(), got.ravel()) <= bound).all()) for a in (want, want.T))


def _pair_by_shape(
    tensors: Mapping[str, Floats],
    constants: dict[str, Floats],
    result: Counterparts,
    loose: Container[str],
    *,
    near: float,
) -> dict[str, Floats]:
    """Pair tensors and constants of equal shape: first by name, then the most similar ones."""
    pairs = sorted(
        (name != key, _relative_difference(want, got), name, key)
        for name, want in tensors.items()
        for key, got in constants.items()
        if _fits(want, got)
    )
    left = dict(tensors)
    for is_unnamed, relative, name, key in pairs:
        if name not in left or key not in constants:
            continue
        got = _orient(constants[key], left[name])
        wrong = int((got != left[name]).sum())
        evident = wrong <= _MIN_EQUAL * got.size or (relative <= near and _is_distinctive(got))
        # A node reads many scalars: one that is far off may be any of them.
        needs_evidence = name in loose or (got.size == 1 and relative > _MAX_DISTANCE)
        if is_unnamed and needs_evidence and not evident:
            continue
        result.differing.append(Pair(name, left.pop(name), got, wrong, got.size, not is_unnamed))
        del constants[key]
    return left


def _is_cut(key: str, got: Floats, tensors: Mapping[str, Floats]) -> bool:
    """Return whether an unnamed constant is a part of a larger tensor, and not a tensor of its
    shape."""
    larger = (want for want in tensors.values() if want.size > got.size)
    return (
        key not in tensors and _is_distinctive(got) and any(np.isin(got, w).all() for w in larger)
    )


def _pair_by_values(
    tensors: Mapping[str, Floats],
    constants: Mapping[str, Floats],
    result: Counterparts,
    *,
    reordered: bool,
) -> dict[str, Floats]:
    """Pair tensors with constants that contain most of their values, or are contained in them."""
    left = {}
    for name, want in tensors.items():
        containing = _matches_by_values(want, constants.values(), reordered=reordered)
        best = min(containing, default=None, key=lambda pair: pair[0] / pair[1])
        if best is None or best[0] > _MIN_EQUAL * best[1]:
            left[name] = want
        elif best[0] == 0:
            result.same.append(name)
        else:
            result.differing.append(Pair(name, want, best[2].ravel(), best[0], best[1]))
    return left


def _matches_by_values(
    want: Floats, constants: Iterable[Floats], *, reordered: bool
) -> Iterator[tuple[int, int, Floats]]:
    """Yield for each constant the number of missing elements, the number of elements, and the
    constant.

    A constant of equal size counts only if its rows may be reordered.
    """
    if not _is_distinctive(want):
        return
    for got in constants:
        small, large = (want, got) if want.size < got.size else (got, want)
        if _is_distinctive(small) and (reordered or want.size != got.size):
            yield int((~np.isin(small, large)).sum()), small.size, got


def _is_distinctive(array: Floats) -> bool:
    return len(np.unique(array)) >= _MIN_DISTINCT


def _fits(want: Floats, got: Floats) -> bool:
    expected_shape, stored_shape = _squeeze(want), _squeeze(got)
    return expected_shape in (stored_shape, stored_shape[::-1])


def _squeeze(array: Floats) -> tuple[int, ...]:
    """Return the shape without axes of size one, which exporters add and remove."""
    return tuple(size for size in array.shape if size != 1)


def _orient(got: Floats, want: Floats) -> Floats:
    """Return the constant in the tensor's shape; if square, in the more similar orientation."""
    turned = got.T.reshape(want.shape) if _squeeze(got)[::-1] == _squeeze(want) else None
    if _squeeze(got) != _squeeze(want):
        assert turned is not None
        return turned
    straight = got.reshape(want.shape)
    if turned is None or _l1_difference(straight, want) <= _l1_difference(turned, want):
        return straight
    return turned


def _relative_difference(want: Floats, got: Floats) -> float:
    """Return the relative difference in the more similar orientation; infinite for NaN."""
    l1 = _l1_difference(_orient(got, want), want)
    size = float(np.abs(want).sum())
    return l1 / size if size > 0.0 and math.isfinite(l1) else math.inf


def _l1_difference(first: Floats, second: Floats) -> float:
    finite = np.nan_to_num(first, nan=0.0, posinf=0.0, neginf=0.0)
    return float(np.abs(finite - second).sum())


_IN_16_BITS = format_tolerance("float16")


@dataclass(frozen=True)
class WeightDifference:
    """A parameter or buffer whose values differ in the file."""

    module: str
    """Path of the module that owns it."""
    detail: Detail
    rounded_to: str | None = None
    """The format whose rounding explains the whole difference."""
    in_16_bits: bool = False
    """True if rounding to float16 or TF32 may explain the whole difference."""
    reordered: int = 0
    """Number of axes of the tensor if only its rows or columns are reordered; else 0."""
    by_code: bool = False
    """True if the model's code may cause it; another checkpoint alone does not explain it."""
    tensor: str = ""
    """Name of the tensor if its counterpart in the file is certain."""


@dataclass(frozen=True)
class WeightComparison:
    """The comparison of a layer's constants with the model's tensors."""

    differences: tuple[WeightDifference, ...]
    same: tuple[str, ...] = ()
    """Tensors that are equal in the file."""
    unpaired: tuple[str, ...] = ()
    """Tensors without a counterpart in the file."""


def comparison(  # noqa: PLR0913
    module: nn.Module,
    path: str,
    constants: Mapping[str, OutputArray],
    *,
    loose: Mapping[str, Floats] | None = None,
    model_tensors: Mapping[str, torch.Tensor] | None = None,
    reordered: bool = False,
    folded: bool = False,
    computed: Callable[[], Iterable[Floats]] = tuple,
) -> WeightComparison:
    """Compare the parameters and buffers of `module` with constants that its nodes read.

    Tensors without a counterpart are listed and prove nothing.

    constants: of the file, by name. loose: tensors of the model that code may use anywhere. With
    them, the module's children are skipped. model_tensors: all tensors of the model by name.
    reordered, folded: see `counterparts`. computed: returns what forward computes from the model's
    tensors alone. A constant without a name that is equal to it is right. Plain attributes are
    compared like loose tensors, because they may be left from an earlier call.
    """
    recurse = loose is None
    registered = _floats(path, registered_tensors(module, recurse=recurse))
    plain = _floats(path, plain_attributes(module, recurse=recurse))
    tensors = {**(loose or {}), **plain, **registered}
    other_layers = {n: t for n, t in (model_tensors or {}).items() if n not in tensors}
    pairs = counterparts(
        tensors,
        constants,
        excluded=other_layers,
        loose=set(tensors) - (set() if folded else set(registered)),
        reordered=reordered,
        folded=folded,
    )
    differing = [
        pair
        for pair in pairs.differing
        if pair.named or not any(_is_same(want, pair.got, _MAX_ROUNDING) for want in computed())
    ]
    unpaired = [name for name in pairs.unpaired if name in registered]
    read = {pair.name: [pair.got] for pair in differing}
    for name in [] if folded else unpaired:
        alike = [key for key in constants if key in other_layers and _leaf(key) == _leaf(name)]
        read[name] = [constants[key].astype(np.float64) for key in alike]
    exchanged = {
        name: WeightDifference(
            path, {"code": "reads_instead", "setting": other, "want": name}, tensor=name
        )
        for name, arrays in read.items()
        if (other := _equal_tensor(tensors[name], arrays, other_layers)) is not None
    }
    return WeightComparison(
        (
            *exchanged.values(),
            *(
                _difference_of(pair, by_code=loose is not None or pair.name in plain)
                for pair in differing
                if pair.name not in exchanged
            ),
        ),
        tuple(name for name in pairs.same if name in registered or name in plain),
        tuple(name for name in unpaired if name not in exchanged),
    )


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _equal_tensor(
    want: Floats, arrays: Iterable[Floats], others: Mapping[str, torch.Tensor]
) -> str | None:
    """Return the name of another tensor of the model that one of the arrays equals, in the place of
    `want`."""
    for array in arrays:
        if fits(array, want) and _is_distinctive(array) and not _is_same(want, array, 0.0):
            for name, tensor in others.items():
                numbers = to_float64(tensor) if tensor.numel() == array.size else None
                if numbers is not None and _is_same(numbers, array, 0.0):
                    return name
    return None


def tensors_of(module: nn.Module, path: str) -> dict[str, Floats]:
    """Return the module's own float parameters, buffers and plain attributes by full name."""
    tensors = (plain_attributes(module, recurse=False), registered_tensors(module, recurse=False))
    return _floats(path, chain.from_iterable(tensors))


def transposed_weight(
    module: nn.Module,
    path: str,
    nodes: Iterable[onnx.NodeProto],
    constants: Mapping[str, OutputArray],
) -> WeightDifference | None:
    """Return the square weight of a Linear if a product reads it in the wrong orientation.

    `comparison` accepts both orientations, because exporters transpose weights of Linear.
    """
    if not isinstance(module, nn.Linear):
        return None
    weight = module.weight.detach().numpy()
    for node in nodes:
        array = constants.get(node.input[1]) if node.op_type in ("Gemm", "MatMul") else None
        if array is None or array.shape != weight.shape:
            continue
        want = weight if attributes(node).get("transB") else weight.T
        if np.array_equal(array, want.T) and not np.array_equal(array, want):
            name = f"{path}.weight" if path else "weight"
            return WeightDifference(path, {"code": "transposed", "name": name})
    return None


def with_recurrent_differences(
    differences: Iterable[WeightDifference],
    module: nn.Module,
    path: str,
    constants: Mapping[str, OutputArray],
) -> list[WeightDifference]:
    """Return the differences, with those of a recurrent module: misplaced tensors, such as LSTM
    directions or gates, and different ones.

    `comparison` accepts every order, because exporters split, transpose and concatenate these
    tensors; so it can't say how a different one differs.
    """
    recurrent = [
        WeightDifference(path, {"code": code, "names": names}, tensor=names[0])
        for code, names in misplaced(module, constants.values()).items()
    ]
    for name, want, got in differing_parts(module, constants.values()):
        full_name, wrong = f"{path}.{name}" if path else name, want != got
        numbers = (want.astype(np.float64), got.astype(np.float64))
        by_value = difference(full_name, *numbers, wrong, tolerance=0.0)
        recurrent.append(replace(by_value, tensor=full_name))
    replaced = {each.detail.get("name") for each in recurrent} - {None}
    return [*(each for each in differences if each.detail.get("name") not in replaced), *recurrent]


def _floats(path: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Floats]:
    """Return the float tensors that have elements, in float64, by full name."""
    floats: dict[str, Floats] = {}
    for name, tensor in tensors:
        numbers = to_float64(tensor)
        if numbers is not None and numbers.size:
            floats[f"{path}.{name}" if path else name] = numbers
    return floats


def registered_tensors(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers, by their names in the module."""
    yield from module.named_parameters(recurse=recurse)
    yield from module.named_buffers(recurse=recurse)


def plain_attributes(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that code keeps as plain attributes (`self.table = ...`), by their names in the
    module. They are not registered as parameters or buffers, but exporters store them too."""
    for path, part in module.named_modules() if recurse else [("", module)]:
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


def to_float64(tensor: object) -> Floats | None:
    """Return a float tensor in float64; None for anything else."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        return None
    numbers: Floats = tensor.detach().to(torch.float64).numpy()
    return numbers


def _difference_of(pair: Pair, *, by_code: bool) -> WeightDifference:
    """Return the difference of a pair. `by_code`: whether code may modify the tensor before
    export."""
    module = pair.name.rpartition(".")[0]
    if pair.got.shape == pair.want.shape:
        wrong = distances(pair.want, pair.got) > 0.0
        for kind, axis in (("rows", 0), ("columns", 1))[: pair.want.ndim]:
            order = _describe_order(np.moveaxis(pair.want, axis, 0), np.moveaxis(pair.got, axis, 0))
            if order is not None:
                detail = {"code": "reordered", "name": pair.name, "axis": kind, "order": order}
                return WeightDifference(module, detail, reordered=pair.want.ndim)
        weight_difference = difference(pair.name, pair.want, pair.got, wrong, tolerance=0.0)
        if weight_difference.rounded_to or pair.named or not by_code or not wrong.all():
            certain = pair.named or 2 * int(wrong.sum()) <= wrong.size
            return replace(weight_difference, tensor=pair.name if certain else "")
        detail = {"code": "not_computed", "name": pair.name}
        return replace(weight_difference, detail=detail, by_code=True)
    for name, rounded in FORMATS.items():
        if pair.got.size > pair.want.size and np.isin(rounded(pair.want), pair.got).all():
            detail = {"code": "rounded", "name": pair.name, "format": name}
            return WeightDifference(module, detail, name, in_16_bits=name != "bfloat16")
    share = {"changed": pair.changed, "total": pair.total}
    return WeightDifference(module, {"code": "differs_in", "name": pair.name, **share})


def _describe_order(want: Floats, got: Floats) -> str | None:
    """Describe how the parts of `want` along the first axis are reordered in `got`.

    None if they are not only reordered, or if parts repeat.
    """
    positions = {(part + 0.0).tobytes(): index for index, part in enumerate(want)}
    order = [positions.get((part + 0.0).tobytes(), -1) for part in got]
    if len(positions) < len(want) or sorted(order) != list(range(len(want))):
        return None
    first = next((index for index, position in enumerate(order) if index != position), None)
    if first is None:
        return None
    shown = ", ".join(map(str, order[first : first + _LISTED_ROWS]))
    before, more = "…, " if first else "", ", …" if len(order) > first + _LISTED_ROWS else ""
    return f"{before}{shown}{more}"


def is_rounded_to_16_bits(parameter: Floats, got: Floats) -> bool:
    """Return whether a conversion to float16 or TF32 may explain every difference."""
    kept = _IN_16_BITS.relative * np.abs(parameter) + _IN_16_BITS.absolute
    is_near = distances(parameter, got) <= kept
    return bool((is_near | are_converted_masks(parameter, got)).all())


def difference(
    name: str, parameter: Floats, got: Floats, wrong: NDArray[np.bool_], *, tolerance: float
) -> WeightDifference:
    """Return the difference between a parameter and the file's constant for it.

    `wrong` marks the elements that differ. `tolerance` is relative to the largest element: within
    it, a number still counts as a rounded one.
    """
    module, distance = name.rpartition(".")[0], distances(parameter, got)
    in_16_bits = is_rounded_to_16_bits(parameter, got)
    rounded = _rounded_to(parameter, got, tolerance=tolerance)
    if rounded is not None:
        as_format: Detail = {"code": "rounded", "name": name, "format": rounded}
        return WeightDifference(module, as_format, rounded, in_16_bits)
    detail: Detail = {"name": name, "changed": int(wrong.sum()), "total": wrong.size}
    largest = float(distance.max())
    if math.isfinite(largest):
        detail = {**detail, "code": "differs", "largest": largest}
    else:  # NaN or infinite on one side
        detail = {**detail, "code": "differs_in"}
    return WeightDifference(module, detail, in_16_bits=in_16_bits)


def rounded_to_steps(tensor: Floats, stored: DequantizedConstant) -> Floats | None:
    """Return the tensor in the constant's orientation if quantization explains every difference.

    A clipped integer may represent any larger magnitude.
    """
    for oriented in (tensor, tensor.T):
        if oriented.shape == stored.values.shape:
            error = np.subtract(oriented, stored.values, dtype=np.float64)
            beyond = stored.clipped & (np.sign(error) == np.sign(stored.values))
            if (beyond | (np.abs(error) <= np.multiply(1.001, stored.step))).all():
                return oriented
    return None


def fits(array: OutputArray, parameter: Floats) -> bool:
    """Return True if the shape is that of the parameter, possibly transposed."""
    return array.dtype.kind == "f" and parameter.shape in (array.shape, array.T.shape)


def like(array: OutputArray, parameter: Floats) -> Floats:
    """Return `array` in the orientation of the parameter; exporters transpose weights of Linear."""
    numbers = array.astype(np.float64)
    if numbers.shape != parameter.shape:
        return numbers.T
    if numbers.T.shape != numbers.shape:
        return numbers
    finite = np.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0)
    as_stored, transposed = np.abs(finite - parameter).sum(), np.abs(finite.T - parameter).sum()
    return numbers if as_stored <= transposed else numbers.T


def _rounded_to(parameter: Floats, got: Floats, *, tolerance: float) -> str | None:
    for name, rounded in FORMATS.items():
        want = rounded(parameter).astype(np.float64)
        if np.abs(got - want).max() <= tolerance * np.abs(want).max() and (want != parameter).any():
            return name
    return None


_FOLD_ERROR = 1e-5
"""Largest relative difference caused by folding in float32."""

_OFFSET_FACTOR = 10.0
"""Allowed multiple of that difference for an offset, relative to the largest one."""

_ROUNDOFF_UNITS = 4.5
"""Largest error of folding in 16 bits, in units of their roundoff. Half a unit each for a weight:
itself, gamma, root, quotient, product; a quarter each for the variance and its sum with epsilon,
because the root halves them. For an offset, half a unit per term: bias, mean, their difference,
beta and the sum."""


def folded_differences(
    modules: tuple[nn.Module, nn.Module],
    paths: tuple[str, str],
    constants: Mapping[str, OutputArray],
    *,
    format_: str | None = None,
) -> list[WeightDifference]:
    """Return the differences between the file and a layer with a BatchNorm folded into it.

    They show which of the two modules differs. A folded weight is the weight of the layer, each
    output channel scaled by gamma / sqrt(var + eps).

    `format_`: the format in which the file may store and compute it
    (`gate.weights.model_tensors.format_tolerance`); None: float32.
    """
    layer, relative = modules[0], _ROUNDOFF_UNITS * format_tolerance(format_).relative
    norm = next(norms(modules[1]), None)
    weight, bias = (to_float64(getattr(layer, name, None)) for name in ("weight", "bias"))
    arrays = list(constants.values())
    fitting = [] if weight is None else [like(a, weight) for a in arrays if fits(a, weight)]
    if weight is None or norm is None or not fitting or getattr(layer, "transposed", False):
        return []
    tolerance, scale = _FOLD_ERROR + relative, norm.scale
    rows, channels = fitting[0].reshape(len(weight), -1), weight.reshape(len(weight), -1)
    factor = _factor(rows, channels, scale)
    largest = np.abs(rows).max(1, where=np.isfinite(rows), initial=0.0)
    wrong = ~(np.abs(rows - factor[:, None] * channels) <= tolerance * largest[:, None])
    scaled = ~np.isclose(factor, scale, rtol=tolerance, atol=0.0)
    offset = 0.0 if bias is None else bias
    offsets = [a.astype(np.float64) for a in arrays if a.shape == scale.shape]
    want, size = norm.offset(np.zeros(1)) + scale * offset, norm.size + np.abs(scale * offset)
    same_offset = not offsets or _any_close(offsets, want, relative * size)
    if not wrong.any() and scaled.any() and not same_offset:
        # Had only the layer's weight changed, the offset would have stayed.
        return [_scale_difference(modules[1], paths[1], factor, tolerance=tolerance)]
    wrong |= scaled[:, None]
    rounded = _folded_rounding(rows, scale[:, None] * channels) if wrong.any() else None
    if rounded is not None:
        name = f"{paths[0]}.weight"
        detail = {"code": "rounded_folded", "name": name, "format": rounded}
        return [WeightDifference(paths[0], detail, rounded)]
    if wrong.any():
        unscaled = rows / np.where(scale == 0.0, 1.0, scale)[:, None]
        return [difference(f"{paths[0]}.weight", channels, unscaled, wrong, tolerance=_FOLD_ERROR)]
    if not same_offset:
        return [WeightDifference(paths[1], {"code": "folded_offset", "norm": paths[1]})]
    return []


def affine_differences(
    module: nn.Module,
    path: str,
    constants: Mapping[str, OutputArray],
    *,
    format_: str | None = None,
) -> list[WeightDifference]:
    """Return `folded_differences` of a norm that the file stores as a factor and an offset."""
    norm = next(norms(module), None)
    if norm is None or norm.path or not hasattr(module, "eps"):
        return []
    vectors = [
        like(array.reshape(-1), norm.scale)
        for array in constants.values()
        if array.dtype.kind == "f" and array.size == norm.scale.size
    ]
    affine = [to_float64(module.weight), to_float64(module.bias)]
    if len(vectors) != 2 or all(
        any(a is not None and np.array_equal(array, a) for a in affine) for array in vectors
    ):  # as BatchNormalization has them, or not at all
        return []
    relative = _ROUNDOFF_UNITS * format_tolerance(format_).relative
    if not _any_close(vectors, norm.scale, relative * np.abs(norm.scale)):
        lost = "scale"
    elif not _any_close(vectors, norm.offset(np.zeros(1)), relative * norm.size):
        lost = "offset"
    else:
        return []
    return [WeightDifference(path, {"code": lost, "norm": path})]


def _folded_rounding(rows: Floats, want: Floats) -> str | None:
    """Return the format to which the products were rounded.

    Folding in float32 may round up a product whose exact value is rounded down.
    """
    for name, rounded in FORMATS.items():
        below, above = rounded(want * (1 - _FOLD_ERROR)), rounded(want * (1 + _FOLD_ERROR))
        if ((rows == below) | (rows == above)).all():
            return name
    return None


def _factor(rows: Floats, channels: Floats, scale: Floats) -> Floats:
    """Return the factor by which each channel was scaled.

    It is the median over the channel's weights, so that single wrong weights do not change it.
    """
    with np.errstate(all="ignore"):
        ratios = np.where(channels == 0.0, np.nan, rows / channels)
    has_ratio = np.atleast_1d(np.isfinite(ratios).any(axis=1))
    factor: Floats = np.nanmedian(np.where(has_ratio[:, None], ratios, 1.0), axis=1)
    return np.where(has_ratio, factor, scale)


def _scale_difference(
    norm: nn.Module, path: str, scale: Floats, *, tolerance: float
) -> WeightDifference:
    epsilon = _epsilon(norm, scale, tolerance=tolerance)
    if epsilon is not None:
        detail = {"code": "folded_eps", "norm": path, "epsilon": epsilon, "want": norm.eps}
        return WeightDifference(path, detail, by_code=True)
    return WeightDifference(path, {"code": "folded_scale", "norm": path})


def _epsilon(norm: nn.Module, scale: Floats, *, tolerance: float) -> float | None:
    """Return the eps that explains the scale of every channel of a BatchNorm; None if there is
    none."""
    variance, gamma = to_float64(norm.running_var), to_float64(norm.weight)
    assert variance is not None
    with np.errstate(all="ignore"):
        epsilons = ((1.0 if gamma is None else gamma) / scale) ** 2 - variance
        epsilon = float(np.median(epsilons[np.isfinite(epsilons)])) if len(epsilons) > 1 else np.nan
        if not epsilon > 0.0:
            return None
        scale_with_epsilon = (1.0 if gamma is None else gamma) / np.sqrt(variance + epsilon)
    return epsilon if np.allclose(scale_with_epsilon, scale, rtol=tolerance, atol=0.0) else None


def _any_close(offsets: list[Floats], want: Floats, kept: Floats) -> bool:
    """Return True if an offset equals the expected one up to float32 folding and `kept`."""
    allowed = kept + _OFFSET_FACTOR * _FOLD_ERROR * max(float(np.abs(want).max()), 1e-30)
    return any(bool((np.abs(offset - want) <= allowed).all()) for offset in offsets)


def loose_tensors(
    model: nn.Module, survey: ValueSurvey, constant: Container[int]
) -> dict[str, Floats]:
    """Return the parameters, buffers and attributes that belong to no particular layer.

    They are of modules that were not called, or that only return values in `constant` (indices of
    values that are equal for all samples), which an exporter may precompute.
    """
    values: dict[str, list[int]] = {}
    for value in survey.values:
        if not value.functional:
            values.setdefault(value.path, []).append(value.number)
    tensors: dict[str, Floats] = {}
    for path, module in model.named_modules():
        called = values.get(path, [])
        if path not in survey.paths or (called and all(number in constant for number in called)):
            tensors.update(tensors_of(module, path))
    return {**tensors, **_returned_constants(survey, constant)}


def tensors_around(model: nn.Module, path: str) -> dict[str, Floats]:
    """Return the tensors of all modules that contain the one at `path`; masks are passed down."""
    tensors: dict[str, Floats] = {}
    while path:
        path = path.rpartition(".")[0]
        tensors.update(tensors_of(model.get_submodule(path), path))
    return tensors


def _returned_constants(survey: ValueSurvey, constant: Container[int]) -> dict[str, Floats]:
    """Return the constant values whose sketches are complete, named after the module that returned
    them."""
    constants: dict[str, Floats] = {}
    counts: Counter[str] = Counter()
    for value in survey.values:
        is_complete = value.sketch.size == math.prod(value.shape)
        if value.number in constant and is_complete and value.sketch.dtype.kind == "f":
            name = f"{value.path}.forward()" if value.path else "forward()"
            suffix = f"[{counts[name]}]" if counts[name] else ""
            counts[name] += 1
            constants[f"{name}{suffix}"] = value.sketch.reshape(value.shape).astype(np.float64)
    return constants


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's parameters, buffers and attributes by each of their names."""
    named = (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
        plain_attributes(model, recurse=True),
    )
    return dict(chain.from_iterable(named))
