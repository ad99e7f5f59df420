"""Random numbers for every result of a model, taken from two stores that are filled once.

A network has millions of results, and to draw a number for each costs more than its operators do.
So a draw is a stretch of a store that begins at a random place; a long one is made of several. Of
two stretches that overlap, the errors of one would come again in the other. That adds nothing up:
the second half of a store is its first half negated, so that they are as often opposed as alike.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch

_NUMBERS = 1 << 20
_STRETCH = 1 << 18
"""A quarter of the numbers: no number comes twice within it, with either sign."""


class Draws:
    """Reproducible by the seed. Normal and uniform numbers are shared: they are never written."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Standard normal float32 numbers of a shape."""
        return self._taken(_normal(), shape)

    def uniform(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Float32 numbers of a shape, spread evenly between -1 and 1."""
        return self._taken(_uniform(), shape)

    def shares(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Float32 numbers of a shape, spread evenly between 0 and 1, and drawn: not shared."""
        return torch.rand(shape, generator=self._random)

    def _taken(self, store: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        count = math.prod(shape)
        lengths = [_STRETCH] * (count // _STRETCH)
        if rest := count % _STRETCH:
            lengths.append(rest)
        last = len(store) - _STRETCH
        starts = torch.randint(last, (len(lengths),), generator=self._random).tolist()
        taken = [store[start : start + n] for start, n in zip(starts, lengths, strict=True)]
        if len(taken) == 1:
            return taken[0].view(shape)
        return torch.cat(taken).view(shape) if taken else store[:0].view(shape)


@cache
def _normal() -> torch.Tensor:
    return _both_signs(np.random.default_rng(0).standard_normal(_NUMBERS, np.float32))


@cache
def _uniform() -> torch.Tensor:
    return _both_signs(np.random.default_rng(1).random(_NUMBERS, np.float32) * 2.0 - 1.0)


def _both_signs(numbers: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> torch.Tensor:
    with torch.inference_mode(False):  # whoever is first may be inside, others are not
        return torch.from_numpy(np.concatenate([numbers, -numbers]))
