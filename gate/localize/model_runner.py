"""The values that a forward of the model passes from module to module, in their order.

A value is one tensor at one time: what an in-place operation leaves behind is another value. A
sketch has a few of its elements, always the same ones for the same number of elements.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gate.parity.statistics.output import Array

if TYPE_CHECKING:  # whoever compares arrays only imports no torch
    import torch

    from gate.localisation.tape import Moment

ELEMENTS = 8192
"""Enough to see one channel of hundreds, few enough that hundreds of layers cost nothing."""


@dataclass(frozen=True)
class ComputedValue:
    """What one call of a module, or code between two calls, computed on the first batch."""

    number: int
    path: str
    """Of the module whose forward computed it; empty for the model itself."""
    kind: str
    """Class name of that module; of functional values empty."""
    call: int
    before: str | None
    """Functional values: path of the module that got it, or of the one that returned it."""
    inputs: tuple[int, ...]
    """Numbers of the values that the module got; none for functional values."""
    shape: tuple[int, ...]
    sketch: Array
    repeats: int | None
    """Number of an earlier value that it equals, as what Dropout returns in eval mode."""

    @property
    def nbytes(self) -> int:
        """Of the whole value."""
        return math.prod(self.shape) * self.sketch.itemsize

    @property
    def functional(self) -> bool:
        """True if code in the forward of `path` computed it, and not a module called there."""
        return self.before is not None


@dataclass(frozen=True)
class Overwriting:
    """An operation in place."""

    number: int
    """Of the value that it left behind."""
    path: str
    """Of the module that did it, or in whose forward it was done."""
    kind: str
    """Class name of the module; empty where code between modules did it."""

    @property
    def text(self) -> str:
        """Who did it."""
        if self.kind:
            return f"{self.path} ({self.kind})"
        return f"code in the forward of {self.path}" if self.path else "the model's own forward"


class Survey:
    """Hears one forward and tells its values apart. Needs tensors with versions: call the model
    outside of inference mode."""

    def __init__(self) -> None:
        self.values: list[ComputedValue] = []
        self.at: list[int] = []
        """Number of the value that was heard at each moment."""
        self.paths: list[str] = []
        """Path of the module at each moment."""
        self.inputs: tuple[int, ...] = ()
        """What the model got, in the order of its arguments."""
        self.outputs: tuple[int, ...] = ()
        """What the model returned, flattened."""
        self.overwritten: dict[int, Overwriting] = {}
        """Values whose memory another one took, by an operation in place."""
        self._latest: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._by_identity: dict[tuple[int, int], tuple[weakref.ref[torch.Tensor], int]] = {}
        self._got: dict[tuple[str, int], tuple[int, ...]] = {}
        self._first: dict[tuple[tuple[int, ...], str, bytes], int] = {}

    def hear(self, moment: Moment, tensor: torch.Tensor) -> None:
        """Take note of a tensor."""
        key = (id(tensor), tensor._version)
        previous, number = self._by_identity.get(key, (None, -1))
        same = previous is not None and previous() is tensor  # ids are used again
        # What a module of its own hands on as it is may be another value in the file.
        handed_on = moment.side == "out" and not moment.composite
        if not same or handed_on:
            number = len(self.values)
            self.values.append(self._value(moment, tensor))
            self._by_identity[key] = (weakref.ref(tensor), number)
            self._note_overwriting(moment, tensor, same=same)
        self.at.append(number)
        self.paths.append(moment.path)
        call = (moment.path, moment.call)
        if moment.side == "in":
            self._got[call] = (*self._got.get(call, ()), number)
        if moment.path == "":
            self.inputs, self.outputs = (
                ((*self.inputs, number), ())
                if moment.side == "in"
                else (self.inputs, (*self.outputs, number))
            )

    def _note_overwriting(self, moment: Moment, tensor: torch.Tensor, *, same: bool) -> None:
        before, earlier = self._latest.get(id(tensor), (None, -1))
        number = len(self.values) - 1
        if before is not None and before() is tensor and not same:
            by_module = moment.side == "out" and not moment.composite
            path = moment.path if by_module or moment.side == "out" else moment.caller
            kind = moment.kind if by_module else ""
            self.overwritten[earlier] = Overwriting(number, path, kind)
        self._latest[id(tensor)] = (weakref.ref(tensor), number)

    def got(self, path: str) -> tuple[int, ...]:
        """Numbers of the values that the first call of a module got."""
        return self._got.get((path, 0), ())

    def _value(self, moment: Moment, tensor: torch.Tensor) -> ComputedValue:
        entering = moment.side == "in"
        functional = (entering or moment.composite) and not (entering and moment.path == "")
        got = () if functional else self._got.get((moment.path, moment.call), ())
        sketched = sketch_of(tensor)
        shape, number = tuple(tensor.shape), len(self.values)
        first = self._first.setdefault((shape, sketched.dtype.str, sketched.tobytes()), number)
        return ComputedValue(
            number=number,
            path=moment.caller if entering else moment.path,
            kind="" if functional else moment.kind,
            call=0 if entering else moment.call,
            before=moment.path if functional else None,
            inputs=got,
            shape=shape,
            sketch=sketched,
            repeats=None if first == number else first,
        )


@lru_cache(maxsize=512)
def places(size: int) -> NDArray[np.int64]:
    """Sorted places of at most `ELEMENTS` of `size` elements.

    Random ones, because a fixed step could hit the same channels only.
    """
    if size <= ELEMENTS:
        return np.arange(size)
    return np.sort(np.random.default_rng(size).integers(0, size, ELEMENTS))


def sketch(array: Array) -> Array:
    """The elements of `array` at its places, shape (at most `ELEMENTS`,), as a copy."""
    picked: Array = array.reshape(-1)[places(array.size)]
    return picked


def sketch_of(tensor: torch.Tensor) -> Array:
    """As `sketch`, of a tensor."""
    import torch

    flat = tensor.detach().reshape(-1)[torch.from_numpy(places(tensor.numel()))]
    array: Array = (flat.float() if flat.dtype == torch.bfloat16 else flat).numpy()
    return array
