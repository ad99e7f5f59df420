"""What a model computes of shapes and numbers alone: positions, grids, tables of distances.

It is the same for every input, so whatever an implementation decides on it, it decides always. A
file that decides otherwise than PyTorch (the logarithm of a distance, cut to an integer) gives
other answers to all inputs: that is no rounding that comes and goes, and makes no floor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

_JUMPS = frozenset({"floor", "ceil", "round", "trunc", "fix", "sign", "frac", "fmod", "remainder",
                    "floor_divide", "topk", "sort", "argsort"})  # fmt: skip
"""Operators that give floats and yet decide: the least change of an argument may move them far."""
_LITERAL = "lift_fresh"
"""How a number that is written in the code becomes a tensor, and an array that is given: only the
number has no axis."""


class _Disturbed(Exception):
    """An argument comes from elsewhere: an input, or a weight."""


class Undisturbed:
    """Beside each tensor of such a kind, what it is where nothing was moved."""

    def __init__(self) -> None:
        self._still: Any = WeakIdKeyDictionary()
        self._literal: torch.Tensor | None = None
        """The last one: in inference mode what comes next gets it as another object."""

    def run(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of an operator on what its arguments are where nothing was moved; None where
        one of them is not known, or it draws or overwrites."""
        returns = func._schema.returns  # type: ignore[attr-defined]
        if any(value.alias_info is not None and value.alias_info.is_write for value in returns):
            self._forget(args)
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:  # type: ignore[attr-defined]
            return None
        if name == _LITERAL and not args[0].ndim:
            self._literal = args[0]
            return func(*args, **kwargs)
        try:
            given, named = tree_map(self._of, (args, kwargs))
        except _Disturbed:
            return None
        return func(*given, **named)

    def decides(self, name: str, kwargs: dict[str, Any], still: Any) -> bool:
        """Whether the result is one that jumps: no floats, or floats in steps."""
        return (
            name in _JUMPS
            or kwargs.get("rounding_mode") is not None
            or not any(one.is_floating_point() or one.is_complex() for one in _tensors(still))
        )

    def note(self, returned: Any, still: Any) -> None:
        """Keep `still` beside what was returned in its place."""
        for one, other in zip(_tensors(returned), _tensors(still), strict=True):
            self._still[one] = other

    def _of(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        still = self._still.get(value)
        literal = self._literal
        if still is None and literal is not None and value.data_ptr() == literal.data_ptr():
            return value
        if still is None:
            raise _Disturbed
        return still

    def _forget(self, args: tuple[Any, ...]) -> None:
        """All that shares memory with what is overwritten."""
        written = {one.untyped_storage().data_ptr() for one in _tensors(args[:1])}
        gone = [t for t in self._still if t.untyped_storage().data_ptr() in written]
        for tensor in gone:
            del self._still[tensor]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
