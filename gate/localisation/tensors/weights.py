"""The weights of a layer in the file against the module's: exact, cheap, and often the cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

from gate.localisation.tensors.counterparts import Floats, Pair, counterparts
from gate.parity.graph.formats import FORMATS, leeway
from gate.parity.graph.packed import misplaced
from gate.parity.statistics.output import Array

_IN_16_BITS = leeway("float16")


@dataclass(frozen=True)
class WeightDifference:
    """A parameter or buffer of which the file has other values."""

    module: str
    """Path of the module that owns it."""
    text: str
    rounded_to: str | None = None
    """The format whose rounding explains all of the difference."""
    in_16_bits: bool = False
    """True if what float16 and TF32 keep of the numbers may be all of the difference."""
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


def _named(path: str, tensors: Iterable[tuple[str, Floats]]) -> dict[str, Floats]:
    return {f"{path}.{name}" if path else name: tensor for name, tensor in tensors}


def _tensors(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, Floats]]:
    named = (module.named_parameters(recurse=recurse), module.named_buffers(recurse=recurse))
    for name, tensor in (pair for pairs in named for pair in pairs):
        numbers = numbers_of(tensor)
        if numbers is not None and numbers.size:
            yield name, numbers


def _attributes(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, Floats]]:
    """What code keeps as `self.table = …`, without registering it: exporters store it too."""
    for name, tensor in plain_attributes(module, recurse=recurse):
        numbers = numbers_of(tensor)
        if numbers is not None and numbers.size:
            yield name, numbers


def plain_attributes(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are neither parameters nor buffers, by their names in the module."""
    for path, part in module.named_modules() if recurse else [("", module)]:
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


def numbers_of(tensor: object) -> Floats | None:
    """A tensor of floats in float64; None of anything else."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        return None
    numbers: Floats = tensor.detach().to(torch.float64).numpy()
    return numbers


def _difference_of(pair: Pair, *, by_code: bool) -> WeightDifference:
    """`by_code`: code reads it, which may compute something of it that an exporter stores."""
    module = pair.name.rpartition(".")[0]
    if pair.got.shape == pair.want.shape:
        wrong = pair.got != pair.want
        found = difference(pair.name, pair.want, pair.got, wrong, tolerance=0.0)
        if found.rounded_to or pair.named or not by_code or not wrong.all():
            return found
        text = f"the file has neither `{pair.name}` there nor what the model's code makes of it"
        return replace(found, text=text, by_code=True)
    for name, rounded in FORMATS.items():
        if pair.got.size > pair.want.size and np.isin(rounded(pair.want), pair.got).all():
            text = f"`{pair.name}` of the file is the model's, rounded to {name}"
            return WeightDifference(module, text, name, in_16_bits=name != "bfloat16")
    share = f"{pair.changed} of {pair.of} elements that it holds of it differ"
    return WeightDifference(module, f"`{pair.name}` of the file is another: {share}")


def difference(
    name: str, parameter: Floats, got: Floats, wrong: NDArray[np.bool_], *, tolerance: float
) -> WeightDifference:
    """Of a parameter and what the file has of it, which differ where `wrong` says so. `tolerance`:
    relative, of the largest element, within which a number is still a rounded one."""
    module, apart = name.rpartition(".")[0], np.abs(got - parameter)
    kept = _IN_16_BITS.relative * np.abs(parameter) + _IN_16_BITS.absolute
    in_16_bits = bool((apart <= kept).all())
    rounded = _rounded_to(parameter, got, tolerance=tolerance)
    if rounded is not None:
        text = f"`{name}` of the file is the model's, rounded to {rounded}"
        return WeightDifference(module, text, rounded, in_16_bits)
    share = f"{int(wrong.sum())} of {wrong.size} elements"
    text = f"`{name}` of the file is another: {share} differ, by {float(apart.max()):.3g} at most"
    return WeightDifference(module, text, in_16_bits=in_16_bits)


def fits(array: Array, parameter: Floats) -> bool:
    """True if it may be the parameter, as it is or transposed."""
    return array.dtype.kind == "f" and parameter.shape in (array.shape, array.T.shape)


def like(array: Array, parameter: Floats) -> Floats:
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
