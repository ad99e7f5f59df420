"""What a part is called with and what it gives back, alike for its module and for its file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gate.errors import ModelError
from gate.model.call import Leaf, leaves

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Parameters:
    """Names of the parameters of a module's forward."""

    positional: tuple[str, ...] = ()
    all: tuple[str, ...] = ()
    """In the order of the signature."""

    @classmethod
    def of(cls, module: nn.Module) -> Parameters:
        """None where the signature can't be read."""
        try:
            found = inspect.signature(module.forward).parameters.values()
        except (TypeError, ValueError):
            return cls()
        positional = tuple(one.name for one in found if one.kind in _POSITIONAL)
        return cls(positional, tuple(one.name for one in found))

    def tensors(self, given: Sequence[Any], named: Mapping[str, Any], *, part: str) -> list[Leaf]:
        """What a chain calls the part with, by the arguments that it is given as (`input_1` for
        one without a name), in forward's order, however the call was written.

        Raises ModelError for what is no tensor.
        """
        count = len(self.positional)
        own = [*self.positional[: len(given)], *(f"input_{at}" for at in range(count, len(given)))]
        keywords = sorted(named, key=self._place)
        arguments = dict(zip(own, given, strict=True)) | {name: named[name] for name in keywords}
        for name, value in arguments.items():
            try:
                leaves(value)
            except ModelError as error:
                raise ModelError(
                    f"the chain gives the part {part} {_shown(value)} as {name!r}: a file takes "
                    "tensors alone, in tuples, lists and dicts. Settle it in the module that is "
                    "exported, or make a tensor of it."
                ) from error
        return leaves(arguments)

    def _place(self, name: str) -> int:
        return self.all.index(name) if name in self.all else len(self.all)


@dataclass(frozen=True)
class Interface:
    """Of a part, as its module has it."""

    parameters: Parameters
    form: Any
    """What the module returned to its first call."""


def bound(names: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """For each input of a file the place of its tensor among those that are called `names`: by name
    where all are there, which leaves out what only the module takes, else one after the other."""
    if wanted and set(wanted) <= set(names):
        return [list(names).index(name) for name in wanted]
    return list(range(len(names)))


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 40 else type(value).__name__
