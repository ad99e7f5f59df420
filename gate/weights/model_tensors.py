"""The tensors of the model that constants of a file are compared with, and how they are found.

A tensor is found by the sum of its bits, which no transposition, reshape or flip changes. What is
found so is compared element by element afterwards; the sum alone proves nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Values = NDArray[Any]
"""float32, or int64 for integers and bools."""


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of the model, under all of its names if it is shared."""

    names: tuple[str, ...]
    load: Callable[[], Values]
    shape: tuple[int, ...]
    integer: bool = False
    parts: tuple[tuple[tuple[slice, ...], str], ...] = ()
    """Of what was packed: which region comes from which tensor of the model."""

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape without ones, sorted: the same for all transpositions."""
        return tuple(sorted(dim for dim in self.shape if dim != 1))

    @cached_property
    def values(self) -> Values:
        """float32 or int64; for parameters in float32 without a copy."""
        return self.load()

    @cached_property
    def bits(self) -> int:
        """`bit_sum` of the values."""
        return bit_sum(self.values)

    def owner(self, index: tuple[int, ...]) -> str:
        """The name of the tensor that the element comes from."""
        for region, name in self.parts:
            if all(_within(one, at) for one, at in zip(region, index, strict=False)):
                return name
        return self.name


class Pool:
    """Tensors by name, by number of elements and by their bits."""

    def __init__(self, stored: Iterable[Stored]) -> None:
        self.all = tuple(stored)
        self.by_name = {
            name: tensor for tensor in self.all for name in tensor.names if not tensor.parts
        }
        """What was packed has no name of its own."""
        self._by_size: defaultdict[tuple[bool, int], list[Stored]] = defaultdict(list)
        self._by_dims: defaultdict[tuple[bool, tuple[int, ...]], list[Stored]] = defaultdict(list)
        for tensor in self.all:
            self._by_size[tensor.integer, tensor.size].append(tensor)
            self._by_dims[tensor.integer, tensor.dims].append(tensor)

    def alike(self, values: Values) -> Iterator[Stored]:
        """Those with the same elements, in whatever order: equal sums of bits."""
        candidates = self._by_size.get((_integer(values), values.size), [])
        if candidates:
            bits = bit_sum(values)
            yield from (stored for stored in candidates if stored.bits == bits)

    def of_dims(self, values: Values) -> list[Stored]:
        """Those that have the shape of `values` up to transposition and axes of length one."""
        dims = tuple(sorted(dim for dim in values.shape if dim != 1))
        return self._by_dims.get((_integer(values), dims), [])


def stored_tensors(held: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Stored]:
    """The tensors of a model, shared ones once. Those without plain data are left out."""
    names: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    first: dict[tuple[Any, ...], torch.Tensor] = {}
    for name, tensor in held:
        if not is_plain(tensor) or not tensor.numel():
            continue
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        names[key].append(name)
        first.setdefault(key, tensor)
    for key, tensor in first.items():
        yield of_tensor(tuple(dict.fromkeys(names[key])), tensor)


def of_tensor(names: tuple[str, ...], tensor: torch.Tensor) -> Stored:
    """A tensor of PyTorch under these names."""

    def load() -> Values:
        kind = torch.float32 if tensor.is_floating_point() else torch.int64
        values: Values = tensor.detach().to("cpu", kind).contiguous().numpy()
        return values.reshape(tuple(tensor.shape))

    return Stored(names, load, tuple(tensor.shape), not tensor.is_floating_point())


def is_plain(tensor: torch.Tensor) -> bool:
    """True for tensors with data that NumPy could hold: not sparse, quantized, complex, meta."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_complex()
        and tensor.device.type != "meta"
    )


def canonical(values: NDArray[Any]) -> Values | None:
    """The values of a constant as those of `Stored`; None for types that can't be compared."""
    if values.dtype.kind in "iub":
        return values.astype(np.int64, copy=False)
    try:
        with np.errstate(all="ignore"):
            return values.astype(np.float32, copy=False)
    except (TypeError, ValueError):
        return None


def bit_sum(values: Values) -> int:
    """The sum of the elements' bits, modulo 2^64."""
    flat = np.ascontiguousarray(values).reshape(-1)
    words = flat.view(np.uint32 if flat.itemsize == 4 else np.uint64)
    return int(words.sum(dtype=np.uint64))


def _integer(values: Values) -> bool:
    return bool(values.dtype.kind in "iub")


def _within(region: slice, at: int) -> bool:
    return (region.start or 0) <= at and (region.stop is None or at < region.stop)
