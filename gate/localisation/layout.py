"""The tensors of the file as one run computed them, which value each is, and where the file is
cut."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gate.localisation.names import ModuleScope
from gate.localisation.values import ComputedValue
from gate.parity.statistics.output import Array


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the file, as one run computed it."""

    name: str
    place: int
    """Of its node."""
    op: str
    scope: ModuleScope | None
    shape: tuple[int, ...]
    sketch: Array


@dataclass(frozen=True)
class Matching:
    """Tensors by the numbers of values, in the order of the values."""

    tensors: Mapping[int, Tensor] = field(default_factory=dict)
    equal: frozenset[int] = frozenset()
    """The values that their tensor equals."""

    @property
    def names(self) -> dict[int, str]:
        """Names of the tensors."""
        return {number: tensor.name for number, tensor in self.tensors.items()}

    def sure(self) -> Matching:
        """Only what equals its value."""
        kept = {n: tensor for n, tensor in self.tensors.items() if n in self.equal}
        return Matching(kept, self.equal)


@dataclass(frozen=True)
class Layout:
    """Which tensor of the file is which value of the model."""

    matching: Matching = field(default_factory=Matching)
    missing: Mapping[int, str] = field(default_factory=dict)
    """Values that no node computes, to the tensor that is read in their place."""

    absent: frozenset[int] = frozenset()
    """Values that the file does not have, and nothing in it reads."""

    @property
    def names(self) -> dict[int, str]:
        """Names of tensors by the numbers of values, in the order of the values."""
        return dict(sorted({**self.missing, **self.matching.names}.items()))

    @property
    def cuts(self) -> dict[str, np.dtype[np.generic]]:
        """The tensors at which the file is cut, with their dtypes."""
        return {tensor.name: tensor.sketch.dtype for tensor in self.matching.tensors.values()}

    def only(self, numbers: Container[int]) -> Layout:
        """What is known of these values."""
        kept = {n: tensor for n, tensor in self.matching.tensors.items() if n in numbers}
        return Layout(Matching(kept))

    @property
    def put_in(self) -> dict[str, int]:
        """Which value goes in at each cut: the last one that the tensor stands for."""
        return {name: number for number, name in self.names.items()}

    def references(self, cuts: Iterable[str], values: Mapping[int, Array]) -> dict[str, Array]:
        """What goes in at these cuts, in the file's dtypes."""
        numbers, dtypes = self.put_in, self.cuts
        return {cut: values[numbers[cut]].astype(dtypes[cut], copy=False) for cut in cuts}


class FreeTensors:
    """The tensors that no value has taken yet, and by which value the others are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.taken: dict[int, Tensor] = {}
        self.names: set[str] = set()
        """Of the tensors that are taken."""
        self._by_name = {tensor.name: tensor for tensor in tensors}

    def like(self, value: ComputedValue, *, any_size: bool = False) -> list[Tensor]:
        """Of the value's kind of number and shape, or at least as many axes."""
        kind, axes = value.sketch.dtype.kind, len(value.shape)
        return [
            tensor
            for tensor in self._by_name.values()
            if (tensor.shape == value.shape or (any_size and len(tensor.shape) == axes))
            and tensor.sketch.dtype.kind == kind
        ]

    def named(self, name: str) -> Tensor | None:
        """The tensor of this name, if it is free."""
        return self._by_name.get(name)

    def take(self, number: int, tensor: Tensor | None) -> None:
        """Give the tensor to the value."""
        if tensor is not None:
            self.taken[number] = tensor
            self.names.add(tensor.name)
            self._by_name.pop(tensor.name, None)

    def neighbours(self, value: ComputedValue) -> tuple[int, float]:
        """Places of the tensors of the values before and behind."""
        before = [t.place for number, t in self.taken.items() if number < value.number]
        behind = [t.place for number, t in self.taken.items() if number > value.number]
        return max(before, default=-1), min(behind, default=math.inf)


def difference(value: Array, tensor: Array) -> float:
    """rms(tensor - value) / rms(value) over the elements that are finite in both.

    0 where all of these are equal, also if there are none; infinite where other elements are finite
    in one than in the other, or are other infinities.
    """
    r, c = value.astype(np.float64), tensor.astype(np.float64)
    finite = np.isfinite(r) & np.isfinite(c)
    if not np.array_equal(r[~finite], c[~finite], equal_nan=True):
        return math.inf
    scale = float(np.linalg.norm(r[finite]))
    apart = float(np.linalg.norm(c[finite] - r[finite]))
    if apart == 0.0:
        return 0.0
    return apart / scale if scale > 0.0 else math.inf
