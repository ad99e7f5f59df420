"""Listening to the module calls of a forward: every tensor that goes into a module or comes out.

Composite modules are heard too: what they return may come from functional code of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Moment:
    """One tensor at the door of one module call."""

    number: int
    """Counts the moments of a forward, from 0."""
    path: str
    """Of the module; empty for the model itself."""
    kind: str
    """Class name of the module."""
    call: int
    """Counts the calls of the module within the forward, from 0."""
    side: Literal["in", "out"]
    caller: str
    """Path of the module whose forward made the call; of the model itself for the model."""
    composite: bool
    """True if modules were called inside, as far as is known at this moment."""


Hears = Callable[[Moment, torch.Tensor], torch.Tensor | None]
"""What listens: returns a tensor that shall go on instead, or None."""


@contextmanager
def listening(model: nn.Module, hears: Hears) -> Iterator[None]:
    """Inside, `hears` is called for every tensor at every door, in the order of execution.

    For one forward. All hooks are removed afterwards.
    """
    ear = _Ear(hears)
    handles = []
    try:
        for path, module in model.named_modules():
            enter, leave = partial(ear.enter, path), partial(ear.leave, path)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Call:
    path: str
    number: int
    composite: bool = False


class _Ear:
    def __init__(self, hears: Hears) -> None:
        self._hears = hears
        self._moments = 0
        self._counts: Counter[str] = Counter()
        self._open: list[_Call] = []

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._open:
            self._open[-1].composite = True
        self._open.append(_Call(path, self._counts[path]))
        self._counts[path] += 1
        return self._pass(module, (args, kwargs), "in")

    def leave(self, _path: str, module: nn.Module, _args: Any, output: Any) -> Any:
        returned = self._pass(module, output, "out")
        self._open.pop()
        return returned

    def _pass(self, module: nn.Module, tensors: Any, side: Literal["in", "out"]) -> Any:
        """The same with what `hears` exchanged, or None where nothing was."""
        leaves, structure = pytree.tree_flatten(tensors)
        call = self._open[-1]
        caller = self._open[-2].path if len(self._open) > 1 else call.path
        exchanged = False
        for place, leaf in enumerate(leaves):
            if not _is_plain(leaf):
                continue
            moment = Moment(
                self._moments,
                call.path,
                type(module).__name__,
                call.number,
                side,
                caller,
                call.composite,
            )
            other = self._hears(moment, leaf)
            self._moments += 1
            if other is not None:
                leaves[place], exchanged = other, True
        return pytree.tree_unflatten(leaves, structure) if exchanged else None


def _is_plain(leaf: object) -> bool:
    """A dense tensor of bools, integers or real floats."""
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.layout == torch.strided
        and not leaf.is_complex()
        and not leaf.is_quantized
        and not leaf.is_nested
    )
